"""One attention layer's cache: what all kinds of it share, and what transformers asks of it."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from heedful.checks import UserError
from heedful.eviction import Eviction
from heedful.eviction.policy import Budget
from heedful.hf.cache.counters import Counters, Meter, nbytes_of
from heedful.hf.cache.int8 import Int8Slots
from heedful.hf.cache.owner import Owner
from heedful.hf.cache.rows import PastRows
from heedful.hf.cache.slots import Slots
from heedful.hf.cache.streams import KEYS, VALUES, Numbers, Streams
from heedful.hf.cache.summary_state import SummaryUndo
from heedful.hf.cache.undo import Undo
from heedful.hf.versions import hand_over
from heedful.nn import Layer
from heedful.ops import Visibility


class CacheLayer(CacheLayerMixin):
    """One attention layer's part of a cache: streams of tokens, their number and their bytes.

    Attributes:
        meter: counts the whole cache's bytes.
        counters: of the tokens.
        batch: number of sequences that it has tokens of; `None` before the first call.
        length: number of cached tokens of each sequence.
        window: how far back queries see; `None` for all tokens.
        budget: which tokens are evicted when; `None` keeps all that a window shows.
        int8: whether tokens are stored as int8.
        record_past: whether calls can be taken back, so that nothing is evicted before `crop`.
    """

    is_compileable = is_sliding = False
    is_croppable = True
    meter: Meter
    counters: Counters
    batch: int | None
    length: int
    window: int | None = None
    budget: Budget | None = None
    int8 = False
    _streams: Streams
    _nbytes = 0

    @abstractmethod
    def positions(self) -> Int[Tensor, "B n"]:
        """Positions of the cached tokens in their sequences, ascending."""

    @abstractmethod
    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it that acts on the batch dimension."""

    @abstractmethod
    def _measure(self) -> None:
        """Tell the meter what the tensors take now."""

    def _new_stream(self) -> Slots | Int8Slots:
        return Int8Slots() if self.int8 else Slots()

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
        """As if all tokens were there; attention takes its part of the mask."""
        return self.counters.total + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Keys and values go to the CPU; what the mechanism keeps beside is small and stays."""
        for name in (KEYS, VALUES):
            self._streams[name].map_batch(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        for name in (KEYS, VALUES):
            self._streams[name].map_batch(lambda x: x.to(self.device, non_blocking=True))

    # What a cache of heedful tells.

    @property
    def policy(self) -> Eviction | None:
        """The choice of tokens to evict; `None` where only a window drops tokens, if any."""
        return None if self.budget is None else self.budget.policy

    @property
    def keys(self) -> Float[Tensor, "B Hk n D"] | None:
        """Keys in the slots that are in use."""
        return self._streams[KEYS].contents

    @property
    def values(self) -> Float[Tensor, "B Hk n Dv"] | None:
        return self._streams[VALUES].contents

    def count_cached(self, real: Bool[Tensor, "B n"] | None) -> Int[Tensor, "B 1"] | int:
        """Count the cached tokens of each sequence.

        Arguments:
            real: which of all tokens so far count; `None` where all do.
        """
        if real is None:
            return self.length
        return real.gather(1, self.positions().to(real.device)).sum(1, keepdim=True)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of all that is cached per token, if no token were evicted or quantized."""
        return self._streams.token_nbytes * self._whole_length

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of keys and values in bfloat16, if no token were evicted, without reserve."""
        return 2 * self._streams.token_numbers * self._whole_length

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of the room for later tokens."""
        return self._streams.reserve_nbytes

    @property
    def _whole_length(self) -> int:
        """Number of tokens that would be cached without eviction."""
        total = self.counters.total
        return total if self.window is None else min(total, self.window - 1)

    def resume(self, device: torch.device) -> None:
        """Go on from what a file has filled in, on this device."""
        self.device = device
        self._measure()


