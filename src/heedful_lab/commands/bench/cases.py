"""Cases of `heedful bench`: inputs of each mechanism, its implementations, and others' of it."""

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.nn.mechanisms import TABLE, Leaves
from heedful.ops import Visibility

if TYPE_CHECKING:
    from heedful_lab.commands.bench.options import Bench

_ROWS = {case: row for row in TABLE for case in row.inputs}

MECHANISMS = tuple(_ROWS)
OURS = ("reference", "tiled", "composed", "fused")
PEERS = ("x-transformers", "flex", "liger")
PASSES = ("forward", "forward+backward", "decode")


def device() -> str:
    """Device of the cases: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def draw(config: "Bench", mechanism: str, tokens: int, passed: str) -> Leaves:
    """The tensors of one case, drawn on the device in the measured precision.

    Of `decode`, the last queries that one new token needs, and sums of selection, which are fp32.
    """
    torch.manual_seed(0)
    dtype, place = getattr(torch, config.dtype), device()
    size = (config.batch, config.heads, tokens, config.dim)
    leaves = {name: torch.randn(size, dtype=dtype, device=place) for name in ("q", "k", "v")}
    if mechanism in _ROWS:
        leaves = _ROWS[mechanism].inputs[mechanism](leaves)
    leaves = {name: x.to(place, dtype) for name, x in leaves.items()}
    if passed == "decode":
        rows = [x.shape[1] for name, x in leaves.items() if name.endswith("conv")]
        rows = 1 + sum(n - 1 for n in (*rows, *(leaves["u"].shape[2:] if "u" in leaves else ())))
        leaves["q"] = leaves["q"][:, :, -rows:].clone()
        if mechanism == "selective":
            leaves["state"] = torch.randn(config.batch, 1, tokens - 1, device=place).abs()
    if config.layout == "transposed":
        leaves |= {name: _transposed(leaves[name]) for name in ("q", "k", "v")}
    return leaves


def _transposed(x: Tensor) -> Tensor:
    """The same numbers, as a model's projections hand them over."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def call(mechanism: str, impl: str, leaves: Leaves) -> Tensor:
    """The output of one call; of several queries for one new token, the last one's."""
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    rest = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
    if mechanism == "sdpa":
        return scaled_dot_product_attention(q[:, :, -k.shape[2] :], k, v, is_causal=_square(q, k))
    if impl in PEERS:
        return _PEER_CALLS[impl, mechanism](q, k, v, **rest)
    output = _ROWS[mechanism].operator(q, k, v, **rest, impl=impl)
    output = output if isinstance(output, Tensor) else output.output
    return output if _square(q, k) else output[:, :, -1:]


def exists(mechanism: str, impl: str) -> bool:
    """Test whether an implementation exists: ours all do, others' are few."""
    return impl in OURS or (impl, mechanism) in _PEER_CALLS


def obstacle(config: "Bench", mechanism: str, impl: str, passed: str) -> str | None:
    """Why this case cannot be run here, or `None`."""
    if impl in PEERS:
        return _peer_obstacle(impl, passed)
    if impl == "fused":
        try:
            call(mechanism, impl, draw(config, mechanism, 16, passed))
        except ValueError as error:  # the operator says itself what it does not support
            return str(error)
    return None


def _square(q: Tensor, k: Tensor) -> bool:
    return q.shape[2] == k.shape[2]


def _peer_obstacle(impl: str, passed: str) -> str | None:
    package = {"x-transformers": "x_transformers", "liger": "liger_kernel", "flex": "torch"}[impl]
    if importlib.util.find_spec(package) is None:
        return f"{impl} is not installed"
    if passed == "decode":
        return f"{impl} serves whole sequences only"
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

    masking = selection(q[:, :1], k[:, :1], True, Visibility(), q.shape[-1] ** -0.5)
    f = (masking.cumsum(2) - masking)[:, 0]

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
