"""Bytes of a cache, measured from the storages of its tensors."""

from torch import Tensor


class Meter:
    """Adds up the bytes of a cache's layers.

    nbytes: of all tensors now.
    max_nbytes: the most that this ever was.
    peak_nbytes: the most with the copies that existed for a moment.
    """

    def __init__(self) -> None:
        self.nbytes = self.max_nbytes = self.peak_nbytes = 0

    def change(self, delta: int, transient: int = 0) -> None:
        """Adds `delta` bytes; `transient` more were allocated and freed again, for the peak."""
        self.nbytes += delta
        self.max_nbytes = max(self.max_nbytes, self.nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes + transient)


def nbytes_of(tensors: list[Tensor | None]) -> int:
    """Bytes of the storages, each counted once."""
    storages = [x.untyped_storage() for x in tensors if x is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
