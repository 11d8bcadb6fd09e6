"""Multi-token attention: the public function."""

from jaxtyping import Float, Int
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
from heedful.ops.common.terms import Terms, checked_terms
from heedful.ops.impl import Impl, choose, no_triton, over_grid, over_limit
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.flash import multi_token_attention_flash
from heedful.ops.mta.low_rank import LowRank
from heedful.ops.mta.reference import multi_token_attention_reference
from heedful.ops.mta.tiled import multi_token_attention_tiled
from heedful.ops.visibility import Visibility

_MOST_ROWS, _MOST_COLUMNS = 8, 15  # of kernels that Triton's form takes
_NOT_FUSED = "of low rank, or mixed across key heads, it is that of torch's own kernels"


def multi_token_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    *,
    conv: Float[Tensor, "H cq ck"] | LowRank | None = None,
    post_conv: Float[Tensor, "H cq2 ck2"] | None = None,
    mix: Float[Tensor, "n g g"] | None = None,
    post_mix: Float[Tensor, "n2 g2 g2"] | None = None,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    two_sided: bool = False,
    across_keys: bool = False,
    dropout_p: float = 0.0,
    seed: int | Int[Tensor, ""] | None = None,
    visibility: Visibility | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B H Tq Dv"]:
    r"""Attention whose map is convolved over queries and keys and mixed over heads.

    $$ P = \mathrm{softmax}(\mathrm{Mask}_{-\infty}(\mathrm{Cap}(W\,\mathrm{Conv}_\theta(
       \mathrm{Mask}_0(QK^\top s))) + b)), \qquad
       O = W'\,\mathrm{Mask}_0(\mathrm{Conv}_{\theta'}(P))\; V $$

    with $\mathrm{Conv}_\theta(X)_{hij} = \sum_{r,c} \theta_{hrc}\,X_{h,\,i-(c_q-1)+r,\;
    j-(c_k-1)/2+c}$ and $\mathrm{Cap}(x) = c \tanh(x / c)$ for a `softcap` c. Every step
    that is `None` is left out; with all four `None`, or all four at identity, this is standard
    attention. `mix` and `post_mix` without convolutions are talking-heads attention (Shazeer et
    al., arXiv 2003.02436).

    Arguments:
        q: queries `[B, H, Tq, D]`, the last `Tq` of the `Tk` tokens.
        k, v: keys `[B, Hk, Tk, D]` and values `[B, Hk, Tk, Dv]`; `Hk` divides `H` (GQA).
        conv: kernels before the softmax, one per head; the last row meets the current query, the
            centre column the same key, so the identity has its 1 at `[cq - 1, ck // 2]`. `ck` odd.
            Or the factors of kernels of low rank: attention is then that of torch's own kernels
            with heads R times as wide (g R times with `mix`), but for a band of near keys.
            They want no `post_conv`, bias, soft cap or dropout. A window masks keys, and not what
            `LowRank.w` puts of them into their neighbours.
        post_conv: kernels after the softmax, of the same orientation; rows are not renormalised.
        mix, post_mix: head mixing before / after the softmax, indexed `[group, out, in]` over
            groups of `g` consecutive heads; `[1, H, H]` mixes all heads.
        bias: $b$, added to the logits that enter the softmax, `[1 or B, 1 or H, Tq, Tk]`, such as a
            relative position bias. It has a gradient.
        softcap: the largest size of a logit, which approaches it as c tanh(x / c); the bias is
            added after it. For families such as Gemma 2; `None` caps nothing.
        sinks: a logit per head `[H]` in the softmax's sum alone, neither capped nor biased: the
            weight that it takes goes to no token. For families such as GPT-OSS. It has a gradient.
        two_sided: for encoders: kernels are centred over queries as they are over keys. The middle
            row meets the current query, rows after it later ones ($(c_q-1)/2$ in place of $c_q-1$
            above), and the identity has its 1 at `[cq // 2, ck // 2]`. `cq` odd, and a visibility
            that is not causal, as later queries are read.
        across_keys: groups of g heads are not consecutive heads but of different key heads: group
            (p, i) has the i-th head of each of the key heads p g to p g + g - 1. With grouped
            queries consecutive heads share their keys and values, and mixing them mixes no maps.
        dropout_p: the share of the map's entries that are dropped, in training; the others are
            divided by 1 - p. It acts on the map that multiplies the values, after the second
            convolution and mixing, as in the authors' code and in CaiT's talking heads (Touvron et
            al., arXiv 2103.17239).
        seed: of dropout: a number, or a tensor [] of one, that alone decides which entries are
            dropped, in every implementation; `None` draws one from torch's generator.
        visibility: which keys each query sees; `None` is causal. Padded queries get zeros.
        scale: factor on the logits; default `D ** -0.5`.
        impl: `"auto"`, `"reference"` (dense), `"tiled"` (memory-linear, shaped for a CPU),
            `"composed"` (memory-linear, shaped for a GPU) or `"fused"` (Triton; not for low rank).

    Returns:
        `[B, H, Tq, Dv]` in q's dtype; softmax and sums are in fp32 at least.

    Raises:
        ValueError: a shape, dtype or parameter does not fit; the message names it.

    Source: Golovneva et al., "Multi-Token Attention", arXiv 2504.00927, equations 5-7.
    """
    q, k, v = cast_inputs(q, k, v)
    check_qkv(q, k, v)
    heads = q.shape[1]
    terms = checked_terms(q, k.shape[2], visibility, scale, bias, softcap, sinks, dropout_p, seed)
    check_flag("two_sided", two_sided)
    if two_sided and terms.visibility.causal:
        raise UserError(
            "two_sided reads later queries, which causal order forbids; give visibility="
            "Visibility(causal=False), or leave two_sided out"
        )
    for name, kernel in (("conv", conv), ("post_conv", post_conv)):
        if kernel is not None and terms.visibility.positions is not None:
            raise UserError(
                f"{name} joins neighbours, and with visibility.positions keys need not be any; "
                "leave the positions out, or the kernel"
            )
        if isinstance(kernel, LowRank):
            _check_factors(name, kernel, q, k)
        else:
            _check_kernel(name, kernel, heads, q)
        rows = None if kernel is None else _rows(kernel)
        if two_sided and rows is not None and rows % 2 == 0:
            raise UserError(
                f"{name} must have an odd c_q where two_sided centres it over queries, got {rows}; "
                "add a row of zeros"
            )
    check_flag("across_keys", across_keys)
    for name, weights in (("mix", mix), ("post_mix", post_mix)):
        _check_mix(name, weights, heads, q, k.shape[1] if across_keys else None)
    across_mix = mix is not None and across_keys and isinstance(conv, LowRank)
    if across_mix and conv.w.shape[0] != k.shape[1]:
        raise UserError(
            f"conv.w must be of the {k.shape[1]} key heads where mix takes groups across them, got "
            f"{shown(conv.w)}; give [{k.shape[1]}, R, c_k], or across_keys=False"
        )
    flash = isinstance(conv, LowRank) or across_keys
    kernels = tuple(conv)[:2] if isinstance(conv, LowRank) else (conv,)
    implementation = choose(
        "multi_token_attention",
        impl,
        lambda: _NOT_FUSED if flash else no_triton(q) or unfused(q, conv, post_conv),
        (q, k, v, *kernels, post_conv, mix, post_mix, bias, sinks),
    )
    parameters, options = Parameters(conv, post_conv, mix, post_mix), {"two_sided": two_sided}
    if implementation == "reference":
        run, options["across_keys"] = multi_token_attention_reference, across_keys
    elif flash:
        _check_flash(parameters, terms, implementation)
        run = multi_token_attention_flash
        options |= {"across_keys": across_keys, "impl": implementation}
    else:
        run, options["impl"] = multi_token_attention_tiled, implementation
    return without_autocast(run)(q, k, v, parameters, terms, **options)


