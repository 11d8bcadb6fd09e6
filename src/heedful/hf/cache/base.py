"""One attention layer's cache: what all kinds of it share, and what transformers asks of it."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from heedful.checks import UserError
from heedful.hf.cache.budget import Budget
from heedful.hf.cache.counters import Counters, Meter, nbytes_of
from heedful.hf.cache.owner import Owner
from heedful.hf.versions import hand_over
from heedful.nn import Layer
from heedful.ops import Visibility


class AttentionCache(CacheLayerMixin):
    """One attention layer's part of a KV cache.

    `update` adds the keys and values of new tokens, `attend` gives the layer's output for them.

    Arguments:
        layer: the layer that it belongs to.
        meter: counts the whole cache's bytes; `None` makes one.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    reads_positions = False
    """Whether `attend` needs the positions of the new tokens."""
    window: int | None = None
    _aside = 0
    budget: Budget | None = None

    def __init__(self, layer: Layer, meter: Meter | None = None) -> None:
        self._owner = Owner(layer)
        self.record_past = False
        self.meter, self._nbytes = Meter() if meter is None else meter, 0
        self._clear()

    # What a kind of cache defines.

    @property
    @abstractmethod
    def batch(self) -> int | None:
        """Number of sequences it has tokens of; `None` before the first call."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of cached tokens of each sequence."""

    @property
    @abstractmethod
    def whole_nbytes(self) -> int:
        """Bytes that it would take if nothing were evicted, without room for later tokens."""

    @property
    @abstractmethod
    def bf16_nbytes(self) -> int:
        """Bytes of keys and values in bfloat16, if nothing were evicted, without reserve."""

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of the room for later tokens."""
        return 0

    @abstractmethod
    def _clear(self) -> None:
        """Begin anew."""
        self.counters = Counters()

    @abstractmethod
    def _tensors(self) -> list[Tensor | None]:
        """All that it keeps, for measuring."""

    @abstractmethod
    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it that acts on the batch dimension."""

    @abstractmethod
    def _undoable(self) -> int:
        """Number of the newest tokens that can be taken back."""

    @abstractmethod
    def _take_back(self, count: int) -> None:
        """Take back the newest tokens, and forget what taking back more would need."""

    # What transformers asks of a layer.

    @property
    def is_initialized(self) -> bool:
        return self.batch is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made before there are tokens."""

    def get_seq_length(self) -> int:
        """Tokens so far, evicted ones included: positions go on from here."""
        return self.counters.total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if all tokens were there; `attend` takes its part of the mask."""
        return self.counters.total + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From now on nothing is evicted before `crop`, which can take back the last calls."""
        self.record_past = True

    def end_past_recording(self) -> None:
        """From now on what a window or a budget has no room for is evicted again."""
        if self.record_past:
            self.crop(0)
            self.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens.

        Raises:
            ValueError: the number is positive, or more than can be taken back.
        """
        count = -int(tokens_to_remove)  # some callers have the number in a tensor
        undoable = self._undoable()
        if count < 0:
            raise UserError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        if count > undoable:
            advice = ": call activate_past_recording() before the calls that may be undone"
            if self.record_past or undoable == self.counters.total:
                advice = ""
            raise UserError(f"crop can take back {undoable} tokens here, asked for {count}{advice}")
        self._take_back(count)
        self._measure()

    def reset(self) -> None:
        self._clear()
        self._measure()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self._map_tensors(change)
        self._measure()

    # What kinds of cache have in common.

    def check_between_calls(self) -> None:
        """Raise where a call is under way, or may be taken back."""
        if self.counters.pending or self.record_past:
            raise UserError(
                "save needs a cache between two calls, and this one is in a call, or records those "
                "that may be taken back; call end_past_recording() of its layers, or reset()"
            )

    def resume(self, device: torch.device) -> None:
        """Go on from what a file has filled in, on this device."""
        self.device = device
        self._measure()

    def positions(self) -> Int[Tensor, "B n"]:
        """Positions of the cached tokens in their sequences, ascending."""
        if self.batch is None:
            return torch.empty(0, 0, dtype=torch.int64)
        total = self.counters.total
        return torch.arange(total - self.length, total, device=self.device).expand(self.batch, -1)

    def count_cached(self, real: Bool[Tensor, "B n"] | None) -> Int[Tensor, "B 1"] | int:
        """Count the cached tokens of each sequence.

        Arguments:
            real: which of all tokens so far count; `None` where all do.
        """
        if real is None:
            return self.length
        return real.gather(1, self.positions().to(real.device)).sum(1, keepdim=True)

    def is_of(self, layer: Layer) -> bool:
        """Test whether the cache belongs to that layer already."""
        return self._owner.layer() is layer

    def check_owner(self, layer: Layer) -> None:
        """Raise unless the cache belongs to that layer; one from a file does from now on."""
        self._owner.check(layer, used=self.counters.total > 0)

    def expect(self, visibility: Visibility | None) -> None:
        """Let it know, before an `update`, who sees whom among all tokens then; few need it."""

    def _begin_update(self, key_states: Tensor, options: dict) -> None:
        """Begin an `update`, whose keywords are `options`."""
        hand_over(self, options)
        if self._check_batch(key_states.shape[0]) is None:
            self.dtype, self.device = key_states.dtype, key_states.device

    def _check_batch(self, batch: int) -> int | None:
        """Raise unless a call of so many sequences fits; returns how many there are."""
        cached = self.batch
        if cached is not None and cached != batch:
            raise UserError(
                f"the cache has a batch of {cached} sequences and the call has {batch}; use "
                "batch_select_indices or batch_repeat_interleave, or a new cache"
            )
        return cached

    def _measure(self, *, most: int = 0, copied: int = 0) -> None:
        """Tell the meter what the tensors take now.

        For a moment it was `most` in all, or `copied` more than now.
        """
        nbytes = nbytes_of(self._tensors())
        self.meter.change(nbytes - self._nbytes, max(copied, most - nbytes))
        self._nbytes = nbytes


def check_unrecorded(does: str, other: str) -> None:
    """Raise while gradients are recorded, for a cache that `does` what has none; `other` works."""
    if torch.is_grad_enabled():
        raise UserError(
            f"the cache {does} tokens, which has no gradients: call the model under "
            f"torch.no_grad(), or with {other}"
        )