class AttentionCache(CacheLayer):
    """A layer's part of the cache of a converted model.

    `update` adds the keys and values of new tokens, `attend` gives the layer's output for them.

    Arguments:
        layer: the layer that it belongs to.
        meter: counts the whole cache's bytes; `None` makes one.
    """

    reads_positions = False
    """True if `attend` needs the positions of the new tokens."""
    _aside = 0

    def __init__(self, layer: Layer, meter: Meter | None = None) -> None:
        self._owner = Owner(layer)
        self.record_past = False
        self.meter = Meter() if meter is None else meter
        self._clear()

    # What a kind of cache defines.

    def _clear(self) -> None:
        """Begin anew."""
        self.counters = Counters()
        self._streams = Streams({KEYS: self._new_stream(), VALUES: self._new_stream()})
        self._numbers: list[Numbers] = []  # those of the streams
        self._tails: dict[str, PastRows] = {}
        self._undo: Undo | SummaryUndo | None = None  # of calls that can be taken back

    @abstractmethod
    def _undoable(self) -> int:
        """Number of the newest tokens that can be taken back."""

    @abstractmethod
    def _take_back(self, count: int) -> None:
        """Take back the newest tokens, and forget what taking back more would need."""

    @property
    def batch(self) -> int | None:
        return self._streams[KEYS].batch

    @property
    def length(self) -> int:
        return self._streams[KEYS].length

    def positions(self) -> Int[Tensor, "B n"]:
        if (at := self._streams.positions) is not None:
            return at.sort(1).values
        if self.batch is None:
            return torch.empty(0, 0, dtype=torch.int64)
        total = self.counters.total
        return torch.arange(total - self.length, total, device=self.device).expand(self.batch, -1)

    def activate_past_recording(self) -> None:
        """From now on nothing is evicted before `crop`, which can take back the last calls."""
        if not self.is_croppable:
            raise UserError(
                f"{type(self.policy).__name__} cannot take tokens back, as assisted decoding asks: "
                "its scores add up over queries; decode without, or with another policy"
            )
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
        count, undoable = removed(tokens_to_remove), self._undoable()
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

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self._map_tensors(change)
        self._measure()

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        self._streams.map_batch(change)
        for tail in self._tails.values():
            tail.map_batch(change)
        if self._undo is not None:
            self._undo = self._undo.map_batch(change)

    # What kinds of cache have in common.

    def check_between_calls(self) -> None:
        """Raise where a call is under way, or may be taken back."""
        if self.counters.pending or self.record_past:
            raise UserError(
                "save needs a cache between two calls, and this one is in a call, or records those "
                "that may be taken back; call end_past_recording() of its layers, or reset()"
            )

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

        For a moment it was `most` in all, or `copied` more than now. Copies of quantized tokens,
        which attention reads, are there as long as a call lasts.
        """
        self._aside = nbytes_of(self._tensors_aside())
        nbytes = nbytes_of(self._tensors())
        copied += self._streams.copy_nbytes
        self.meter.change(nbytes - self._nbytes, max(copied, most - nbytes))
        self._nbytes = nbytes

    def _measure_call(self) -> None:
        """As `_measure`, where the buffers of tokens are the same as before."""
        if self.int8:
            self._measure()
            return
        before, self._aside = self._aside, nbytes_of(self._tensors_aside())
        self.meter.change(self._aside - before)
        self._nbytes += self._aside - before

    def _tensors(self) -> list[Tensor | None]:
        """All that it keeps."""
        return [*self._streams.tensors, *[x.rows for x in self._tails.values()]]

    def _tensors_aside(self) -> list[Tensor | None]:
        """Those of them that change their size in every call."""
        rows = [x.rows for x in self._tails.values()]
        return [*[x.contents for x in self._numbers], *rows]


def removed(tokens_to_remove: int) -> int:
    """Number of tokens that `crop` takes back, of its argument."""
    count = -int(tokens_to_remove)  # some callers have the number in a tensor
    if count < 0:
        raise UserError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
    return count


def check_unrecorded(does: str, other: str) -> None:
    """Raise while gradients are recorded, for a cache that `does` what has none; `other` works."""
    if torch.is_grad_enabled():
        raise UserError(
            f"the cache {does} tokens, which has no gradients: call the model under "
            f"torch.no_grad(), or with {other}"
        )
