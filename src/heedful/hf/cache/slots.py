"""Room for the tokens of a cache: they are added, moved and dropped without copying the rest."""

from collections.abc import Callable

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from heedful.eviction.selection import Moves

SLACK = 8  # buffers are over-allocated by an eighth
LEAST = 64  # and by so many tokens at least


class Slots:
    """One stream of a layer's tokens, `[B, H, n, D]`, in a buffer with room for more.

    Tokens are added at the end, so the newest are the last and in order. The order of the others
    is the caller's: `move` fills the slots of dropped tokens with others.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.start = self.length = 0
        self.replaced = 0  # bytes of the buffer that the newest `append` has replaced
        self._own = False  # whether nobody else has this tensor
        self._filled = False  # whether `fill` has made it, for calls in any mode

    @property
    def own(self) -> bool:
        """True if no other object has the buffer."""
        return self._own

    def refill(self, tokens: Shaped[Tensor, "B H n D"], room: int, start: int, own: bool) -> None:
        """Take tokens from a file, into a buffer as it was: of `room` tokens, from `start` on."""
        self._take(tokens.new_empty(*tokens.shape[:2], room, tokens.shape[3]), own)
        self.start, self.length = start, tokens.shape[2]
        self.contents.copy_(tokens)

    @property
    def contents(self) -> Shaped[Tensor, "B H n D"] | None:
        """The tokens, as a view."""
        if self.buffer is None:
            return None
        return self.buffer[:, :, self.start : self.start + self.length]

    @property
    def batch(self) -> int | None:
        """Number of sequences; `None` before the first tokens."""
        return None if self.buffer is None else self.buffer.shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        """The buffer, once there are tokens."""
        return [] if self.buffer is None else [self.buffer]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self.buffer is None else self.buffer.untyped_storage().nbytes()

    @property
    def contents_nbytes(self) -> int:
        """Bytes of the tokens, without room for later ones."""
        return self.token_nbytes * self.length

    @property
    def token_numbers(self) -> int:
        """Number of elements that one token of every sequence has."""
        if self.buffer is None:
            return 0
        batch, heads, _, dim = self.buffer.shape
        return batch * heads * dim

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token of every sequence, as the model gave it."""
        return 0 if self.buffer is None else self.token_numbers * self.buffer.element_size()

    @property
    def copy_nbytes(self) -> int:
        """Bytes of a copy that reading the contents makes."""
        return 0

    def append(self, new: Shaped[Tensor, "B H m D"], limit: int | None = None) -> bool:
        """Add tokens; beyond `limit` tokens no room is made for later ones.

        Returns:
            Whether there is a new buffer.
        """
        if self.buffer is None:
            self._begin(new, limit)
            return True
        buffer, length, count = self.buffer, self.length, new.shape[2]
        self.replaced = 0
        if (new.requires_grad or buffer.requires_grad) and torch.is_grad_enabled():
            self.replaced = self.nbytes
            self._take(torch.cat([self.contents, new], dim=2), own=False)
            return True
        end = self.start + length
        larger = not self._own or end + count > buffer.shape[2]
        larger = larger or (buffer.is_inference() and self._shared)
        if larger:
            size, self.replaced = length + count, self.nbytes
            roomy = _roomy(size)
            self._resize(roomy if limit is None else max(size, min(roomy, limit)))
            end = length
        self.buffer[:, :, end : end + count] = new
        self.length += count
        return larger

    def _begin(self, new: Shaped[Tensor, "B H m D"], limit: int | None) -> None:
        """Take the first tokens as they are: most calls of a model are the only one.

        The next call makes room. But a part of a larger tensor (of queries, keys and values in one)
        is copied, since it would keep all of that.
        """
        whole = new.untyped_storage().nbytes() == new.numel() * new.element_size()
        if whole or (new.requires_grad and torch.is_grad_enabled()):
            self._take(new, own=False)
        else:
            room = new.shape[2] if limit is None else max(limit, new.shape[2])
            self._take(new.new_empty(*new.shape[:2], room, new.shape[3]), own=True)
            self.length = new.shape[2]
            self.contents.copy_(new)

    def drop_first(self, count: int) -> None:
        """Drop the first tokens; their room is used again when the end is reached."""
        self.start += count
        self.length -= count

    def drop_last(self, count: int) -> None:
        """Drop the newest tokens."""
        self.length -= count

    def move(self, moves: Moves, limit: int | None = None) -> int:
        """Move tokens and drop the last slots, as `moves` says; returns the bytes of a new buffer.

        Where the buffer is much larger than `limit` tokens, what stays goes into a smaller one;
        without a limit, where it is much larger than what stays with its usual room.
        """
        batch, heads, _, dim = self.buffer.shape
        moves = moves.on(self.buffer.device)

        def spread(index: Tensor) -> Tensor:
            return index[:, None, :, None].expand(batch, heads, -1, dim)

        length = moves.left
        limit, copied = _roomy(length) if limit is None else limit, 0
        if not self._own or self.buffer.shape[2] > limit + max(1, limit // SLACK):
            smaller = self.buffer.new_empty(*self.buffer.shape[:2], limit, dim)
            smaller[:, :, :length] = self.contents.gather(2, spread(moves.keep))
            self.buffer, self.start, self._own = smaller, 0, True
            copied = self.nbytes  # for a moment both are there
        elif moves.to.shape[1] == 1:  # the last token fills the hole
            self.put(moves.to, self.contents[:, :, length:].clone())
        else:
            contents = self.contents
            contents.scatter_(2, spread(moves.to), contents.gather(2, spread(moves.source)))
        self.length = length
        return copied

    def put(self, slots: Int[Tensor, "#B 1"], new: Shaped[Tensor, "B H 1 D"]) -> None:
        """Replace the token in one slot of each sequence; nothing is copied or resized."""
        # A compiled graph cannot know whether a tensor is of inference mode.
        if not self._filled and (not self._own or (self.buffer.is_inference() and self._shared)):
            self._resize(self.buffer.shape[2])
        if slots.shape[0] == 1:
            self.buffer.index_copy_(2, slots[0] + self.start if self.start else slots[0], new)
        else:
            self.contents.scatter_(2, slots[:, None, :, None].expand_as(new), new)

    def replace(self, tokens: Shaped[Tensor, "B H n D"]) -> None:
        """Replace the tokens by as many others."""
        if self._shared:
            self._resize(self.buffer.shape[2])
        self.contents.copy_(tokens)

    def extended(self, new: Shaped[Tensor, "B H m D"]) -> "Slots":
        """The tokens followed by new ones, in a tensor of their own; nothing changes here."""
        joined = Slots()
        tokens = new if not self.length else torch.cat([self.contents, new], dim=2)
        joined._take(tokens, own=False)
        return joined

    def take(self, tokens: "Slots", keep: Int[Tensor, "#B m"], limit: int | None = None) -> None:
        """Replace all tokens by some of others, with room for `limit` tokens.

        Arguments:
            tokens: those that are chosen from.
            keep: their slots, in the order that they have here.
            limit: for how many tokens a new buffer has room, `m` by default.
        """
        source, length, self._filled = tokens.contents, keep.shape[1], False
        batch, heads, _, dim = source.shape
        if self._shared or self.buffer is None or self.buffer.shape[2] < length:
            self.buffer = source.new_empty(batch, heads, max(length, limit or 0), dim)
            self._own = True
        self.start, self.length = 0, length
        if len(keep) == 1:
            kept = source.index_select(2, keep[0])
        else:
            kept = source.gather(2, keep[:, None, :, None].expand(batch, heads, -1, dim))
        self.contents.copy_(kept)

    def fill(self, room: int) -> None:
        """Use all slots of a buffer of `room` tokens; those without a token are zero.

        A compiled graph may change it, in inference mode or not.
        """
        old, length = self.contents, self.length
        if not self._own or self.start or old.is_inference() or self.buffer.shape[2] != room:
            batch, heads, _, dim = old.shape
            with torch.inference_mode(False):
                self._take(old.new_empty(batch, heads, room, dim), own=True)
            self.buffer[:, :, :length] = old
        self.buffer[:, :, length:] = 0
        self.length, self._filled = room, True
        torch._dynamo.mark_static_address(self.buffer)  # as CUDA graphs need

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer by a function of it, such as a choice of sequences."""
        if self.buffer is not None:
            self.buffer, self._own = change(self.buffer), True

    @property
    def _shared(self) -> bool:
        """True if the buffer must not be written to: another object has it, or inference mode."""
        return not self._own or (
            self.buffer.is_inference() and not torch.is_inference_mode_enabled()
        )

    def _take(self, tensor: Tensor, own: bool) -> None:
        self.buffer, self.start, self.length, self._own = tensor, 0, tensor.shape[2], own

    def _resize(self, size: int) -> None:
        batch, heads, _, dim = self.buffer.shape
        larger = self.buffer.new_empty(batch, heads, size, dim)
        larger[:, :, : self.length] = self.contents
        self.buffer, self.start, self._own = larger, 0, True


def _roomy(size: int) -> int:
    """Slots for so many tokens and some to come."""
    return size + max(LEAST, size // SLACK)
