"""The operators as the laws see them: tensors to draw, and one call from tensors to outputs."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heedful.ops import (
    LowRank,
    Visibility,
    differential_attention,
    multi_token_attention,
    selective_attention,
)


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    queries: int = 17
    keys: int = 17
    dim: int = 16

    def long(self, tokens: int) -> "Shape":
        return replace(self, queries=tokens, keys=tokens)


@dataclass(frozen=True)
class Mechanism:
    """`draw` gives named fp64 tensors; those in `per_token` have tokens along their dim 2."""

    name: str
    draw: Callable[[Shape], dict[str, Tensor]]
    call: Callable[..., tuple[Tensor, ...]]
    identity: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    per_token: tuple[str, ...] = ("q", "k", "v")

    def __str__(self) -> str:
        return self.name

    def run(self, tensors: dict[str, Tensor], impl: str, visibility: Visibility | None = None):
        return self.call(tensors, impl, visibility)


def run_by(mechanism: Mechanism, impl: str, visibility: Visibility | None = None, **options):
    """The mechanism as a function of its tensors."""
    return lambda x: mechanism.run(x | options, impl, visibility)


def _qkv(shape: Shape) -> dict[str, Tensor]:
    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn(shape.batch, heads, tokens, shape.dim, dtype=torch.float64)

    return {
        "q": draw(shape.heads, shape.queries),
        "k": draw(shape.key_heads, shape.keys),
        "v": draw(shape.key_heads, shape.keys),
    }


def _mta(name: str, two_sided: bool = False, **sizes: tuple[int, ...]) -> Mechanism:
    def draw(shape: Shape) -> dict[str, Tensor]:
        tensors = _qkv(shape)
        for part, size in sizes.items():
            if not part.endswith("conv"):
                group = size[0] or shape.heads
                tensors[part] = torch.randn(shape.heads // group, group, group).double()
            else:
                tensors[part] = torch.randn(shape.heads, *size).double()
            tensors[part] /= tensors[part].shape[-1] ** 0.5
        return tensors

    def call(x, impl, visibility):
        x = dict(x)
        q, k, v = x.pop("q"), x.pop("k"), x.pop("v")
        if two_sided:
            x["two_sided"], visibility = True, visibility or Visibility(causal=False)
        return (multi_token_attention(q, k, v, **x, visibility=visibility, impl=impl),)

    def identity(x):
        x = {part: tensor.clone() for part, tensor in x.items()}
        for part in sizes:
            if part.endswith("conv"):
                centre = x[part].shape[1] // 2 if two_sided else -1
                x[part].zero_()[:, centre, x[part].shape[2] // 2] = 1
            else:
                x[part].copy_(torch.eye(x[part].shape[1]))
        return x

    return Mechanism(name, draw, call, identity)


def _low_rank(
    name: str, rows: int, columns: int, centred: bool = True, two_sided: bool = False
) -> Mechanism:
    """Kernels of rank two, pairs of heads mixed after the softmax and, if centred, before it."""
    mixing = ("mix", "post_mix") if centred else ("post_mix",)

    def draw(shape: Shape) -> dict[str, Tensor]:
        tensors = _qkv(shape)
        for part, size in (("u", rows), ("w", columns)):
            tensors[part] = torch.randn(shape.heads, 2, size).double() / size**0.5
        for part in mixing:
            tensors[part] = torch.randn(shape.heads // 2, 2, 2).double() / 2**0.5
        return tensors

    def call(x, impl, visibility):
        x = dict(x)
        q, k, v, u, w = (x.pop(part) for part in ("q", "k", "v", "u", "w"))
        if two_sided:
            x["two_sided"], visibility = True, visibility or Visibility(causal=False)
        conv = LowRank(u, w, centred)
        return (multi_token_attention(q, k, v, conv=conv, **x, visibility=visibility, impl=impl),)

    def identity(x):
        x = {part: tensor.clone() for part, tensor in x.items()}
        for part in mixing:
            x[part].copy_(torch.eye(2))
        x["u"][:, 0].zero_()[:, rows // 2 if two_sided else -1] = 1
        x["w"].zero_()[:, 0, columns // 2 if centred else -1] = 1
        return x

    return Mechanism(name, draw, call, identity)


def _selective(name: str, selectors: int | None, tau: float | None = None) -> Mechanism:
    def draw(shape: Shape) -> dict[str, Tensor]:
        tensors = _qkv(shape)
        if selectors is not None:
            count = selectors or shape.heads
            for part, tokens in (("selector_q", shape.queries), ("selector_k", shape.keys)):
                size = (shape.batch, count, tokens, 5)
                tensors[part] = torch.randn(size, dtype=torch.float64)
        return tensors

    def call(x, impl, visibility):
        x = dict(x)
        q, k, v = x.pop("q"), x.pop("k"), x.pop("v")
        out = selective_attention(q, k, v, **x, tau=tau, visibility=visibility, impl=impl)
        return tuple(part for part in out if part is not None)

    def identity(x):
        x = {part: tensor.clone() for part, tensor in x.items()}
        x["selector_k"].zero_()
        return x

    own = selectors is not None
    tokens = ("q", "k", "v", "selector_q", "selector_k") if own else ("q", "k", "v")
    return Mechanism(name, draw, call, identity if own else None, tokens)


def _differential() -> Mechanism:
    def draw(shape: Shape) -> dict[str, Tensor]:
        pairs = replace(shape, heads=2 * shape.heads, key_heads=2 * shape.key_heads)
        tensors = _qkv(pairs)
        tensors["v"] = torch.cat([tensors["v"][:, ::2], tensors["v"][:, 1::2]], dim=-1)
        tensors["lam"] = torch.rand(shape.heads, dtype=torch.float64)
        return tensors

    def call(x, impl, visibility):
        x = dict(x)
        q, k, v = x.pop("q"), x.pop("k"), x.pop("v")
        return (differential_attention(q, k, v, **x, visibility=visibility, impl=impl),)

    return Mechanism("differential", draw, call)


MECHANISMS = [
    _mta("mta-pre-conv", conv=(3, 5)),
    _mta("mta-post-conv", post_conv=(3, 5)),
    _mta("talking-heads", mix=(0,), post_mix=(0,)),
    _mta("mta-full", conv=(6, 11), post_conv=(6, 11), mix=(2,), post_mix=(0,)),
    _selective("selective", None),
    _selective("selective-own", 1, tau=0.7),
    _selective("selective-per-head", 0),
    _differential(),
]

TWO_SIDED = [
    _mta("two-sided-pre", two_sided=True, conv=(5, 3)),
    _mta("two-sided-post", two_sided=True, post_conv=(3, 5)),
    _mta("two-sided-full", two_sided=True, conv=(7, 11), post_conv=(5, 3), mix=(2,), post_mix=(0,)),
]
"""The forms for encoders, which no causal law is about."""


@dataclass(frozen=True)
class Implementation:
    """How an implementation is tried: `dtype` where a law wants the most exact, `most` tokens.

    Triton's interpreter is slow, so the fused form is tried there on short rows and few heads.
    """

    name: str
    dtype: torch.dtype = torch.float64
    most: int | None = None
    lengths: tuple[int, ...] = (1, 40, 3, 66, 30)  # of documents in one row

    def __str__(self) -> str:
        return self.name

    @property
    def interpreted(self) -> bool:
        return self.name == "fused" and not ON_GPU

    def at_most(self, tokens: int) -> int:
        return tokens if self.most is None else min(tokens, self.most)

    def draw(
        self, mechanism: Mechanism, shape: Shape, tokens: int, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        tensors = mechanism.draw(shape.long(self.at_most(tokens)))
        return {name: x.to(dtype or self.dtype) for name, x in tensors.items()}


ON_GPU = torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ
IMPLEMENTATIONS = (
    Implementation("reference"),
    Implementation("tiled"),
    Implementation("composed"),
    Implementation("fused", torch.float32)
    if ON_GPU
    else Implementation("fused", torch.float32, 24, (1, 20, 3)),
)

LOW_RANK = [_low_rank("low-rank", 6, 11), _low_rank("low-rank-look-back", 6, 6, centred=False)]
LOW_RANK_TWO_SIDED = _low_rank("two-sided-low-rank", 7, 11, two_sided=True)
"""Torch's own kernels, which neither see later tokens nor have a bias, a soft cap or dropout."""

