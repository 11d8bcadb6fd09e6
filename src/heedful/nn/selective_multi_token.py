"""Multi-token attention of low rank whose tokens mask earlier ones, in one layer."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from heedful.nn.layer import (
    NO_INPUTS,
    TERMS,
    LayerInputs,
    LayerOutput,
    Maps,
    Step,
)
from heedful.nn.multi_token import LowRankAttention, MultiToken
from heedful.nn.selective import OwnSelector, Selective, masked_maps
from heedful.nn.shape import HeadShape
from heedful.ops import LowRank, Visibility, selective_attention
from heedful.ops.common.tiles import spread_heads
from heedful.ops.mta.flash import HeadGroups
from heedful.ops.mta.low_rank import key_filter, query_filter
from heedful.ops.mta.reference import mix_heads


@dataclass(frozen=True)
class SelectiveMultiToken:
    """Logits of convolved maps, from which F is subtracted, in every layer.

    Kernels are of low rank and look back alone, so that a filtered key is final when it enters a
    cache, and any token may leave it.

    Arguments:
        conv: size of the kernels before the softmax, queries and keys that they look back.
        rank: of the kernels.
        post_mix: how many key heads a group of mixed heads has, one head of each; `None` mixes
            none.
        dim: channels of the selector's queries and keys; by default those of a head.
        protect_first: keep the first token of every document from being masked.
    """

    conv: tuple[int, int] = (6, 6)
    rank: int = 2
    post_mix: int | None = 2
    dim: int | None = None
    protect_first: bool = True

    def __post_init__(self) -> None:
        _ = self.multi_token, self.selective  # they check what they get

    @property
    def multi_token(self) -> MultiToken:
        """The part that is multi-token attention."""
        return MultiToken(self.conv, None, 1, None, self.post_mix, rank=self.rank, centred=False)

    @property
    def selective(self) -> Selective:
        """The part that is selective attention."""
        return Selective("extra", protect_first=self.protect_first, dim=self.dim)

    def build(self, shape: HeadShape) -> "SelectiveLowRankAttention":
        """The layer for one attention module."""
        return SelectiveLowRankAttention(self, shape)


class _Wide(NamedTuple):
    """Queries, keys and values of wide heads; keys and values of as many."""

    q: Float[Tensor, "B H Tq RD"]
    k: Float[Tensor, "B Hk Tk RD"]
    v: Float[Tensor, "B Hk Tk W"] | None


class SelectiveLowRankAttention(OwnSelector, LowRankAttention):
    r"""Kernels of low rank, head mixing and an own selector of one layer.

    $$ O_n = \sum_m W_{nm}\, \mathrm{softmax}(\textstyle\sum_r \tilde q^r_m \cdot \tilde k^r s - F)
       \, V_n $$

    which is selective attention of wide heads, its outputs mixed. A decoder's alone. At first F is
    zero and the kernels are the identity.
    """

    roles = frozenset({"decoder"})
    takes = TERMS
    reports_memory = True
    takes_steps = False

    def __init__(self, config: SelectiveMultiToken, shape: HeadShape) -> None:
        super().__init__(config.multi_token, shape)
        self.masking, self.keeps_first = config.selective, config.protect_first
        self.add_selector(self.masking)
        self.reset_selector(self.masking)

    def reset_parameters(self) -> None:
        """As of both parts."""
        super().reset_parameters()
        if hasattr(self, "query"):  # not while the first part is made
            self.reset_selector(self.masking)

    def forward(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk Dk"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        inputs: LayerInputs = NO_INPUTS,
    ) -> LayerOutput:
        """Attention with what earlier tokens have masked; `state` is F of every key."""
        visibility = Visibility() if visibility is None else visibility
        selector_q, selector_k = self.own_selector(q, inputs)
        wide, groups = self._wide(q, k, v, visibility, inputs), self._groups()
        result = selective_attention(
            *wide, selector_q=selector_q, selector_k=selector_k, state=inputs.state, tau=self.tau,
            protect_first=self.keeps_first, bias=inputs.bias, softcap=inputs.softcap,
            sinks=inputs.sinks, dropout_p=inputs.dropout, visibility=visibility,
            scale=q.shape[3] ** -0.5 if scale is None else scale, impl=self.impl,
        )  # fmt: skip
        out = result.output
        if groups is not None:
            out = groups.mixed(out, self.post_mix, v.shape[3]).to(q.dtype)
        return LayerOutput(out, result.state, result.memory)

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The map that multiplies the values, per head, and what masks what."""
        terms, selectors = inputs.terms(q, visibility, scale), self.own_selector(q, inputs)
        wide = self._wide(q, k, None, terms.visibility, inputs)
        found = masked_maps(wide.q, wide.k, selectors, self.masking, inputs.state, terms)
        if self.post_mix is None:
            return found
        return found._replace(weights=mix_heads(found.weights, self.post_mix, self.shape.key_heads))

    def steps(
        self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS
    ) -> list[Step]:
        """None: the maps on the way are not those of narrow heads."""
        return []

    def _wide(
        self, q: Tensor, k: Tensor, v: Tensor | None, visibility: Visibility, inputs: LayerInputs
    ) -> _Wide:
        """The tensors of a call as selective attention takes them."""
        conv = None if self.u is None else LowRank(self.u, self.w, self.config.centred)
        newest, queries, groups = inputs.newest, q.shape[2], self._groups()
        if conv is not None and newest is None:
            segments = visibility.segments()
            own = None if segments is None else segments[:, -queries:]
            q, k = query_filter(conv, own).of(q), key_filter(conv, segments).of(k)
        elif conv is not None:  # keys of a cache are filtered already
            rows, segments = newest.queries, newest.segments
            own = None if segments is None else segments[:, -rows.shape[2] :]
            q = query_filter(conv, own).of(rows)[:, :, -queries:]
        if v is not None and groups is not None:
            v = spread_heads(groups.side_by_side(v), k.shape[1])
        return _Wide(q, k, v)

    def _groups(self) -> HeadGroups | None:
        if self.post_mix is None:
            return None
        return HeadGroups.of(self.shape.heads, self.shape.key_heads, self.post_mix, True)
