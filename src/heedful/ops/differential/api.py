"""Differential attention: the public function."""

from jaxtyping import Float, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.ops.common.checks import (
    check_dense,
    check_parameter,
    check_qkv,
    shown,
)
from heedful.ops.common.precision import cast_inputs, without_autocast
from heedful.ops.common.terms import checked_terms
from heedful.ops.differential.reference import differential_attention_reference
from heedful.ops.differential.tiled import differential_attention_tiled
from heedful.ops.impl import Impl, choose
from heedful.ops.visibility import Visibility


def differential_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Pk Tk Dv"],
    *,
    lam: Float[Tensor, "*P"],
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout_p: float = 0.0,
    seed: int | Int[Tensor, ""] | None = None,
    visibility: Visibility | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B P Tq Dv"]:
    r"""The difference of two softmax maps applied to shared values.

    $$ O_p = (\mathrm{softmax}(\mathrm{Cap}(Q_{2p} K_{2p}^\top s) + b_{2p}) - \lambda\,
       \mathrm{softmax}(\mathrm{Cap}(Q_{2p+1} K_{2p+1}^\top s) + b_{2p+1}))\, V_p $$

    with $\mathrm{Cap}(x) = c \tanh(x / c)$ for a `softcap` c, and nothing without.

    Arguments:
        q: queries `[B, 2P, Tq, D]`; heads 2p and 2p + 1 are the two maps of pair p.
        k: keys `[B, 2Pk, Tk, D]` in the same pairs; `Pk` divides `P` (GQA).
        v: values `[B, Pk, Tk, Dv]`, one per pair; the published layer has Dv = 2D.
        lam: weight of the second map, one number for all pairs `[]` or one per pair `[P]`.
        bias: $b$, added to the logits, `[1 or B, 1 or 2P, Tq, Tk]`. It has a gradient.
        softcap: the largest size of a logit of either map, before the bias; `None` caps nothing.
        sinks: a logit per head `[2P]` in its softmax's sum alone, neither capped nor biased: the
            weight that it takes goes to no token. It has a gradient.
        dropout_p: the share of the map's entries that are dropped, in training; the others are
            divided by 1 - p. Entries of the two maps are dropped independently, before the
            difference, as in transformers' DiffLlama.
        seed: of dropout: a number, or a tensor [] of one, that alone decides which entries are
            dropped, in every implementation; `None` draws one from torch's generator.
        visibility: which keys each query sees; `None` is causal. Padded queries get zeros.
        scale: factor on the logits; default `D ** -0.5`.
        impl: `"auto"`, `"reference"` (dense), `"tiled"` (memory-linear, shaped for a CPU) or
            `"composed"` (memory-linear, shaped for a GPU).

    Returns:
        `[B, P, Tq, Dv]` in q's dtype.

    Raises:
        ValueError: a shape, dtype or parameter does not fit; the message names it.

    Source: Ye et al., "Differential Transformer", arXiv 2410.05258, equation 1.
    """
    q, k, v = cast_inputs(q, k, v)
    check_qkv(q, k, v, value_heads="pairs")
    pairs = q.shape[1] // 2
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] % 2:
            raise UserError(f"{name} must have an even number of heads (pairs), got {x.shape[1]}")
    if v.shape[1] * 2 != k.shape[1]:
        raise UserError(
            f"v must have {k.shape[1] // 2} heads (one per pair of k's), got {v.shape[1]}; join "
            "the values of two heads along the head dim"
        )
    terms = checked_terms(q, k.shape[2], visibility, scale, bias, softcap, sinks, dropout_p, seed)
    check_dense("lam", lam, "[] or [P] (one number per pair)")
    if lam.shape not in ((), (pairs,)):
        raise UserError(f"lam must be a tensor [] or [{pairs}] (one per pair), got {shown(lam)}")
    check_parameter("lam", lam, tuple(lam.shape), q)
    implementation = choose(
        "differential_attention",
        impl,
        lambda: "it has no kernels of its own",
        (q, k, v, lam, bias, sinks),
    )
    run, options = differential_attention_reference, {}
    if implementation != "reference":
        run, options = differential_attention_tiled, {"composed": implementation == "composed"}
    return without_autocast(run)(q, k, v, lam.expand(pairs), terms, **options)
