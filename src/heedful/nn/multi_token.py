"""Multi-token attention as a layer: kernels, head mixing, norm and gate; also talking heads."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.checks import UserError, check_choice, is_whole
from heedful.nn.layer import (
    NO_INPUTS,
    TERMS,
    Layer,
    LayerInputs,
    LayerOutput,
    Maps,
    Step,
    parameter,
)
from heedful.nn.shape import ROLES, HeadNorm, HeadShape, WideLinear
from heedful.ops import LowRank, Visibility, multi_token_attention
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.decode import multi_token_attention_few
from heedful.ops.mta.filtered import filtered_attention, filtered_attention_map
from heedful.ops.mta.reference import multi_token_attention_map

# The maps on the way, as people call them.
_NAMES = {
    "logits": "logits",
    "conv": "convolved logits",
    "mix": "mixed logits",
    "softmax": "softmax",
    "post_conv": "convolved softmax",
}


@dataclass(frozen=True)
class MultiToken:
    """Parts of multi-token attention in a model; the default is identity at initialisation.

    Arguments:
        conv: `(c_q, c_k)` of the convolution before the softmax, or `None`. `c_k` is odd. In an
            encoder kernels are centred over queries as over keys, so that an even c_q is taken as
            the next odd number: 7 for 6, with 3 queries on either side.
        post_conv: the same after the softmax.
        conv_every: convolutions stand in layers l with `l % n == n // 2`; 4 gives the published
            2, 6, 10, ..., and 1 gives every layer. Everything else stands in all layers.
        mix, post_mix: size of the head groups mixed before / after the softmax: `"all"`, a divisor
            of the heads, or `None`.
        norm: per-head RMSNorm of the output: `"none"`, `"plain"`, or `"depth"`, which multiplies by
            1 - lambda_init of the layer. A norm changes the layer's function at initialisation.
        gate: `"none"`, `"scalar"` (one number per token and head) or `"vector"` (one per channel):
            a sigmoid of the (normed) head output itself.
        gate_start: `"published"` starts from a random weight and zero bias, so near one half;
            `"identity"` doubles the sigmoid and starts from zero weights, so at exactly one.
        rank: of the kernels before the softmax, which are then learned as factors (u over queries,
            w over keys, see `heedful.LowRank`) and computed by torch's own attention kernels with
            heads so many times as wide. Query heads that share a key head share w, and head groups
            are taken across key heads, as within one mixing would mix no maps. `mix` multiplies the
            width by its group. `post_conv` must be `None`. `None` is any rank.
        centred: with `rank`, kernels see keys on either side of a key. If `False` they look back
            over c_k keys, and attention is one call of SDPA.
        input_scaling: `"depth"` multiplies what the model's norms hand to attention and MLP by
            1 - lambda_init of the layer: the "layer-norm scaling" of the paper's ablation, as its
            code has it. It changes the model's function. Cross-attention has none.

    Source: Golovneva et al., arXiv 2504.00927, sections 3 and 4.
    """

    conv: tuple[int, int] | None = (6, 11)
    post_conv: tuple[int, int] | None = (6, 11)
    conv_every: int = 4
    mix: int | Literal["all"] | None = "all"
    post_mix: int | Literal["all"] | None = "all"
    norm: Literal["none", "plain", "depth"] = "none"
    gate: Literal["none", "scalar", "vector"] = "none"
    gate_start: Literal["published", "identity"] = "published"
    input_scaling: Literal["none", "depth"] = "none"
    rank: int | None = None
    centred: bool = True

    def __post_init__(self) -> None:
        for name in ("conv", "post_conv"):
            size = getattr(self, name)
            if size is None:
                continue
            pair = isinstance(size, (tuple, list)) and len(size) == 2
            even = pair and self.centred and is_whole(size[1], 1) and size[1] % 2 == 0
            if not pair or not all(is_whole(n, 1) for n in size) or even:
                odd = "; keys are centred, so take the next odd c_k" if self.centred else ""
                raise UserError(
                    f"{name} must be (c_q, c_k) of whole numbers of at least 1, got {size!r}{odd}"
                )
            object.__setattr__(self, name, tuple(size))  # a list, when read from JSON
        if not is_whole(self.conv_every, 1):
            raise UserError(
                f"conv_every must be a whole number of at least 1 (every layer), got "
                f"{self.conv_every!r}"
            )
        for name in ("mix", "post_mix"):
            size = getattr(self, name)
            if size is not None and not _is_group(size):
                raise UserError(f"{name} must be 'all', a group size or None, got {size!r}")
        self._check_rank()
        check_choice("norm", self.norm, ("none", "plain", "depth"))
        check_choice("gate", self.gate, ("none", "scalar", "vector"))
        check_choice("gate_start", self.gate_start, ("published", "identity"))
        check_choice("input_scaling", self.input_scaling, ("none", "depth"))

    def _check_rank(self) -> None:
        """Raise unless the parts are those that kernels of low rank go with."""
        if not isinstance(self.centred, bool):
            raise UserError(f"centred must be True or False, got {self.centred!r}")
        if self.rank is None:
            if not self.centred:
                raise UserError("centred=False needs a rank, such as rank=2")
            return
        most = None if self.conv is None else min(self.conv)
        if not is_whole(self.rank, 1) or most is None or self.rank > most:
            kernels = "None" if most is None else f"{most} for kernels of {self.conv}"
            raise UserError(
                f"rank must be a whole number from 1 to c_q and c_k of conv, which is {kernels}; "
                f"got {self.rank!r}"
            )
        if self.post_conv is not None:
            raise UserError(
                f"post_conv must be None with rank, got {self.post_conv!r}: factors are of the "
                "kernels before the softmax; MultiToken.flash() is an example"
            )
        for name in ("mix", "post_mix"):
            if getattr(self, name) == "all":
                raise UserError(
                    f"{name} must be a group size or None with rank, got 'all': groups are of so "
                    "many key heads, whose keys or values stand side by side"
                )

    @classmethod
    def flash(cls) -> "MultiToken":
        """Kernels of rank 2 in every layer and pairs mixed after the softmax: wide attention."""
        return cls(post_conv=None, conv_every=1, mix=None, post_mix=2, rank=2)

    @classmethod
    def published(cls) -> "MultiToken":
        """The paper's final form (v2): both convolutions, both mixings, norm and scalar gate."""
        return cls(norm="plain", gate="scalar")

    @classmethod
    def v1(cls) -> "MultiToken":
        """The paper's first version: pre convolution, post mixing in pairs, depth-scaled norm."""
        return cls(post_conv=None, mix=None, post_mix=2, norm="depth")

    def build(self, shape: HeadShape) -> "MultiTokenAttention":
        """The layer for one attention module."""
        if self.rank is None:
            return MultiTokenAttention(self, shape)
        return LowRankAttention(self, shape)

    def convolves(self, layer: int) -> bool:
        """Test whether this layer has the convolutions."""
        return layer % self.conv_every == self.conv_every // 2


