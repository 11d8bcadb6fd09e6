"""What `heedful bench` runs: inputs of each mechanism, its implementations, and others' of it."""

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import (
    Visibility,
    differential_attention,
    multi_token_attention,
    selective_attention,
)

if TYPE_CHECKING:
    from heedful.bench import Bench

MECHANISMS = (
    "mta-pre", "mta-identity", "mta-rank-one", "mta-post", "mta", "talking-heads", "selective",
    "differential",
)  # fmt: skip
OURS = ("reference", "tiled", "fused")
PEERS = ("x-transformers", "flex", "liger")
PASSES = ("forward", "forward+backward", "decode")

Leaves = dict[str, Tensor]


def device() -> str:
    """Where cases run: on the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def draw(config: "Bench", mechanism: str, tokens: int, passed: str) -> Leaves:
    """The tensors of one case in fp64: of `decode`, the last queries that one new token needs."""
    torch.manual_seed(0)
    heads = config.heads

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64)

    leaves = {name: normal(config.batch, heads, tokens, config.dim) for name in ("q", "k", "v")}
    if mechanism == "mta-identity":
        leaves["conv"] = torch.zeros(heads, 6, 11, dtype=torch.float64)
        leaves["conv"][:, -1, 5] = 1
    if mechanism == "mta-rank-one":
        leaves["conv"] = normal(heads, 6, 1) * normal(heads, 1, 11) / 6
    if mechanism in ("mta-pre", "mta"):
        leaves["conv"] = normal(heads, 6, 11) / 6
    if mechanism in ("mta-post", "mta"):
        leaves["post_conv"] = normal(heads, 6, 11) / 6
    if mechanism in ("mta", "talking-heads"):
        leaves["mix"] = normal(1, heads, heads) / heads**0.5
        leaves["post_mix"] = normal(1, heads, heads) / heads**0.5
    if mechanism == "differential":
        leaves["v"] = torch.cat([leaves["v"][:, ::2], leaves["v"][:, 1::2]], dim=-1)
        leaves["lam"] = torch.tensor(0.5, dtype=torch.float64)
    if passed == "decode":
        kernels = [x for name, x in leaves.items() if name.endswith("conv")]
        rows = 1 + sum(kernel.shape[1] - 1 for kernel in kernels)
        leaves["q"] = leaves["q"][:, :, -rows:].clone()
        if mechanism == "selective":
            leaves["state"] = normal(config.batch, 1, tokens - 1).abs()
    return {name: x.to(device()) for name, x in leaves.items()}


def call(mechanism: str, impl: str, leaves: Leaves) -> Tensor:
    """The output of one call; of several queries for one new token, the last one's."""
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    rest = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
    if mechanism == "sdpa":
        return scaled_dot_product_attention(q[:, :, -k.shape[2] :], k, v, is_causal=_square(q, k))
    if impl in PEERS:
        return _PEER_CALLS[impl, mechanism](q, k, v, **rest)
    if mechanism == "selective":
        output = selective_attention(q, k, v, **rest, impl=impl).output
    elif mechanism == "differential":
        output = differential_attention(q, k, v, **rest, impl=impl)
    else:
        output = multi_token_attention(q, k, v, **rest, impl=impl)
    return output if _square(q, k) else output[:, :, -1:]


def exists(mechanism: str, impl: str) -> bool:
    """Whether anybody wrote this: ours are all there, others' are few."""
    return impl in OURS or (impl, mechanism) in _PEER_CALLS


def obstacle(config: "Bench", mechanism: str, impl: str, passed: str) -> str | None:
    """Why this case cannot be run here, or `None`."""
    if impl in PEERS:
        return _peer_obstacle(impl, passed)
    if impl == "fused":
        leaves = draw(config, mechanism, 16, passed)
        try:
            call(mechanism, impl, {name: x.to(config.torch_dtype) for name, x in leaves.items()})
        except ValueError as error:  # the operator says itself what it cannot serve
            return str(error)
    return None


def _square(q: Tensor, k: Tensor) -> bool:
    return q.shape[2] == k.shape[2]


def _peer_obstacle(impl: str, passed: str) -> str | None:
    package = {"x-transformers": "x_transformers", "liger": "liger_kernel", "flex": "torch"}[impl]
    if importlib.util.find_spec(package) is None:
        return f"{impl} is not installed"
    if passed == "decode":
        return f"{impl} serves whole rows only"
    if impl == "flex" and passed != "forward":
        return "FlexAttention has no backward on a CPU, and one with atomics on a GPU"
    if impl == "liger" and device() == "cpu":
        return "liger's kernels need a GPU"
    return None


def _x_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from x_transformers.attend import Attend

    return Attend(causal=True, selective=True, heads=q.shape[1])(q, k, v)[0]


def _liger(q: Tensor, k: Tensor, v: Tensor, post_conv: Tensor) -> Tensor:
    """Liger's op takes finished logits and a square kernel that sees both ways in the queries; with
    zeros for the rows below the current query it is ours."""
    from liger_kernel.ops.multi_token_attention import LigerMultiTokenAttentionFunction

    rows, columns = post_conv.shape[1:]
    below = torch.nn.functional.pad(post_conv, (0, 0, 0, rows - 1))[:, None]
    logits = q @ k.mT * q.shape[-1] ** -0.5
    padding = (rows - 1, columns // 2)
    heads = q.shape[1]
    args = (None, (1, 1), padding, (1, 1), heads, False)
    return LigerMultiTokenAttentionFunction.apply(logits, below, *args) @ v


def _flex_selective(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention can add F once it stands in memory as a T x T tensor; it cannot make it."""
    from heedful.ops.selective.reference import selection

    hiding = selection(q[:, :1], k[:, :1], True, Visibility(), q.shape[-1] ** -0.5)
    f = (hiding.cumsum(2) - hiding)[:, 0]

    def subtract(score, batch, head, query, key):
        return torch.where(query >= key, score - f[batch, query, key], float("-inf"))

    return _flex()(q, k, v, score_mod=subtract)


@functools.cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


_PEER_CALLS: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("x-transformers", "selective"): _x_transformers,
    ("flex", "selective"): _flex_selective,
    ("liger", "mta-post"): _liger,
}
