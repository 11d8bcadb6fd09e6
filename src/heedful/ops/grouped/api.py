"""Grouped attention: the public function."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.checks import UserError
from heedful.ops.common.checks import (
    check_dense,
    check_flag,
    check_parameter,
    check_qkv,
    shown,
)
from heedful.ops.common.precision import cast_inputs, without_autocast
from heedful.ops.common.terms import checked_terms
from heedful.ops.grouped.fused import grouped_attention_fused, unserved
from heedful.ops.grouped.groups import Groups, check_length
from heedful.ops.grouped.neighbourhood import GroupedCall
from heedful.ops.grouped.reference import grouped_attention_reference
from heedful.ops.grouped.summaries import Summaries, summarise
from heedful.ops.grouped.tiled import grouped_attention_tiled
from heedful.ops.impl import Impl, choose
from heedful.ops.visibility import Visibility

_NO_MASS = 1e-6  # of a group; below it the logarithm stands still


def grouped_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    *,
    groups: Groups,
    summaries: Summaries | None = None,
    query_groups: Groups | None = None,
    window: int = 128,
    beta: Float[Tensor, " H"] | float = 1.0,
    local: bool = True,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    visibility: Visibility | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B H Tq Dv"]:
    r"""Attention to groups of tokens: near tokens one by one, far ones by a summary of their group.

    $$ o_t = \mathrm{softmax}\left(\left[\;
        q_t \bar k_j^\top s + \beta \log n_j \;\middle|\; q_t k_i^\top s + \log r_i(t)
        \;\right]\right) \left[\bar v_j \;\middle|\; v_i\right] $$

    over the summaries j of the groups that ended `window` or more tokens ago, and the tokens i of
    which some share $r_i(t)$ is in none of these. $n_j$ is the size of a group. So every earlier
    token counts once, and no summary holds a token that a query may not see. Where later tokens
    are seen (`Visibility(causal=False)`), groups that begin as far ahead count too; with
    `Visibility(queries=...)` (cross-attention) all of the source's do, and no token by itself.

    Arguments:
        q: queries `[B, H, Tq, D]`, the last `Tq` of the `Tk` tokens.
        k, v: keys `[B, Hk, Tk, D]` and values `[B, Hk, Tk, Dv]`; `Hk` divides `H` (GQA).
        groups: memberships of the `Tk` tokens.
        summaries: keys and values of the groups, and queries where groups attend instead of tokens;
            default: the means of `k` and `v`. See `summarise`.
        query_groups: the groups of the queries, in a cross-attention with group queries.
        window: from how many tokens on a complete group is seen by its summary, at least 1.
        beta: factor on the logarithm of a group's size, one number or one per head.
        local: `False` sees no token but the query's own (an ablation: earlier ones of open groups
            and of the window are lost).
        bias: added to the logits of tokens, `[1 or B, 1 or H, Tq, Tk]`; a summary's is the mean of
            its members', by their shares. Not with group queries.
        visibility: which keys each query sees; `None` is causal. Documents and padding must be
            those of the groups. With a sliding window, a summary is seen while all its tokens are.
        scale: factor on the logits; default `D ** -0.5`.
        impl: `"auto"` (`"tiled"` on every device), `"reference"` (dense), `"tiled"` (at the cost of
            the definition) or `"fused"` (FlexAttention, on a GPU; no `bias`). There is no
            `"composed"`.

    Returns:
        `[B, H, Tq, Dv]` in q's dtype. Padded queries get zeros.

    Raises:
        ValueError: a shape, dtype or option does not fit; the message names the argument.

    Source: the two stages (groups, attention inside a group) after descriptions of grouped
    attention; one softmax over summaries and near tokens as in DeepSeek-V4, arXiv 2606.19348;
    the size's logarithm as in Bolya et al., "Token Merging", arXiv 2210.09461, equation 1.
    """
    q, k, v = cast_inputs(q, k, v)
    check_qkv(q, k, v)
    keys = k.shape[2]
    visibility, scale, *_ = checked_terms(q, keys, visibility, scale, bias)
    check_length("window", window)
    check_flag("local", local)
    if not isinstance(groups, Groups):
        raise UserError(
            f"groups must be Groups, got {shown(groups)}; fixed_groups(16, {keys}) makes some"
        )
    groups.check(q.shape[0], keys)
    groups.check_places(visibility)
    if visibility.mutual is not None or visibility.positions is not None:
        raise UserError(
            "visibility must be causal or not, a window, documents and padding for grouped "
            "attention: images (mutual) and evicted caches (positions) are not defined for it"
        )
    crossing = visibility.queries is not None
    if crossing and (visibility.causal or visibility.documents is not None):
        raise UserError(
            "visibility with queries of their own must be Visibility(causal=False, queries=...) "
            "without documents for grouped attention: give each document a row of its own"
        )
    if groups.first and visibility.documents is not None:
        raise UserError("visibility.documents is not defined where earlier tokens are away")
    if summaries is None:
        if groups.first:
            raise UserError("summaries must be given where earlier tokens are away")
        summaries = summarise(k, v, groups)
    summaries = Summaries(*cast_inputs(*summaries))
    _check_summaries(summaries, groups, q, k, v)
    if query_groups is not None:
        if not crossing or summaries.q is None:
            raise UserError(
                "query_groups must be None except in cross-attention with queries='groups' "
                "(summaries.q): otherwise the queries' groups are groups"
            )
        query_groups.check(q.shape[0], q.shape[2], "query_groups")
    if summaries.q is not None:
        if crossing and query_groups is None:
            raise UserError(
                "query_groups must be given in cross-attention with queries='groups': the groups "
                "of the target's tokens"
            )
        count = (query_groups or groups).count
        if summaries.q.shape[2] != count:
            raise UserError(
                f"summaries.q must have one query for each of the {count} groups, got "
                f"{shown(summaries.q)}"
            )
    if bias is not None and (summaries.q is not None or groups.first):
        raise UserError(
            "bias is not supported with queries='groups' or with cached tokens: it has one entry "
            "per query and key"
        )
    run = choose(
        "grouped_attention",
        impl,
        lambda: unserved(q, v, bias, groups),
        (q, k, v, *summaries, groups.weight, beta if isinstance(beta, Tensor) else None, bias),
        uncomposed="its tiled form has one shape for all devices",
    )
    forms = {
        "reference": grouped_attention_reference,
        "tiled": grouped_attention_tiled,
        "fused": grouped_attention_fused,
    }
    group_bias = None if bias is None else _group_bias(groups, bias)
    call = GroupedCall(
        groups, summaries, query_groups, window, _log_size(groups, beta, q), bias, group_bias,
        local, visibility, scale,
    )  # fmt: skip
    return without_autocast(forms[run])(q, k, v, call)


def _log_size(
    groups: Groups, beta: Float[Tensor, " H"] | float, q: Tensor
) -> Float[Tensor, "B H M"]:
    """Bias on the logits of the summaries, in fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1]
    if isinstance(beta, Tensor):
        if beta.shape not in ((), (heads,)):
            raise UserError(f"beta must be one number or [{heads}] (per head), got {shown(beta)}")
        check_parameter("beta", beta, tuple(beta.shape), q)
        beta = beta.to(wide).expand(heads)[None, :, None]
    elif not isinstance(beta, int | float) or isinstance(beta, bool) or not math.isfinite(beta):
        raise UserError(f"beta must be a finite number or a tensor [{heads}], got {shown(beta)}")
    size = groups.mass.to(wide).clamp(min=_NO_MASS).log()[:, None]
    return (beta * size).expand(q.shape[0], heads, -1)