def unfused(q: Tensor, conv: Tensor | None = None, post_conv: Tensor | None = None) -> str | None:
    """The limit of the Triton kernels that a call exceeds, as one clause, or `None`."""
    for kernel in (conv, post_conv):
        if kernel is None:
            continue
        _, rows, columns = kernel.shape
        for name, size, most in (("c_q", rows, _MOST_ROWS), ("c_k", columns, _MOST_COLUMNS)):
            if size > most:
                return f"{name} {size} is above {most}"
    return over_grid(batch_times_heads=q.shape[0] * q.shape[1]) or over_limit(q)


def _rows(kernel: Tensor | LowRank) -> int:
    return kernel.u.shape[2] if isinstance(kernel, LowRank) else kernel.shape[1]


def _check_factors(name: str, factors: LowRank, q: Tensor, k: Tensor) -> None:
    u, w, centred = factors
    heads, key_heads = q.shape[1], k.shape[1]
    check_flag(f"{name}.centred", centred)
    if name != "conv":
        raise UserError(f"{name} must be kernels [H, c_q, c_k], got their factors; use .kernel()")
    for part, x, size in (("u", u, "[H, R, c_q]"), ("w", w, "[H or Hk, R, c_k]")):
        check_dense(f"{name}.{part}", x, size)
        if x.ndim != 3 or min(x.shape) < 1:
            raise UserError(f"{name}.{part} must be {size}, got {shown(x)}")
    if u.shape[0] != heads or w.shape[0] not in (heads, key_heads) or u.shape[1] != w.shape[1]:
        raise UserError(
            f"{name} must have u [{heads}, R, c_q] and w [{heads} or {key_heads}, R, c_k] (of "
            f"query heads or of key heads), got {shown(u)} and {shown(w)}"
        )
    if centred and w.shape[2] % 2 == 0:
        raise UserError(
            f"{name}.w must have an odd c_k (keys are centred), got {w.shape[2]}; add a zero, or "
            "give centred=False for kernels that look back"
        )
    if u.shape[1] > min(u.shape[2], w.shape[2]):
        raise UserError(
            f"{name} has rank {u.shape[1]}, above that of any kernel of {u.shape[2]} x "
            f"{w.shape[2]}; use a rank of at most {min(u.shape[2], w.shape[2])}"
        )
    for part, x in (("u", u), ("w", w)):
        check_parameter(f"{name}.{part}", x, tuple(x.shape), q)


