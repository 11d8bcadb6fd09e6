"""The counters of a cache, of tokens and of bytes, and what always holds between them."""

from torch import Tensor


class Counters:
    """Counts of each sequence's tokens so far: all, pending ones, and the prompt's.

    total: tokens that have come and were not taken back by `crop`, evicted ones included; the next
        token's position.
    pending: those of them that came with the last `update` and wait for `attend`.
    prompt: those that came before the first call of a single token after the expected ones.
    prefill: whether that call is still to come.
    expected: how long the prompt is at least, where `generate` has said so.

    Beside them a cache has its `length`: how many tokens' keys it has. The rest was evicted, has
    left every window, or is in summaries alone. What holds:

    * `length <= total` and `pending <= total`; between two calls of the model `pending == 0`.
    * `prompt <= total`, and `prompt == total` while `prefill`.
    * Without a window and a budget `length == total`. With a window of w tokens and r past query
      rows it is at most `w - 1 + r` between two calls, with a budget of n tokens at most `n - 1`;
      while calls can be taken back it grows beyond, by these calls' tokens.
    * `LayerCache`: all streams, the positions, the running state and the policy's scores have
      `length` tokens between two calls. Positions are distinct, and ascending until a token is
      evicted; those of the pending tokens are always the last, in order.
    * `SummaryCache`: `ledger.first <= ledger.opened <= total`, and `length == total -
      ledger.first`.
    * The meter's bytes are the sum of its layers', and a layer's are those of its tensors.

    In cross-attention the tokens are the source's, and none is ever pending or evicted.
    """

    parts = ("total", "pending", "prompt", "expected", "prefill")

    def __init__(self) -> None:
        self.total = self.pending = self.prompt = self.expected = 0
        self.prefill = True

    def add(self, new: int) -> None:
        """Count the tokens of an `update`."""
        if self.prefill and new == 1 and self.total >= max(1, self.expected):
            self.prefill = False
        self.total += new
        self.pending = new
        if self.prefill:
            self.prompt = self.total

    def take_back(self, count: int) -> None:
        """Count the newest tokens no more."""
        self.total -= count
        self.prompt = min(self.prompt, self.total)


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
    sizes = {}
    for x in tensors:
        if x is not None:
            storage = x.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
