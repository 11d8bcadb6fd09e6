"""Grouped attention as a layer: how tokens are grouped, and what stands for a group."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.checks import UserError, check_choice, check_whole, is_whole
from heedful.nn.grouping import KINDS, Grouping, Kind, longest_span
from heedful.nn.layer import (
    NO_INPUTS,
    Layer,
    LayerInputs,
    LayerOutput,
    Maps,
    Rotation,
    check_inputs,
)
from heedful.nn.layer import parameter as empty_parameter
from heedful.nn.shape import ROLES, HeadShape, Role, WideLinear
from heedful.ops import Queries, Visibility
from heedful.ops.grouped import Groups, Summaries, grouped_attention, member_attention
from heedful.ops.grouped.groups import places_of
from heedful.ops.grouped.summaries import gather_heads, gather_members, member_weights, pooled

_REFINES = ("mean", "weighted", "attention")


@dataclass(frozen=True)
class Grouped:
    """Grouped attention: how tokens are grouped and summarised, and whose query attends.

    Arguments:
        grouping: `"fixed"` (every `size` tokens), `"sliding"` (overlapping), `"sentence"` (at
            closing tokens) or `"cif"` (learned weights that fill a group).
        size: tokens of a group; of a sentence or a learned group, how many there should be.
        window: from how many tokens on a group is seen by its summary; nearer ones are seen token
            by token.
        refine: attention inside a group: `"mean"` (none), `"weighted"` (a learned weighted average
            per key head) or `"attention"` (self-attention inside the group, then weighted).
        queries: `"tokens"`, or `"groups"` (the literal reading of grouping: distant groups are
            attended to by the mean query of the newest complete group, near tokens by the token's
            own).
        closing: ids of the tokens that close a sentence.
        share: how many consecutive layers share one learned grouping, that of the first of them.
        stride: from one sliding group to the next; default half of `size`.
        shortest, longest: bounds of a sentence or a learned group in tokens; default 1 and four
            times `size`.
        size_bias: factor on the logarithm of a group's size: `"one"`, `"learned"` (per head, one at
            first) or `"none"` (an ablation: a summary weighs as much as one token).

    Source: see `heedful.ops.grouped_attention`.
    """

    grouping: Kind = "fixed"
    size: int = 16
    window: int = 128
    refine: Literal["mean", "weighted", "attention"] = "weighted"
    queries: Literal["tokens", "groups"] = "tokens"
    closing: tuple[int, ...] = ()
    share: int = 1
    stride: int | None = None
    shortest: int = 1
    longest: int | None = None
    size_bias: Literal["one", "learned", "none"] = "one"

    def __post_init__(self) -> None:
        check_choice("grouping", self.grouping, KINDS)
        check_choice("refine", self.refine, _REFINES)
        check_choice("queries", self.queries, ("tokens", "groups"))
        check_choice("size_bias", self.size_bias, ("one", "learned", "none"))
        for name in ("size", "window", "share", "shortest"):
            check_whole(name, getattr(self, name), 1)
        several = isinstance(self.closing, list | tuple)
        if not several or not all(is_whole(x, 0) for x in self.closing):
            raise UserError(f"closing must hold token ids, as in (13, 30), got {self.closing!r}")
        object.__setattr__(self, "closing", tuple(self.closing))
        if bool(self.closing) != (self.grouping == "sentence"):
            raise UserError(
                "closing must be given with grouping='sentence' and only with it, got "
                f"{self.closing!r} with {self.grouping!r}; a tokenizer tells the ids: "
                "tokenizer.convert_tokens_to_ids(['.', '!', '?'])"
            )
        if self.stride is not None:
            check_whole("stride", self.stride, 1)
            if self.grouping != "sliding":
                raise UserError(
                    f"stride is for sliding groups, got {self.stride} with {self.grouping!r}"
                )
            if self.stride > self.size:
                raise UserError(
                    f"stride must be at most size ({self.size}), or tokens between two groups "
                    f"would be in none, got {self.stride}"
                )
        bounded = self.grouping in ("sentence", "cif")
        if not bounded and (self.shortest != 1 or self.longest is not None):
            raise UserError(
                f"shortest and longest bound sentences and cif groups, not "
                f"{self.grouping!r}; leave them out"
            )
        if self.longest is not None:
            check_whole("longest", self.longest, max(self.size, self.shortest))
        elif self.shortest > 4 * self.size:
            raise UserError(
                f"shortest must be at most longest, which is four times size ({4 * self.size}) if "
                f"it is not given, got {self.shortest}; give longest too"
            )
        if self.grouping == "cif" and (self.size < 2 or self.shortest != 1):
            raise UserError(
                f"cif groups must have size of at least 2 and no shortest, got size={self.size}, "
                f"shortest={self.shortest}"
            )
        if self.grouping == "cif" and self.longest == self.size:
            raise UserError(
                f"longest must be above size ({self.size}) for cif groups, of which one weight of "
                f"1/longest per token at least leaves no other size, got {self.longest}"
            )
        if self.share > 1 and self.grouping != "cif":
            raise UserError(
                f"share is for learned groupings; {self.grouping!r} is the same in every layer"
            )

    def build(self, shape: HeadShape) -> "GroupedAttention":
        """The layer for one attention module."""
        return GroupedAttention(self, shape)


class Features(NamedTuple):
    """Features of a token, kept until its group is complete.

    grouping: what groups are made of, `[B, T, F]`; `None` where counting is enough.
    pooling: what its weight in a summary is made of, `[B, T, P]`; `None` for the mean.
    """

    grouping: Float[Tensor, "B T F"] | None = None
    pooling: Float[Tensor, "B T P"] | None = None


class GroupedAttention(Layer):
    """Grouped attention for one layer."""

    summarises = True

    def __init__(self, config: Grouped, shape: HeadShape) -> None:
        super().__init__(shape)
        self.config = config
        self.roles = frozenset(_roles(config))
        # A decoder's cache has no bias for tokens that are away; in cross-attention there is none.
        if shape.role == "encoder" and config.queries == "tokens":
            self.takes = frozenset({"bias"})
        shape = replace(shape, hidden=shape.source or shape.hidden)  # what groups are made of
        stride = config.stride or max(1, config.size // 2)
        longest = config.longest or 4 * config.size
        learned = config.grouping == "cif"
        leads = not learned or shape.layer % config.share == 0
        self.grouping = None
        if leads:
            self.grouping = Grouping(
                config.grouping, shape, config.size, stride, config.shortest, longest,
                config.closing,
            )  # fmt: skip
        self.learns_groups = leads and learned
        needs = {"rotation"}
        if config.refine != "mean" or learned:
            needs.add("source" if shape.role == "cross" else "input")
        if config.grouping == "sentence":
            needs.add("token_ids")
        self.needs = frozenset(needs)

        self.weight = self.place = self.inside = self.outside = self.beta = None
        if config.refine != "mean":
            span = longest_span(config.grouping, config.size, longest)
            self.weight = WideLinear(shape.hidden, shape.key_heads, bias=False)
            self.place = empty_parameter(span, shape.key_heads)
        if config.refine == "attention":
            self.inside = WideLinear(shape.hidden, 3 * shape.dim, bias=False)
            self.outside = WideLinear(shape.dim, 2 * shape.key_heads * shape.dim, bias=False)
        if config.size_bias == "learned":
            self.beta = empty_parameter(shape.heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """At first every refinement is the mean, and a group counts by its size."""
        if self.weight is not None:
            self.weight.weight.zero_()
            self.place.zero_()
        if self.inside is not None:
            nn.init.normal_(self.inside.weight, std=self.inside.in_features**-0.5)
            self.outside.weight.zero_()
        if self.beta is not None:
            self.beta.fill_(1)

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
        """Attention over groups of whole rows; a cache goes on from parts, see `summaries`."""
        for name in ("softcap", "sinks"):
            if getattr(inputs, name) is not None:
                raise UserError(
                    f"{name} must be None for grouped attention, which has none; take another "
                    "mechanism"
                )
        if inputs.dropout:
            raise UserError(
                f"dropout must be 0 for grouped attention, which drops nothing, got "
                f"{inputs.dropout}; take another mechanism"
            )
        visibility = self._for_role(visibility)
        groups, features, report = self._grouped(q, k, visibility, inputs)
        summaries = self.summaries(q, k, v, groups, features.pooling, inputs)
        out = self.attend(
            q, k, v, groups, summaries, visibility=visibility, scale=scale, bias=inputs.bias
        )
        return LayerOutput(out, grouping=report)

    def _for_role(self, visibility: Visibility | None) -> Visibility | None:
        """In cross-attention the visibility says that the queries are another sequence's."""
        if self.shape.role != "cross" or (visibility and visibility.queries is not None):
            return visibility
        return replace(visibility or Visibility(causal=False), queries=Queries())

    def attend(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        v: Float[Tensor, "B Hk Tk Dv"],
        groups: Groups,
        summaries: Summaries,
        *,
        visibility: Visibility | None,
        scale: float | None,
        bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    ) -> Float[Tensor, "B H Tq Dv"]:
        """The operator with this layer's options."""
        beta = 0.0 if self.config.size_bias == "none" else 1.0
        return grouped_attention(
            q,
            k,
            v,
            groups=groups,
            summaries=summaries,
            window=self.config.window,
            beta=beta if self.beta is None else self.beta,
            bias=bias,
            visibility=visibility,
            scale=scale,
            impl=self.impl,
        )

    def _grouped(self, q: Tensor, k: Tensor, visibility: Visibility | None, inputs: LayerInputs):
        """Groups of whole rows, made once for all layers that have the same; features; report."""
        check_inputs(self, inputs)
        if q.shape[2] != k.shape[2] and self.shape.role != "cross":
            raise UserError(
                f"grouped attention goes on from a cache of its own, and was given {q.shape[2]} "
                f"queries of {k.shape[2]} tokens; call the model with use_cache=False, or with "
                "heedful.new_cache(model)"
            )
        if self.shape.role == "cross":
            inputs = inputs._replace(input=inputs.source)
        places = places_of(k.shape[2], visibility, k.device)
        features = Features(pooling=self.pooling_features(inputs.input))

        def make():
            of_tokens = self.grouping.features(inputs)
            groups = self.grouping.groups(of_tokens, places)
            return groups, self.grouping.report(of_tokens, groups, places)

        groups, report = self.shared(inputs, f"groups on {k.device}", make)
        return groups, features, report if self.learns_groups else None

    def shared(self, inputs: LayerInputs, what: str, make):
        """Result of `make`, shared by the layers with the same groups in this forward pass."""
        config = self.config
        first = self.shape.layer - self.shape.layer % config.share
        key = (
            what, self.shape.role, config.grouping, config.size, config.stride, config.shortest,
            config.longest, config.closing, config.share,
            first if config.grouping == "cif" else None,
        )  # fmt: skip
        results = {} if inputs.shared is None else inputs.shared
        # What has a gradient is made again where a layer is computed again in the backward pass.
        if key not in results or self.learns_groups:
            if self.grouping is None:
                raise UserError(
                    f"share={config.share}: layer {self.shape.layer} takes the groups of layer "
                    f"{first}, which made none in this forward pass; convert that layer too, with "
                    "the same configuration, and keep both on one device"
                )
            results[key] = make()
        return results[key]

    def pooling_features(self, x: Float[Tensor, "B T E"] | None) -> Float[Tensor, "B T P"] | None:
        """Of each token, what its weight in a summary and attention inside its group need."""
        if self.weight is None:
            return None
        parts = [self.weight(x)]
        if self.inside is not None:
            parts.append(self.inside(x))
        return torch.cat(parts, dim=-1)

    def summaries(
        self,
        q: Float[Tensor, "B H Tq D"] | None,
        k: Float[Tensor, "B Hk T D"],
        v: Float[Tensor, "B Hk T D"],
        groups: Groups,
        features: Float[Tensor, "B T P"] | None,
        inputs: LayerInputs,
    ) -> Summaries:
        """Keys, values and, with queries='groups', queries of these tokens' groups.

        Keys are rotated back to position zero, summed up, and rotated to the group's centre: the
        model's norms of keys stay before the sum.

        Arguments:
            q, k, v: of the tokens of the groups, rotated.
            groups: whose tokens these are.
            features: what `pooling_features` made of them.
            inputs: the positions of the tokens and the rotary embedding.
        """
        rotation, positions = inputs.rotation, inputs.positions
        k = _rotated_back(k, rotation, positions)
        shape = self.shape

        of_keys, of_values = gather_heads(k, groups), gather_heads(v, groups)
        weights = self._weights(groups, features)
        if self.inside is not None:
            parts = features[..., self.weight.out_features :].split(shape.dim, dim=-1)
            attended = self.outside(member_attention(*parts, groups))
            more = attended.unflatten(-1, (2, shape.key_heads, shape.dim)).unbind(-3)
            of_keys, of_values = of_keys + more[0].to(k.dtype), of_values + more[1].to(v.dtype)
        queries = None
        if self.config.queries == "groups":
            queries = pooled(gather_heads(_rotated_back(q, rotation, positions), groups), weights)
        keys, values = pooled(of_keys, weights), pooled(of_values, weights)
        if rotation is not None:
            centre = _centre(groups, positions)
            keys = rotation(keys, centre)
            queries = None if queries is None else rotation(queries, centre)
        return Summaries(keys, values, queries)

    def _weights(
        self, groups: Groups, features: Float[Tensor, "B T P"] | None
    ) -> Float[Tensor, "B M L"] | Float[Tensor, "B M L Hk"]:
        """Weight of each member, for all heads alike or per key head."""
        if features is None:
            return member_weights(groups)
        logits = gather_members(features[..., : self.weight.out_features], groups)
        return member_weights(groups, logits + self.place[: groups.longest])

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """Weight of every token's value in a query's output, summaries spread over their members.

        What attention inside a group moves between its members is not counted.
        """
        visibility = self._for_role(visibility)
        groups, features, _ = self._grouped(q, k, visibility, inputs)
        tokens = k.shape[2]
        eye = torch.eye(tokens, dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        summaries = self.summaries(q, k, k, groups, features.pooling, inputs)
        weights = self._weights(groups, features.pooling)
        summaries = summaries._replace(v=pooled(gather_heads(eye, groups), weights))
        options = {"visibility": visibility, "scale": scale, "bias": inputs.bias}
        return Maps(self.attend(q, k, eye, groups, summaries, **options), groups=groups)


def _roles(config: Grouped) -> tuple[Role, ...]:
    """Roles in which it is defined: decoders lack a source's ids; groups query their own tokens."""
    crosses = config.grouping != "sentence" and config.queries == "tokens"
    return ROLES if crosses else ("decoder", "encoder")


def _rotated_back(
    x: Float[Tensor, "B H T D"], rotation: Rotation | None, positions: Int[Tensor, "#B T"] | None
) -> Float[Tensor, "B H T D"]:
    """As before the rotary embedding; not rotated where the model has none."""
    if rotation is None:
        return x
    return rotation(x, -positions.float())


def _centre(groups: Groups, positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B M"]:
    """The mean position of every group's members, by their shares."""
    at, share = groups.members
    rows = max(len(at), len(positions))
    flat = at.expand(rows, -1, -1).flatten(1)
    spread = positions.expand(rows, -1).gather(1, flat).view(rows, *at.shape[1:])
    total = share.sum(-1)
    return (spread * share).sum(-1) / total.masked_fill(total == 0, 1)