def ablations() -> dict[str, MultiToken]:
    """The forms of the paper's ablation, by what they contain (arXiv 2504.00927, Table 5).

    The group size of its head mixing is not published row by row; all heads here. Whether its row
    "layer-norm scaling" scaled by depth, as the paper's code does, or by the inverse square root of
    the layer's number, as the work it cites, is not known; by depth here.
    """
    rows: dict[str, MultiToken] = {}
    parts = {
        "pre+post conv, pre+post mix": {},
        "pre conv, pre+post mix": {"post_conv": None},
        "pre conv, post mix": {"post_conv": None, "mix": None},
        "post conv, post mix": {"conv": None, "mix": None},
        "pre conv, pre mix": {"post_conv": None, "post_mix": None},
    }
    norms = {
        "no norm": {},
        "norm": {"norm": "plain"},
        "depth scaling": {"norm": "depth"},
        "scalar gate": {"norm": "plain", "gate": "scalar"},
        "vector gate": {"norm": "plain", "gate": "vector"},
    }
    for part, fields in parts.items():
        for norm, more in norms.items():
            rows[f"{part}, {norm}"] = MultiToken(**fields, **more)
    for size in ((4, 9), (6, 11), (8, 13)):
        rows[f"{size[0]}x{size[1]} pre conv only, depth scaling"] = MultiToken(
            conv=size, post_conv=None, mix=None, post_mix=None, norm="depth"
        )
    rows["pre conv, post mix, layer-norm scaling"] = MultiToken(
        post_conv=None, mix=None, input_scaling="depth"
    )
    return rows


