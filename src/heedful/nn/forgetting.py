"""Forgetting attention: every token lets a head forget some of all that came before it."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from heedful.checks import UserError, check_choice
from heedful.nn.layer import (
    NO_INPUTS,
    LayerInputs,
    LayerOutput,
    Maps,
    Stream,
    check_defaults,
    check_inputs,
    parameter,
)
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility
from heedful.ops.common.few import FEW
from heedful.ops.common.precision import cast_inputs, without_autocast
from heedful.ops.common.standard import with_positive_scale

# fp16 ends at 65,504, and a long sequence forgets more than that: queries take a part, up to 2^15.
_FP16_SHARE, _FP16_MOST = 2.0**10, 2.0**15

_ORDER = (
    "forget gates add up from a key to a later query of the same sequence; use forgetting "
    "attention in causal self-attention, without images"
)


@dataclass(frozen=True)
class Forgetting:
    r"""Standard attention with a forget gate per head and token, summed along the keys.

    $$ \mathrm{softmax}_j\Big(s\, q_i \cdot k_j + \sum_{l=j+1}^{i} \log f_l\Big)\, v_j, \qquad
       f_l = \sigma(x_l w + b) $$

    Arguments:
        start: `"published"` starts from random w and b = 0, gates near one half; `"identity"`
            multiplies every log f by one more number per head, which starts at zero, so that a
            converted model is unchanged up to rounding.

    Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate",
        arXiv 2503.02130; the start is that of the authors' code.
    """

    start: Literal["published", "identity"] = "published"

    def __post_init__(self) -> None:
        check_choice("start", self.start, ("published", "identity"))

    def build(self, shape: HeadShape) -> "ForgettingAttention":
        """The layer for one attention module."""
        return ForgettingAttention(self, shape)


class ForgettingAttention(StandardAttention):
    """The forget gates of one layer; SDPA with more channels, and F per key and head in a cache.

    F is how much a key has been forgotten, the sum of -log f of all later tokens: zero at first,
    never less than before. It is taken from the logits, as selective attention's is.
    """

    any_heads = False
    takes = frozenset({"bias", "dropout"})
    needs = frozenset({"input"})
    streams = (Stream("F", running=True),)

    def __init__(self, config: Forgetting, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config, self.roles = config, frozenset({"decoder"})
        self.forget = WideLinear(shape.hidden, shape.heads)
        self.strength = parameter(shape.heads) if config.start == "identity" else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights normal with std 0.02, biases zero, and strengths zero."""
        nn.init.normal_(self.forget.weight, std=0.02)
        self.forget.bias.zero_()
        if self.strength is not None:
            self.strength.zero_()

    def forward(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        inputs: LayerInputs = NO_INPUTS,
    ) -> LayerOutput:
        """Attention to what is not forgotten; `state` is F of every key."""
        decay = self.decay(k.shape[2], visibility, inputs)
        state = _forgotten(decay, inputs.state)
        q, k, v = cast_inputs(q, k, v)
        queries, dim = q.shape[2], v.shape[3]
        if queries <= FEW and queries < k.shape[2]:
            # Cached decoding: no copy of the cache, and numbers of the size of F.
            inputs = self._biased(inputs, decay, queries)
            out = super().forward(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
            return LayerOutput(out.output, state)
        scale = self.shape.dim**-0.5 if scale is None else scale
        q, scale = with_positive_scale(q, scale)
        q, k, scale = _folded(q, k, _totals(decay, inputs.state), scale)
        # On a CPU, torch's kernel takes values as wide as keys; of others it would store the map.
        v = pad(v, (0, k.shape[3] - dim))
        out = super().forward(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
        return LayerOutput(out.output[..., :dim], state)

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The softmax, per head, and how much each token lets the head forget of earlier ones."""
        decay = self.decay(k.shape[2], visibility, inputs)
        biased = self._biased(inputs, decay, q.shape[2])
        weights = super().maps(q, k, visibility=visibility, scale=scale, inputs=biased).weights
        row = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=k.device)
        earlier = torch.arange(k.shape[2], device=k.device) < row[:, None]
        return Maps(weights, decay[:, :, -q.shape[2] :, None] * earlier)

    def decay(
        self, keys: int, visibility: Visibility | None, inputs: LayerInputs
    ) -> Float[Tensor, "B H n"]:
        """-log f of the tokens that came after those of the state, in fp32 at least; 0 of padding.

        So a padded sequence is the sequence alone, wherever the padding stands.
        """
        check_inputs(self, inputs)
        if visibility is not None:
            check_defaults(visibility, ("causal", "mutual", "queries"), _ORDER)
        new = keys - (0 if inputs.state is None else inputs.state.shape[2])
        if inputs.input.shape[1] < new:
            raise UserError(
                f"inputs.input must hold all {new} tokens since inputs.state, whose gates add up, "
                f"got {inputs.input.shape[1]}"
            )
        tokens = inputs.input[:, inputs.input.shape[1] - new :]
        # Under autocast too: what half precision rounds off each gate, a long sum adds up.
        decay = softplus(-without_autocast(self.forget)(tokens)).transpose(1, 2)
        if self.strength is not None:
            # The size of the strength, with a slope at zero: nothing is ever the more remembered,
            # and a head that is pushed below zero comes back.
            size = torch.where(self.strength < 0, -self.strength, self.strength)
            decay = decay * size[:, None].to(decay.dtype)
        padding = None if visibility is None else visibility.padding
        documents = None if visibility is None else visibility.documents
        if padding is not None:
            decay = decay * padding[:, None, keys - new :]
        if documents is not None:
            decay = decay * (documents >= 0)[:, None, keys - new :]
        return decay

    def _biased(
        self, inputs: LayerInputs, decay: Float[Tensor, "B H n"], queries: int
    ) -> LayerInputs:
        """The inputs with -F of these rows as part of the family's bias: for few rows, or maps."""
        total = decay.cumsum(2)
        rows = total[:, :, -queries:, None]
        f = rows - total[:, :, None]
        # It is negative for later keys alone, which are not seen. Clamp may have no slope at zero,
        # where a head that has not learnt to forget is.
        f = f.masked_fill(f < 0, 0)
        if inputs.state is not None:
            f = torch.cat([inputs.state[:, :, None] + rows, f], dim=3)
        return inputs.with_bias(-f)


def _forgotten(
    decay: Float[Tensor, "B H n"], state: Float[Tensor, "B H Ts"] | None
) -> Float[Tensor, "B H Tk"]:
    """F of every key after these tokens."""
    total = decay.cumsum(2)
    last = total[:, :, -1:]
    return last - total if state is None else torch.cat([state + last, last - total], dim=2)


def _totals(
    decay: Float[Tensor, "B H n"], state: Float[Tensor, "B H Ts"] | None
) -> Float[Tensor, "B H Tk"]:
    """The sum of -log f up to every key, counted from the first token after those of the state.

    F is the difference of a query's and a key's. In fp64 where there is one: near tokens differ by
    little in sums that grow with the sequence.
    """
    total = (decay if decay.device.type == "mps" else decay.double()).cumsum(2)
    return total if state is None else torch.cat([-state.to(total), total], dim=2)


def _folded(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    totals: Float[Tensor, "B H Tk"],
    scale: float,
) -> tuple[Float[Tensor, "B H Tq wide"], Float[Tensor, "B Hk Tk wide"], float]:
    """Queries and keys with channels whose products are -F, to a multiple of eight; the scale.

    A key head has channels for each query head of its group. A total is the sum of several numbers,
    the first of which cancel where they are nearly equal. They stand before the family's channels:
    a kernel that adds products in their order rounds off nothing of these.
    """
    group = q.shape[1] // k.shape[1]
    # A power of two near 1 / scale is exact in any precision; the totals take the rest.
    unit = 2.0 ** round(-math.log2(scale))
    if q.dtype in (torch.float32, torch.float64):
        # So that a kernel which scales the queries first rounds off nothing of the totals.
        q, scale = q * (scale * unit), 1 / unit
    elif q.dtype == torch.float16:
        unit = min(unit * _FP16_SHARE, _FP16_MOST)
    totals = totals / (scale * unit)
    # The term of a query is the same for all of its keys, so no weight has a gradient by it.
    of_rows = _pieces(-totals[:, :, -q.shape[2] :].detach()[..., None], q.dtype)
    of_keys = _pieces(totals.unflatten(1, (-1, group)).transpose(2, 3), k.dtype)
    own = unit * torch.eye(group, dtype=q.dtype, device=q.device).repeat(k.shape[1], 1)
    own = own[None, :, None].expand(q.shape[0], -1, q.shape[2], -1)
    units = k.new_full((*k.shape[:3], 1), unit)
    q = torch.cat([*(x for row in of_rows for x in (own, row)), q], dim=3)
    k = torch.cat([*(x for key in of_keys for x in (key, units)), k], dim=3)
    spare = -q.shape[3] % 8
    return pad(q, (0, spare)), pad(k, (0, spare)), scale


def _pieces(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a precision whose sum is `x`: two of fp32, three of half precision.

    The first one has the gradient.
    """
    pieces = [x.to(dtype)]
    for _ in range({torch.float64: 0, torch.float32: 1}.get(dtype, 2)):
        x = (x - pieces[-1].to(x.dtype)).detach()
        pieces.append(x.to(dtype))
    return pieces
