"""Selective attention: the public function."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.ops.common.checks import (
    check_dense,
    check_flag,
    check_qkv,
    check_tau,
    shown,
)
from heedful.ops.common.few import few_queries
from heedful.ops.common.precision import cast_inputs, without_autocast
from heedful.ops.common.terms import checked_terms
from heedful.ops.impl import Impl, choose, no_triton
from heedful.ops.selective.fused.plan import selective_attention_limit
from heedful.ops.selective.reference import selective_attention_reference
from heedful.ops.selective.tiled import selective_attention_tiled
from heedful.ops.visibility import Visibility


class SelectiveOutput(NamedTuple):
    """Result of `selective_attention`.

    output: `[B, H, Tq, Dv]` in q's dtype.
    state: F of every key after the last query, `[B, Hs, Tk]`, fp32 at least; hand it to the next
        call, where new keys enter with zero.
    memory: per query the sum over its visible keys of min(F, tau), `[B, Tq]`, mean over selectors;
        `None` without `tau`. The memory loss of the paper is built from it.
    """

    output: Float[Tensor, "B H Tq Dv"]
    state: Float[Tensor, "B Hs Tk"]
    memory: Float[Tensor, "B Tq"] | None


def selective_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    *,
    selector_q: Float[Tensor, "B Hs Tq Ds"] | None = None,
    selector_k: Float[Tensor, "B Hs Tk Ds"] | None = None,
    state: Float[Tensor, "B Hs Ts"] | None = None,
    tau: float | None = None,
    protect_first: bool = True,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout_p: float = 0.0,
    seed: int | Int[Tensor, ""] | None = None,
    visibility: Visibility | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> SelectiveOutput:
    r"""Attention in which a token can mask earlier tokens from all later ones.

    $$ O = \mathrm{softmax}(\mathrm{Cap}(QK^\top s) + b - F)\,V, \qquad
       F_{ij} = \sum_{j<p<i} S_{pj}, \qquad S = \mathrm{ReLU}(Q^{sel} {K^{sel}}^\top s) $$

    with $S_{pj} = 0$ for the token itself, for what p cannot see, and for the first real token of
    every document and padded row. Every head subtracts the same F; a token masks only from
    queries after it, so F never falls from query to query. With a `softcap` c, $\mathrm{Cap}(x) =
    c \tanh(x / c)$, else nothing. F is subtracted after it: inside, the cap would bound how far a
    token can be masked. While F is zero, as with an untrained extra selector, both are the same.

    Arguments:
        q: queries `[B, H, Tq, D]`, the last `Tq` of the `Tk` tokens.
        k, v: keys `[B, Hk, Tk, D]` and values `[B, Hk, Tk, Dv]`; `Hk` divides `H` (GQA).
        selector_q, selector_k: what selects, `[B, Hs, T, Ds]` with Hs = 1 (one F for all heads) or
            H (head h masks for head h). Default: head 0 of q and k. Its logits are scaled by
            `scale` too; fold any other factor into `selector_q`.
        state: F at the first query for the first `Ts <= Tk` keys, from an earlier call.
        tau: cap of F in `memory`; `None` computes none.
        protect_first: `False` lets first tokens be masked (an ablation of the paper).
        bias: $b$, added to the logits, `[1 or B, 1 or H, Tq, Tk]`; it has a gradient. The
            selector's logits are without it.
        softcap: the largest size of a logit, before bias and F; `None` caps nothing. The selector's
            logits are not capped.
        sinks: a logit per head `[H]` in the softmax's sum alone, neither capped nor masked: the
            weight that it takes goes to no token. It has a gradient.
        dropout_p: the share of the map's entries that are dropped, in training; the others are
            divided by 1 - p. It acts on the probabilities; F and the memory are computed without
            it.
        seed: of dropout: a number, or a tensor [] of one, that alone decides which entries are
            dropped, in every implementation; `None` draws one from torch's generator.
        visibility: which keys each query sees; must be causal, as `None` is.
        scale: factor on the logits; default `D ** -0.5`.
        impl: `"auto"`, `"reference"` (dense), `"tiled"` (memory-linear, shaped for a CPU),
            `"composed"` (memory-linear, shaped for a GPU) or `"fused"` (Triton).

    Returns:
        `SelectiveOutput(output, state, memory)`.

    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.

    Source: Leviathan et al., "Selective Attention Improves Transformer", arXiv 2410.02703,
    section 3; memory loss, section 4.
    """
    q, k, v, selector_q, selector_k = cast_inputs(q, k, v, selector_q, selector_k)
    check_qkv(q, k, v)
    keys = k.shape[2]
    terms = checked_terms(q, keys, visibility, scale, bias, softcap, sinks, dropout_p, seed)
    if not terms.visibility.causal:
        raise UserError(
            "visibility must be causal for selective attention: F sums over earlier queries"
        )
    if (selector_q is None) != (selector_k is None):
        raise UserError("selector_q and selector_k must be given together, or neither (head 0)")
    if selector_q is None:
        selector_q, selector_k = q[:, :1], k[:, :1]
    _check_selector(selector_q, selector_k, q, keys)
    tau = check_tau(tau)
    check_flag("protect_first", protect_first)
    state = _whole_state(state, (q.shape[0], selector_q.shape[1], keys), q)
    implementation = choose(
        "selective_attention",
        impl,
        lambda: no_triton(q) or selective_attention_limit(q, v, selector_q, terms),
        (q, k, v, selector_q, selector_k, state, bias, sinks),
    )
    tensors, options = (q, k, v, selector_q, selector_k, state), {}
    if impl == "auto" and implementation == "fused" and few_queries(q, k, tensors):
        implementation = "composed"  # dense there: few rows would not fill the kernels
    if implementation == "fused":
        from heedful.ops.selective.fused.flash import selective_attention_fused as run
    elif implementation == "reference":
        run = selective_attention_reference
    else:
        run, options["composed"] = selective_attention_tiled, implementation == "composed"
    options |= {"tau": tau, "protect_first": protect_first}
    return SelectiveOutput(*without_autocast(run)(*tensors, terms, **options))


def _check_selector(selector_q: Tensor, selector_k: Tensor, q: Tensor, keys: int) -> None:
    batch, heads, queries, _ = q.shape
    for name, x, tokens in (("selector_q", selector_q, queries), ("selector_k", selector_k, keys)):
        check_dense(name, x, "[B, 1 or H, T, Ds]")
        if x.ndim != 4 or x.shape[0] != batch or x.shape[2] != tokens:
            raise UserError(f"{name} must be [{batch}, 1 or {heads}, {tokens}, Ds], got {shown(x)}")
        if x.shape[1] not in (1, heads):
            raise UserError(
                f"{name} must have 1 selector or one per head ({heads}), got {x.shape[1]}; "
                "concatenate heads along Ds for their mean"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise UserError(
                f"{name} must have q's dtype and device ({q.dtype}, {q.device}), got {x.dtype}, "
                f"{x.device}"
            )
    if selector_q.shape[1::2] != selector_k.shape[1::2]:
        raise UserError(
            f"selector_k must match selector_q in selectors and Ds "
            f"{tuple(selector_q.shape[1::2])}, got {tuple(selector_k.shape[1::2])}"
        )


def _whole_state(state: Tensor | None, shape: tuple[int, int, int], q: Tensor) -> Tensor | None:
    if state is None:
        return None
    if isinstance(state, SelectiveOutput):
        raise UserError("state must be a tensor, got a whole SelectiveOutput; pass its .state")
    check_dense("state", state, "[B, Hs, T]")
    if state.ndim != 3 or state.shape[:2] != shape[:2] or state.shape[2] > shape[2]:
        raise UserError(
            f"state must be [{shape[0]}, {shape[1]}, at most {shape[2]}] (one F per key), got "
            f"{shown(state)}"
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    if state.dtype != wide or state.device != q.device:
        raise UserError(
            f"state must be {wide} on {q.device} (half precision loses the sum), got "
            f"{state.dtype} on {state.device}"
        )
    return torch.nn.functional.pad(state, (0, shape[2] - state.shape[2]))