def _check_flash(parameters: Parameters, terms: Terms, impl: str) -> None:
    """Raise unless torch's own kernels support the call."""
    conv, visibility = parameters.conv, terms.visibility
    others = {"post_conv": parameters.post_conv, "bias": terms.bias}
    others |= {"softcap": terms.softcap, "dropout_p": terms.dropout}
    given = [name for name, x in others.items() if x is not None]
    if isinstance(conv, Tensor):
        given.append("a conv of full rank")
    if visibility.mutual is not None:
        given.append("visibility.mutual")
    if visibility.causal and visibility.queries is not None:
        given.append("causal order among queries of their own")
    if given:
        what = "a conv of low rank" if isinstance(conv, LowRank) else "across_keys"
        way = "conv.kernel() in place of conv" if isinstance(conv, LowRank) else "across_keys=False"
        raise UserError(
            f"impl={impl!r} does not support this multi_token_attention call: {what} does not go "
            f"with {', '.join(given)}; use {way}, or impl='reference'"
        )


def _check_kernel(name: str, kernel: Tensor | None, heads: int, like: Tensor) -> None:
    if kernel is None:
        return
    check_dense(name, kernel, "[H, c_q, c_k]")
    if kernel.ndim != 3 or kernel.shape[0] != heads:
        raise UserError(
            f"{name} must be [{heads}, c_q, c_k] (one kernel per query head), got {shown(kernel)}"
        )
    if kernel.shape[1] < 1 or kernel.shape[2] % 2 == 0:
        raise UserError(
            f"{name} must have c_q >= 1 and an odd c_k (keys are centred), got c_q="
            f"{kernel.shape[1]}, c_k={kernel.shape[2]}; add a zero column to make c_k odd"
        )
    check_parameter(name, kernel, tuple(kernel.shape), like)


def _check_mix(
    name: str, weights: Tensor | None, heads: int, like: Tensor, across: int | None
) -> None:
    if weights is None:
        return
    check_dense(name, weights, "[H/g, g, g]")
    if weights.ndim != 3:
        raise UserError(
            f"{name} must be [H/g, g, g] indexed [group, out, in], got {shown(weights)}"
        )
    size = weights.shape[1]
    if size < 1 or heads % size:
        raise UserError(
            f"{name} mixes groups of {size} heads, which does not divide the {heads} heads; use a "
            "group size that does"
        )
    if across is not None and across % size:
        raise UserError(
            f"{name} mixes groups of {size} heads across key heads, which does not divide the "
            f"{across} key heads; use a group size that does, or across_keys=False"
        )
    check_parameter(name, weights, (heads // size, size, size), like)
