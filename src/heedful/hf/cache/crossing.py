"""What encoder-decoders add to a cache: cross-attention's part, and biases of earlier queries.

The keys and values of a source never change, so that cross-attention's part holds them once, and
beside them the last query rows, where a convolution over queries reads them. A family that adds a
bias to its logits (T5) hands over that of the new queries only: that of the kept rows is kept.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from heedful.eviction import Eviction
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.slots import Meter, nbytes_of
from heedful.hf.versions import hand_over
from heedful.nn import Given, Layer
from heedful.ops import Queries, Visibility


def of_source(visibility: Visibility, target: Bool[Tensor, "B n"] | None, rows: int) -> Visibility:
    """Who of a source's tokens is seen by the last `rows` of a target's.

    Arguments:
        visibility: that of the source, without causal order.
        target: real tokens of the target so far; `None` if all are.
        rows: how many queries there are.
    """
    if visibility.plain and target is None:
        return visibility
    padding = None if target is None else target[:, -rows:]
    return replace(visibility, queries=Queries(padding=padding))


class CrossLayerCache(CacheLayerMixin):
    """One cross-attention layer's part of the cache: the source, and query rows."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, layer: Layer, meter: Meter | None = None) -> None:
        self._past = layer.past_queries
        self.record_past = False
        self.meter = Meter() if meter is None else meter
        self._bytes = 0
        self._clear()

    def _clear(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._rows: Float[Tensor, "B H r D"] | None = None

    @property
    def is_initialized(self) -> bool:
        return self.keys is not None

    @property
    def length(self) -> int:
        """How many tokens of the source it holds."""
        return 0 if self.keys is None else self.keys.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made before there is a source."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take the keys and values of a source, once."""
        hand_over(self, kwargs)
        if self.is_initialized:
            raise ValueError(
                "the cache holds the keys of a source already, and cross-attention was given "
                "another's; call its reset(), or make one with heedful.new_cache(model)"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states.contiguous(), value_states.contiguous()
        self._measure()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From now on query rows are kept until `crop`."""
        self.record_past = True

    def end_past_recording(self) -> None:
        """From now on only the query rows are kept that the next token depends on."""
        if self.record_past:
            self.crop(0)
            self.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the query rows of the target's newest `-tokens_to_remove` tokens."""
        count = -tokens_to_remove
        if count and self._past and not self.record_past:
            raise ValueError(
                f"crop can take back 0 tokens here, asked for {count}: call "
                "activate_past_recording() before the calls that may be undone"
            )
        if self._rows is not None:
            rows = self._rows[:, :, : max(0, self._rows.shape[2] - count)]
            self._rows = rows[:, :, max(0, rows.shape[2] - self._past) :].clone()
        self._measure()

    def reset(self) -> None:
        self._clear()
        self._measure()

    def offload(self) -> None:
        """Stays: a family reads the keys of a source without asking for them."""

    prefetch = offload

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._on_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._on_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._on_rows(lambda x: x[indices.to(x.device)])

    def _on_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values", "_rows"):
            if (x := getattr(self, name)) is not None:
                setattr(self, name, change(x))
        self._measure()

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility,
        target: Bool[Tensor, "B n"] | None,
        scale: float | None,
        given: Given,
    ) -> Float[Tensor, "B H Tq D"]:
        """The layer's output for the new queries, after the kept ones; arguments as of a layer.

        `visibility` is the source's, `target` as for `of_source`.
        """
        if given.bias is not None and self._past:
            raise ValueError(
                f"{type(layer).__name__} needs earlier query rows, and this family adds a bias to "
                "the logits of its cross-attention, which is kept for none; use_cache=False"
            )
        rows = q
        if self._past and self._rows is not None:
            rows = torch.cat([self._rows[:, :, -self._past :], q], dim=2)
        seen = of_source(visibility, target, rows.shape[2])
        out = layer(rows, k, v, visibility=seen, scale=scale, given=given).output
        if self._past:
            every = rows if self._rows is None else torch.cat([self._rows, q], dim=2)
            kept = every if self.record_past else rows[:, :, -self._past :].clone()
            self._rows = kept
            self._measure()
        return out[:, :, -q.shape[2] :]

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the source's keys and values."""
        return nbytes_of([self.keys, self.values])

    def _measure(self) -> None:
        now = nbytes_of([self.keys, self.values, self._rows])
        self.meter.change(now - self._bytes, 0)
        self._bytes = now


class BiasedLayerCache(LayerCache):
    """A self-attention layer's part, in a family that adds a bias to its logits.

    The family counts keys from the row's first one, so that none is let go.
    """

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        policy: Eviction | None = None,
        tokens: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        if policy is not None:
            raise ValueError(
                f"{type(policy).__name__} cannot serve this family, which adds a position bias for "
                "every key of the row in order; use heedful.new_cache(model, eviction=False)"
            )
        super().__init__(layer, sliding, meter=meter)
        self.window = None

    def _clear(self) -> None:
        super()._clear()
        self._bias: Float[Tensor, "#B H r n"] | None = None

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, *, given: Given, **options):
        """As of any family, with the bias of the kept query rows before that of the new ones."""
        every = given.bias
        if self._past and every is not None:
            if self._bias is not None:  # later keys, which a kept row does not see, get zeros
                every = torch.cat([pad(self._bias, (0, q.shape[2])), every], dim=2)
            kept = 0 if self._rows is None else min(self._past, self._rows.shape[2])
            first = every.shape[2] - kept - q.shape[2]
            given = given._replace(bias=every[:, :, first:])
        out = super().attend(layer, q, k, v, given=given, **options)
        if self._past and every is not None:
            self._keep(every)
        return out

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self._bias is not None:
            rows, keys = (n + tokens_to_remove for n in self._bias.shape[2:])
            self._keep(self._bias[:, :, : max(0, rows), :keys])

    def _keep(self, bias: Tensor) -> None:
        """Of the query rows that are kept."""
        rows = 0 if self._rows is None else self._rows.shape[2]
        self._bias = bias[:, :, bias.shape[2] - rows :].detach().clone()
        self._measure()

    def _on_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._bias is not None and len(self._bias) > 1:  # one row serves any batch
            self._bias = change(self._bias)
        super()._on_rows(change)

    def _tensors(self) -> list[Tensor | None]:
        return [*super()._tensors(), self._bias]