@dataclass(frozen=True)
class TalkingHeads:
    """Heads mixed before and after the softmax, from the identity; no convolutions.

    Arguments:
        group: size of the head groups, or `"all"`.

    Source: Shazeer et al., "Talking-Heads Attention", arXiv 2003.02436.
    """

    group: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        if not _is_group(self.group):
            raise UserError(f"group must be 'all' or a group size, got {self.group!r}")

    def build(self, shape: HeadShape) -> "MultiTokenAttention":
        """The layer for one attention module."""
        mixing = MultiToken(conv=None, post_conv=None, mix=self.group, post_mix=self.group)
        return mixing.build(shape)


class MultiTokenAttention(Layer):
    """The parameters of multi-token attention for one layer, identity-initialised.

    In a decoder kernels look back over queries. In an encoder, where nothing is later, they are
    centred over queries. In cross-attention they look back over the target's queries and are
    centred over the source's keys.
    """

    roles = frozenset(ROLES)
    takes = TERMS
    takes_steps = True
    _names = ("conv", "post_conv", "mix", "post_mix")

    def __init__(self, config: MultiToken, shape: HeadShape) -> None:
        super().__init__(shape)
        self.config = config
        self.two_sided = shape.role == "encoder"
        convolves = config.convolves(shape.layer)
        sizes = [
            _size(x, self.two_sided) if convolves else None for x in (config.conv, config.post_conv)
        ]
        self._make(*sizes)
        # A convolved row reads the rows above it; convolved twice, those above these too.
        if not self.two_sided:
            rows = sum(size[0] - 1 for size in sizes if size is not None)
            if rows:
                self.tails = {**self.tails, "queries": rows}
        if config.input_scaling == "depth" and shape.role != "cross":
            self.input_factor = 1 - shape.depth_factor
        self.norm = None
        if config.norm != "none":
            factor = 1 - shape.depth_factor if config.norm == "depth" else 1.0
            self.norm = HeadNorm(shape.dim, factor)
        self.gate = None
        if config.gate != "none":
            outputs = 1 if config.gate == "scalar" else shape.dim
            self.gate = WideLinear(shape.dim, outputs)
            self._gate_std = shape.hidden**-0.5
        self.reset_parameters()

    def _make(self, size: tuple[int, int] | None, post_size: tuple[int, int] | None) -> None:
        """Make the parameters of kernels of these sizes, and of the mixing."""
        heads = self.shape.heads
        self.conv, self.post_conv = (
            None if x is None else parameter(heads, *x) for x in (size, post_size)
        )
        self.mix = _mixing("mix", heads, self.config.mix)
        self.post_mix = _mixing("post_mix", heads, self.config.post_mix)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Identity kernels and mixing; the gate as configured, with zero bias."""
        for name, weights in self._learned().items():
            if weights is not None:
                weights.copy_(self._identity(name, weights))
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.gate is not None:
            self.gate.bias.zero_()
            if self.config.gate_start == "identity":
                self.gate.weight.zero_()
            else:
                std = self._gate_std
                nn.init.trunc_normal_(self.gate.weight, std=std, a=-3 * std, b=3 * std)

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
        """Attention, then the norm and the gate of each head's output."""
        out = self._attend(q, k, v, visibility, scale, inputs)
        if self.norm is not None:
            out = self.norm(out)
        if self.gate is not None:
            opening = torch.sigmoid(self.gate(out))
            if self.config.gate_start == "identity":
                opening = 2 * opening
            out = out * opening.to(out.dtype)
        return LayerOutput(out)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | None, scale: float | None,
        inputs: LayerInputs,
    ) -> Float[Tensor, "B H Tq D"]:  # fmt: skip
        """The operator's output; of a step of a cache, that of its new queries."""
        if self.in_step(inputs):
            terms = inputs.terms(q, visibility, scale)
            return multi_token_attention_few(
                q, k, v, Parameters(**self._learned()), terms, new=inputs.new
            ).to(q.dtype)
        return multi_token_attention(
            q, k, v, **self._parts(), two_sided=self.two_sided, bias=inputs.bias,
            softcap=inputs.softcap, sinks=inputs.sinks, dropout_p=inputs.dropout,
            visibility=visibility, scale=scale, impl=self.impl,
        )  # fmt: skip

    def _identity(self, name: str, weights: Tensor) -> Tensor:
        """The kernels or the mixing that change nothing, in the shape of these."""
        if name in ("mix", "post_mix"):
            return torch.eye(weights.shape[1]).expand_as(weights).to(weights)
        current = weights.shape[1] // 2 if self.two_sided else -1
        kernel = torch.zeros_like(weights)
        kernel[:, current, kernel.shape[2] // 2] = 1
        return kernel

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The map that multiplies the values, per head, before norm and gate."""
        return Maps(self._map(q, k, visibility, scale, inputs))

    def steps(
        self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS
    ) -> list[Step]:
        """Logits as they are, convolved and mixed; the softmax and what its convolution makes."""
        maps: dict[str, Tensor] = {}
        self._map(q, k, visibility, scale, inputs, maps)
        if self.post_conv is None and self.post_mix is None:
            del maps["softmax"]  # these are the weights
        elif self.post_mix is None:
            del maps["post_conv"]
        return [
            Step(_NAMES[name], x, name in ("logits", "conv", "mix")) for name, x in maps.items()
        ]

    def _map(
        self,
        q: Tensor,
        k: Tensor,
        visibility: Visibility | None,
        scale: float | None,
        inputs: LayerInputs,
        steps: dict[str, Tensor] | None = None,
    ) -> Float[Tensor, "B H Tq Tk"]:
        parts, terms = self._parts(), inputs.terms(q, visibility, scale)
        across = parts.pop("across_keys", False)
        return multi_token_attention_map(
            q, k, Parameters(**parts), terms, two_sided=self.two_sided, across_keys=across,
            steps=steps,
        )  # fmt: skip

    def shown(self) -> dict[str, Tensor | None]:
        """Kernels and mixing as the operator takes them, kernels whole and groups consecutive."""
        return self._learned()

    def _parts(self) -> dict[str, object]:
        """The operator's arguments that are of the layer."""
        return self._learned()

    def _learned(self) -> dict[str, nn.Parameter | None]:
        return {name: getattr(self, name) for name in self._names}


class LowRankAttention(MultiTokenAttention):
    """The parameters of one layer whose kernels are of low rank.

    The first rank is the identity; of the further ones u is random and w zero, so that w learns at
    once, and u after it. A cache keeps filtered keys, which hold what their neighbours give them,
    so that any of them may leave it; but of the newest tokens it keeps keys as they are.
    """

    takes = frozenset({"sinks"})
    _names = ("u", "w", "mix", "post_mix")

    def _make(self, size: tuple[int, int] | None, post_size: None) -> None:
        shape = self.shape
        self.conv = self.post_conv = None
        for name in ("mix", "post_mix"):
            group, weights = getattr(self.config, name), None
            if group is not None:
                if shape.key_heads % group:
                    raise UserError(
                        f"{name} mixes heads of {group} key heads, which do not divide the model's "
                        f"{shape.key_heads}; use a divisor or None"
                    )
                weights = parameter(shape.heads // group, group, group)
            setattr(self, name, weights)
        self.u = self.w = None
        if size is not None:
            self.u = parameter(shape.heads, self.config.rank, size[0])
            self.w = parameter(shape.key_heads, self.config.rank, size[1])
            if shape.role == "decoder":
                conv = LowRank(self.u, self.w, self.config.centred)
                self.tails, self.newest_keys = {"keys": conv.past_keys}, conv.band(causal=True)
                self.keys_ahead = conv.ahead

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The identity, with random u of every further rank."""
        if self.u is not None:
            nn.init.normal_(self.u, std=self.u.shape[2] ** -0.5)
        super().reset_parameters()

    def _identity(self, name: str, weights: Tensor) -> Tensor:
        """Of u what further ranks have, as no w meets it."""
        if name in ("mix", "post_mix"):
            return super()._identity(name, weights)
        identity = weights.clone() if name == "u" else torch.zeros_like(weights)
        middle = self.two_sided if name == "u" else self.config.centred
        identity[:, 0] = 0
        identity[:, 0, weights.shape[2] // 2 if middle else -1] = 1
        return identity

    def cached_keys(
        self, k: Float[Tensor, "B Hk T D"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B Hk T W"]:
        """Filtered keys, the ranks side by side."""
        return LowRank(self.u, self.w, self.config.centred).filtered(k, segments)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | None, scale: float | None,
        inputs: LayerInputs,
    ) -> Tensor:  # fmt: skip
        if inputs.newest is None:
            inputs = inputs._replace(new=None)  # no step of a cache of its own
            return super()._attend(q, k, v, visibility, scale, inputs)
        terms, parts = inputs.terms(q, visibility, scale), self._operator()
        return filtered_attention(
            inputs.newest, k, v, parts, terms, queries=q.shape[2], across=self.shape.key_heads
        )

    def _map(self, q, k, visibility, scale, inputs, steps=None) -> Tensor:
        if inputs.newest is None:
            return super()._map(q, k, visibility, scale, inputs, steps)
        terms, parts = inputs.terms(q, visibility, scale), self._operator()
        return filtered_attention_map(
            inputs.newest, k, parts, terms, queries=q.shape[2], across=self.shape.key_heads
        )

    def shown(self) -> dict[str, Tensor | None]:
        parameters = self._operator()
        conv = None if self.u is None else parameters.conv.kernel()
        mixing = {name: self._whole(getattr(self, name)) for name in ("mix", "post_mix")}
        return {"conv": conv, "post_conv": None, **mixing}

    def _whole(self, mixing: Tensor | None) -> Tensor | None:
        """Mixing of consecutive heads: heads of one place, and no others of the same key heads."""
        per_key = self.shape.heads // self.shape.key_heads
        if mixing is None or per_key == 1:
            return mixing
        parts = mixing.unflatten(0, (-1, per_key)).permute(0, 2, 3, 1)  # p out in place
        return torch.diag_embed(parts).transpose(2, 3).flatten(3).flatten(1, 2)

    def _operator(self) -> Parameters:
        conv = None if self.u is None else LowRank(self.u, self.w, self.config.centred)
        return Parameters(conv, None, self.mix, self.post_mix)

    def _parts(self) -> dict[str, object]:
        return self._operator()._asdict() | {"across_keys": True}


def _is_group(size: object) -> bool:
    return size == "all" or is_whole(size, 1)


def _size(size: tuple[int, int] | None, two_sided: bool) -> tuple[int, int] | None:
    """Of a kernel that has a middle row, if it is two-sided."""
    return (size[0] | 1, size[1]) if two_sided and size is not None else size


def _mixing(name: str, heads: int, group: int | str | None) -> nn.Parameter | None:
    if group is None:
        return None
    size = heads if group == "all" else int(group)
    if heads % size:
        raise UserError(
            f"{name} groups of {size} heads do not divide the model's {heads} heads; use a divisor "
            "or 'all'"
        )
    return parameter(heads // size, size, size)