def _group_bias(groups: Groups, bias: Float[Tensor, "#B #H Tq Tk"]) -> Float[Tensor, "#B #H Tq M"]:
    """The mean of the members' biases, by their shares."""
    at, share = groups.members
    mean = share / share.sum(-1, keepdim=True).clamp(min=_NO_MASS)
    rows = max(len(bias), len(at))
    spread = bias.expand(rows, -1, -1, -1)
    index = at.expand(rows, -1, -1).flatten(1)[:, None, None].expand(*spread.shape[:3], -1)
    shares = spread.gather(3, index).unflatten(3, at.shape[1:])
    return (shares * mean.to(bias.dtype)[:, None, None]).sum(-1)


def _check_summaries(summaries: Summaries, groups: Groups, q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads = q.shape[:2]
    expected = {
        "k": (batch, k.shape[1], groups.count, k.shape[3]),
        "v": (batch, v.shape[1], groups.count, v.shape[3]),
        "q": (batch, heads, None, q.shape[3]),
    }
    for name, x in summaries._asdict().items():
        if name == "q" and x is None:
            continue
        check_dense(f"summaries.{name}", x, "[B, H, M, D]")
        want = expected[name]
        if len(x.shape) != 4 or any(w not in (None, n) for w, n in zip(want, x.shape, strict=True)):
            shape = ["M" if w is None else w for w in want]
            raise UserError(f"summaries.{name} must be {shape}, got {shown(x)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise UserError(
                f"summaries.{name} must have q's dtype and device ({q.dtype}, {q.device}), got "
                f"{x.dtype}, {x.device}"
            )