FUSED = [mechanism for mechanism in MECHANISMS if mechanism.name != "differential"]
"""What has GPU kernels."""


def forms(mechanisms: list[Mechanism]) -> list[tuple[Mechanism, Implementation]]:
    """Every mechanism in every implementation that it has."""
    pairs = itertools.product(mechanisms, IMPLEMENTATIONS)
    return [(x, impl) for x, impl in pairs if impl.name != "fused" or x in FUSED]


def ragged(keys: int) -> tuple[Visibility, Tensor, Tensor]:
    """Two rows: left padding in one, right padding in the other; each with two documents."""
    padding = torch.ones(2, keys, dtype=torch.bool)
    padding[0, : keys // 4], padding[1, keys - keys // 5 :] = False, False
    documents = (torch.arange(keys) >= keys // 2).long()[None].repeat(2, 1)
    return Visibility(documents=documents, padding=padding), documents, padding


def runs(keys: int) -> Tensor:
    """Two rows with runs of tokens that see each other; one crosses the border of a row block."""
    token = torch.arange(keys)
    first = torch.where((token > 3) & (token < 30), 0, -1)
    second = torch.where((token >= keys - 95) & (token < keys - 75), 4, first)
    return torch.stack([second, first.roll(2)])


VISIBILITIES: dict[str, Callable[[int], Visibility]] = {
    "causal": lambda keys: Visibility(),
    **{f"window {n}": lambda keys, n=n: Visibility(window=n) for n in (1, 2, 9, 40, 70)},
    "ragged documents": lambda keys: ragged(keys)[0],
    "documents in a window": lambda keys: Visibility(documents=ragged(keys)[1], window=20),
    "one row of documents for all": lambda keys: Visibility(documents=ragged(keys)[1][:1]),
    "all padding": lambda keys: Visibility(padding=torch.zeros(2, keys, dtype=torch.bool)),
    "padding in between": lambda keys: Visibility(padding=(torch.arange(keys) % 5 > 1)[None]),
    "mutual": lambda keys: Visibility(mutual=runs(keys)),
    "mutual in a window": lambda keys: Visibility(
        window=20, mutual=runs(keys), padding=ragged(keys)[2]
    ),
    "both ways": lambda keys: Visibility(causal=False),
    "both ways in a window": lambda keys: Visibility(causal=False, window=20),
    "ragged, both ways in a window": lambda keys: Visibility(
        causal=False, window=9, documents=ragged(keys)[1], padding=ragged(keys)[2]
    ),
    "ragged, both ways": lambda keys: Visibility(
        causal=False, documents=ragged(keys)[1], padding=ragged(keys)[2]
    ),
}
"""What a query may see, by name, for so many keys; of one row of the batch or of two."""
