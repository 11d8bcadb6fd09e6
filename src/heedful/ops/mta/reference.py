"""Multi-token attention as its definition reads: dense, any precision, slow.

Golovneva, Wang, Weston, Sukhbaatar, "Multi-Token Attention" (arXiv 2504.00927), cited as MTA.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.ops.common.standard import masked_softmax
from heedful.ops.common.terms import Terms
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.low_rank import LowRank


def multi_token_attention_reference(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    terms: Terms,
    **options: bool,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `multi_token_attention`, one line per step of its definition."""
    a = multi_token_attention_map(q, k, parameters, terms, **options)
    a = a if terms.dropout is None else terms.dropout.applied(a)
    return a @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def multi_token_attention_map(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    parameters: Parameters,
    terms: Terms,
    *,
    two_sided: bool = False,
    across_keys: bool = False,
    steps: dict[str, Tensor] | None = None,
) -> Float[Tensor, "B H Tq Tk"]:
    """The map A that multiplies the values, of size Tq x Tk, before dropout.

    Its rows need not sum to one, and entries may be negative, as soon as anything follows the
    softmax. `steps` takes up the maps on the way to it: `logits`, `conv`, `mix` (minus infinity
    where nothing is seen), `softmax` and `post_conv`, those that there are.
    """
    conv, post_conv, mix, post_mix = parameters
    visibility, scale, bias, softcap, sinks, _ = terms
    queries, keys, wide = q.shape[2], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    visible = visibility.dense(queries, keys, q.device)[:, None]
    documents = None
    if visibility.documents is not None:
        documents = visibility.query_segments(queries)

    def note(name: str, x: Tensor, filler: float) -> None:
        if steps is not None:
            steps[name] = x.masked_fill(~visible, filler)

    c = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * scale  # S, MTA eq. 2
    note("logits", c, -torch.inf)
    if conv is not None:
        summed = visible
        if isinstance(conv, LowRank):
            summed = conv.terms(visibility).dense(queries, keys, q.device)[:, None]
            conv = conv.kernel()
        c = correlate(c.masked_fill(~summed, 0), conv, documents, two_sided)  # MTA eq. 5
        note("conv", c, -torch.inf)
    across = k.shape[1] if across_keys else None
    if mix is not None:
        c = mix_heads(c, mix, across)  # MTA eq. 7 before the softmax
        note("mix", c, -torch.inf)
    c = c.to(wide)
    if softcap is not None:
        c = softcap * torch.tanh(c / softcap)
    if bias is not None:
        c = c + bias.to(wide)
    sinks = None if sinks is None else sinks[:, None, None]
    p = masked_softmax(c, visible, sinks).to(q.dtype)  # with Mask_-inf, MTA eq. 5
    note("softmax", p, 0.0)
    if post_conv is not None:
        p = correlate(p, post_conv, documents, two_sided).masked_fill(~visible, 0)  # MTA eq. 6
        note("post_conv", p, 0.0)
    if post_mix is not None:
        p = mix_heads(p, post_mix, across)  # MTA eq. 7 after the softmax
    return p


def correlate(
    x: Float[Tensor, "B H Tq Tk"],
    kernel: Float[Tensor, "H cq ck"],
    documents: Int[Tensor, "#B Tq"] | None = None,
    two_sided: bool = False,
) -> Float[Tensor, "B H Tq Tk"]:
    """Per-head cross-correlation, causal over queries, centred over keys (MTA eq. 4, 5).

    `y[i, j] = sum_{r, c} kernel[r, c] x[i - (cq-1) + r, j - (ck-1)/2 + c]`, zero outside; if
    `two_sided`, row i - (cq-1)/2 + r. With `documents`, a row takes nothing from rows of another
    document.
    """
    heads, rows, columns = kernel.shape
    kernel = kernel.to(x.dtype)[:, None]
    after = rows // 2 if two_sided else 0
    padded = F.pad(x, (0, 0, rows - 1 - after, after))
    if documents is None:
        return F.conv2d(padded, kernel, padding=(0, columns // 2), groups=heads)
    total = x.new_zeros(())
    around = F.pad(documents, (rows - 1 - after, after), value=-1)
    for r in range(rows):
        same = around[:, r : r + x.shape[2]] == documents
        row = padded[:, :, r : r + x.shape[2]] * same[:, None, :, None]
        total = total + F.conv2d(
            row, kernel[:, :, r : r + 1], padding=(0, columns // 2), groups=heads
        )
    return total


def mix_heads(
    x: Float[Tensor, "B H Tq Tk"], weights: Float[Tensor, "n g g"], across: int | None = None
) -> Float[Tensor, "B H Tq Tk"]:
    """`y[group, out] = sum_in weights[group, out, in] x[group, in]` over groups of heads.

    Groups are of consecutive heads, or `across` so many key heads: then group (p, i) has the i-th
    head of each of the key heads p g to p g + g - 1.
    """
    groups, size, _ = weights.shape
    weights = weights.to(x.dtype)
    if across is None:
        grouped = x.unflatten(1, (groups, size))
        return torch.einsum("noi,bniqk->bnoqk", weights, grouped).flatten(1, 2)
    parts = across // size
    grouped = x.unflatten(1, (parts, size, -1))
    weights = weights.unflatten(0, (parts, -1))
    return torch.einsum("pnoi,bpinqk->bponqk", weights, grouped).flatten(1, 3)
