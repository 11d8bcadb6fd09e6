"""What is added to the logits, caps them, stands beside them or is dropped: the laws with it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Visibility, multi_token_attention, selective_attention
from heedful.testing import assert_matches_oracle, peak_memory_mib
from helpers.crosses import exhausting
from helpers.mechanisms import FUSED, MECHANISMS, TWO_SIDED, VISIBILITIES, Mechanism, Shape, ragged
from helpers.oracle import Tensors, against_oracle, cast, with_grads

CAP = 1.5  # logits here are about one, and larger after a convolution


@dataclass(frozen=True)
class Addition:
    """What one call has around its softmax: `draw` gives more tensors, `options` is the rest."""

    name: str
    draw: Callable[[int, Shape], Tensors]
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def tensors(self, mechanism: Mechanism, shape: Shape) -> Tensors:
        tensors = mechanism.draw(shape)
        return tensors | self.draw(tensors["q"].shape[1], shape)

    def run(self, mechanism: Mechanism, impl: str, visibility: Visibility | None = None, **more):
        """The mechanism with it, as a function of its tensors."""
        return lambda x: mechanism.run(x | self.options | more, impl, visibility)


def _bias(per_row: bool, per_head: bool):
    def draw(heads: int, shape: Shape) -> Tensors:
        size = (shape.batch if per_row else 1, heads if per_head else 1, shape.queries, shape.keys)
        return {"bias": 2 * torch.randn(size, dtype=torch.float64)}

    return draw


def _sinks(size: float):
    return lambda heads, _: {"sinks": size * torch.randn(heads, dtype=torch.float64)}


def _both(heads: int, shape: Shape) -> Tensors:
    """Sinks that take nearly all of a row, or nothing, and a bias for each entry."""
    return _sinks(9.0)(heads, shape) | _bias(True, True)(heads, shape)


BIAS = Addition("bias per head", _bias(False, True))
SOFTCAP = Addition("softcap and bias", _bias(False, True), {"softcap": CAP})
SINKS = Addition("sinks", _sinks(1.0))
DROPOUT = Addition("dropout", lambda *_: {}, {"dropout_p": 0.3, "seed": 7})
ADDITIONS = [BIAS, SOFTCAP, SINKS, DROPOUT]
VARIANTS = [
    *ADDITIONS,
    Addition("one bias for all", _bias(False, False)),
    Addition("bias per row and a high cap", _bias(True, False), {"softcap": 50.0}),
    Addition("all four", _both, {"softcap": 0.4, **DROPOUT.options}),
]
# Of what queries see: tiles that are cut to columns, parted, blind, or masked in their middle.
SIGHTS = ("window 9", "ragged documents", "all padding", "mutual in a window")
CAUSAL_ONLY = [m for m in MECHANISMS if "selective" in m.name]

every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
each = pytest.mark.parametrize("addition", ADDITIONS, ids=str)
each_impl = pytest.mark.parametrize("impl", ("reference", "tiled"))
with_composed = pytest.mark.parametrize("impl", ("reference", "tiled", "composed"))
selecting = next(m for m in MECHANISMS if m.name == "selective")


def hold(
    addition: Addition, mechanism: Mechanism, shape: Shape, dtype: torch.dtype, visibility=None
) -> Tensors:
    """Law 2 for one case: forward and every gradient, that of what is added with them."""
    functions = (addition.run(mechanism, impl, visibility) for impl in ("tiled", "reference"))
    return against_oracle(*functions, addition.tensors(mechanism, shape), dtype)


@pytest.mark.crossed
@pytest.mark.parametrize("mechanism", [*MECHANISMS, *TWO_SIDED], ids=str)
@pytest.mark.parametrize("addition", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(mechanism, addition, dtype):
    hold(addition, mechanism, Shape().long(111), dtype)


@pytest.mark.crossed
@every
@each
@pytest.mark.parametrize("queries", [150, 70])
@pytest.mark.parametrize("visible", SIGHTS)
def test_visibilities_and_cross_lengths(mechanism, addition, visible, queries):
    visibility = VISIBILITIES[visible](150)
    actual = hold(addition, mechanism, Shape(queries=queries, keys=150), torch.float32, visibility)
    hidden = ~visibility.dense(queries, 150, torch.device("cpu")).any(0)
    if "grad bias" in actual:
        assert not bool(actual["grad bias"][:, :, hidden].any()), "what nobody sees has no gradient"
    if visible == "all padding":
        assert not any(x.any() for name, x in actual.items() if "memory" not in name)


@pytest.mark.crossed
@pytest.mark.parametrize("mechanism", [*TWO_SIDED, MECHANISMS[-1]], ids=str)
@each
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "both" in name])
def test_non_causal(mechanism, addition, visible):
    hold(addition, mechanism, Shape().long(130), torch.float32, VISIBILITIES[visible](130))


@pytest.mark.crossed
@every
@each
@with_composed
def test_gradients_by_finite_differences(mechanism, addition, impl):
    shape = Shape(batch=2, heads=2, key_heads=1, queries=9, keys=12, dim=3)
    tensors = addition.tensors(mechanism, shape)
    run = addition.run(mechanism, impl, ragged(12)[0])
    leaves = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(
        lambda *values: run(dict(zip(tensors, values, strict=True))), leaves, fast_mode=True
    )


def attention_of_a_family(tensors: Tensors, softcap: float | None, causal: bool) -> Tensor:
    """As models compute it: scaled, capped (Gemma 2), biased (T5), masked, a sink (GPT-OSS)."""
    q, k, v = (tensors[name] for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits + tensors.get("bias", 0)
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), float("-inf"))
    if (sinks := tensors.get("sinks")) is not None:  # one more column, dropped after the softmax
        column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        return torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v
    return logits.softmax(-1) @ v


IDENTITIES = [
    pytest.param(m, causal, id=f"{m}-{'causal' if causal else 'both ways'}")
    for m in MECHANISMS
    if m.identity
    for causal in (True, False)
    if causal or m not in CAUSAL_ONLY
]


@pytest.mark.crossed
@pytest.mark.parametrize(("mechanism", "causal"), IDENTITIES)
@pytest.mark.parametrize("addition", [BIAS, SOFTCAP, SINKS], ids=str)
@each_impl
def test_identity_parameters_are_the_attention_of_a_family(mechanism, causal, addition, impl):
    tensors = mechanism.identity(addition.tensors(mechanism, Shape().long(130)))
    actual = addition.run(mechanism, impl, Visibility(causal=causal))(tensors)[0]
    expected = attention_of_a_family(tensors, addition.options.get("softcap"), causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    without = {name: None for name in ("bias", "softcap", "sinks")}
    less = mechanism.run(tensors | without, impl, Visibility(causal=causal))[0]
    assert (actual - less).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("mechanism", "causal"), [x for x in IDENTITIES if x.values[0].name != "selective-own"]
)
def test_identity_parameters_with_a_bias_are_torchs_kernel_to_the_last_bit(mechanism, causal):
    """Unless memory is asked for, as selective-own does."""
    tensors = mechanism.identity(BIAS.tensors(mechanism, Shape().long(130)))
    visibility = Visibility(causal=causal)
    visible = visibility.dense(130, 130, torch.device("cpu"))
    mask = tensors["bias"].masked_fill(~visible, float("-inf"))
    q, k, v = (tensors[name] for name in "qkv")
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert torch.equal(mechanism.run(tensors, "tiled", visibility)[0], expected)


NEUTRAL = {
    "bias": (lambda *size: torch.zeros(1, *size).double(), 1e-12),
    "softcap": (lambda *_: 1e6, 1e-9),
    "sinks": (lambda heads, *_: torch.full((heads,), -60.0).double(), 1e-12),
}


@pytest.mark.crossed
@every
@each_impl
@pytest.mark.parametrize("name", NEUTRAL)
def test_none_is_nothing_and_next_to_nothing_nearly(mechanism, impl, name):
    tensors = mechanism.draw(Shape().long(100))
    make, tolerance = NEUTRAL[name]
    little = make(tensors["q"].shape[1], 100, 100)
    without, none, nearly = (
        with_grads(lambda x, more=more: mechanism.run(x | more, impl), tensors)
        for more in ({}, {name: None}, {name: little})
    )
    for part, x in without.items():
        assert torch.equal(none[part], x)
        torch.testing.assert_close(nearly[part], x, rtol=tolerance, atol=tolerance)
    if name == "bias":
        assert bool(
            with_grads(BIAS.run(mechanism, impl), tensors | {name: little})["grad bias"].any()
        )


@pytest.mark.crossed
@every
@each
@with_composed
def test_no_later_token_reaches_an_earlier_output(mechanism, addition, impl):
    """Nor does a row of the bias, which is a query's: not by a bit."""
    tensors = {n: x.float() for n, x in addition.tensors(mechanism, Shape().long(70)).items()}
    run = addition.run(mechanism, impl)
    before = run(tensors)[0]
    for t in (1, 33, 63, 64, 69):
        changed = {n: x.clone() for n, x in tensors.items()}
        for name in mechanism.per_token:
            changed[name][:, :, t] += 1
        after = run(changed)[0]
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert not torch.equal(after[:, :, t], before[:, :, t])
        if "bias" in tensors:
            bias = tensors["bias"].clone()
            bias[:, :, t, : t // 2 + 1] += 1
            after = run(tensors | {"bias": bias})[0]
            assert torch.equal(after[:, :, :t], before[:, :, :t])
            assert not torch.equal(after[:, :, t], before[:, :, t])
            bias = tensors["bias"].clone()
            bias[:, :, t, t + 1 :] += 1
            assert torch.equal(run(tensors | {"bias": bias})[0], before), "nobody sees it yet"


@pytest.mark.crossed
@every
@pytest.mark.parametrize("addition", [BIAS, SOFTCAP, SINKS, VARIANTS[-1]], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_err_no_more_than_their_definition(mechanism, addition, queries, dtype):
    inputs = cast(addition.tensors(mechanism, Shape(queries=queries, keys=61)), dtype)
    with torch.no_grad():
        actual, plain = (addition.run(mechanism, impl)(inputs) for impl in ("tiled", "reference"))
        exact = addition.run(mechanism, "reference")({n: x.double() for n, x in inputs.items()})
    for i, (x, y, z) in enumerate(zip(actual, plain, exact, strict=True)):
        assert_matches_oracle(f"output {i}", x, y, z, 61)


KERNELS = [x for x in FUSED if not x.name.startswith("selective")]


@pytest.mark.parametrize(
    "mechanism",
    [pytest.param(x, marks=() if x.name == "mta-pre-conv" else pytest.mark.slow) for x in KERNELS],
    ids=str,
)
@pytest.mark.parametrize("addition", [VARIANTS[-1], *map(exhausting, ADDITIONS)], ids=str)
def test_fused_multi_token_attention_takes_all_of_them(
    mechanism, addition, interpreted, small_blocks
):
    functions = (addition.run(mechanism, impl) for impl in ("fused", "reference"))
    tensors = addition.tensors(mechanism, Shape(batch=1, dim=16).long(40))
    against_oracle(*functions, tensors, torch.float32)


@pytest.mark.parametrize("mechanism", [x for x in FUSED if x not in KERNELS], ids=str)
@pytest.mark.parametrize(
    ("addition", "reason"),
    [(BIAS, "kernels add no bias"), (SINKS, "have no sinks"),
     (DROPOUT, r"drop no weights \(dropout_p\)"),
     (Addition("softcap", lambda *_: {}, {"softcap": CAP}), "do not cap the logits")],
    ids=str,
)  # fmt: skip
def test_fused_is_refused_and_auto_takes_tiled(mechanism, addition, reason, interpreted):
    tensors = {n: x.float() for n, x in addition.tensors(mechanism, Shape(dim=16)).items()}
    with pytest.raises(ValueError, match=f"impl='fused' does not support .* {reason}"):
        addition.run(mechanism, "fused")(tensors)
    actual = (addition.run(mechanism, impl)(tensors) for impl in ("auto", "tiled"))
    for x, y in zip(*actual, strict=True):
        assert torch.equal(x, y)


WRONG = {
    r"bias must be \[1 or 2, 1 or \d, 17, 17\] .*\(1, \d, 16, 17\)": lambda x: x["bias"][:, :, 1:],
    r"bias must be \[1 or 2, .* got \(\d, 17, 17\)": lambda x: x["bias"][0],
    "bias must be a floating-point tensor .* belongs in visibility": lambda x: x["bias"] > 0,
    "bias must be finite, .* mask tokens with visibility": lambda x: x["bias"] - torch.inf,
    r"bias must be a tensor \[1 or B, 1 or H, Tq, Tk\], got 0.5": lambda _: 0.5,
    "softcap must be positive, got 0; None caps nothing": lambda _: 0,
    "softcap must be positive, got -50": lambda _: -50.0,
    "softcap must be a finite number, got inf": lambda _: float("inf"),
    "softcap must be a finite number, got 'fifty'": lambda _: "fifty",
    "softcap must be a plain number, got a tensor, .* use its .item": lambda _: torch.tensor(50.0),
    r"sinks must be \[\d\], got \(\d, 1\)": lambda x: x["sinks"][:, None],
    r"sinks must be \[\d\], got \(1,\)": lambda x: x["sinks"][:1],
    "sinks must be finite, got NaN or infinity": lambda x: x["sinks"] - torch.inf,
    "sinks must be a floating-point tensor .* got torch.int32": lambda x: x["sinks"].int(),
    r"sinks must be a tensor \[H\] \(one logit per query head\), got 0.5": lambda _: 0.5,
    "dropout_p must be at least 0 and below 1, got 1; 0 drops nothing": lambda _: 1.0,
    "dropout_p must be at least 0 and below 1, got -0.1": lambda _: -0.1,
    "dropout_p must be a finite number, got nan": lambda _: float("nan"),
    "dropout_p must be a finite number, got '0.1'": lambda _: "0.1",
    "dropout_p must be a plain number, got a tensor": lambda _: torch.tensor(0.1),
    "seed must be a whole number from 0 .* got -1; None draws one": lambda _: -1,
    "seed must be a whole number from 0 .* got 9223372036854775808": lambda _: 2**63,
    "seed must be a whole number .* got 0.5": lambda _: 0.5,
    "seed must be a whole number .* got True": lambda _: True,
    r"seed must be .* a tensor \[\] .* got \(2,\)": lambda _: torch.tensor([1, 2]),
}


@pytest.mark.parametrize(
    "mechanism",
    [m for m in MECHANISMS if m.name in ("mta-full", "selective", "differential")],
    ids=str,
)
@pytest.mark.usefixtures("no_shape_checks")
def test_what_cannot_be_added(mechanism):
    tensors = {**BIAS.tensors(mechanism, Shape()), **SINKS.tensors(mechanism, Shape())}
    for message, wrong in WRONG.items():
        with pytest.raises(ValueError, match=message):
            mechanism.run(tensors | {message.split()[0]: wrong(tensors)}, "auto")


@every
@each_impl
def test_one_number_for_all_keys_of_a_query_changes_nothing(mechanism, impl):
    tensors = mechanism.draw(Shape().long(70))
    without = mechanism.run(tensors, impl)[0]
    bias = torch.randn(1, 1, 70, 1, dtype=torch.float64).expand(1, 1, 70, 70)
    actual = mechanism.run(tensors | {"bias": bias}, impl)[0]
    torch.testing.assert_close(actual, without, rtol=0, atol=1e-12)


@each_impl
def test_no_two_logits_are_further_apart_than_twice_the_cap(impl):
    """However large they are: the weights of two keys have a ratio of at most e^2c."""
    q, k = (30 * torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in range(2))
    v = torch.eye(70, dtype=torch.float64).expand(1, 2, 70, 70)
    actual = multi_token_attention(q, k, v, softcap=CAP, impl=impl)
    weights = actual.tril().where(torch.ones(70, 70).tril().bool(), torch.nan)
    ratio = (weights.nan_to_num(0).amax(-1) / weights.nan_to_num(9).amin(-1)).log()
    assert ratio.max() <= 2 * CAP + 1e-9 and ratio.max() > 1.9 * CAP


@pytest.mark.crossed
@pytest.mark.parametrize("mechanism", CAUSAL_ONLY, ids=str)
@each
@each_impl
def test_what_selects_sees_none_of_it(mechanism, addition, impl):
    """State and memory are those without it."""
    tensors = addition.tensors(mechanism, Shape().long(40))
    altered = addition.run(mechanism, impl)(tensors)
    own = {n: x for n, x in tensors.items() if n not in ("bias", "sinks")}
    plain = mechanism.run(own, impl)
    assert not torch.equal(plain[0], altered[0])
    assert all(torch.equal(x, y) for x, y in zip(plain[1:], altered[1:], strict=True))


@each_impl
def test_what_hides_is_not_capped_and_hides_without_limit(impl):
    """F beyond the cap takes a key away altogether."""
    tensors = selecting.draw(Shape().long(40))
    state = torch.zeros(2, 1, 40, dtype=torch.float64)
    state[:, :, 3] = 100.0
    tensors["v"][:, :, 3] += 1e6
    out = selective_attention(**tensors, softcap=CAP, state=state, impl=impl).output
    assert out[:, :, 3:].abs().max() < 100


@pytest.mark.parametrize("mechanism", CAUSAL_ONLY, ids=str)
@each_impl
def test_a_sink_scales_its_own_head_alone(mechanism, impl):
    """And no more: what is selected stays as it was."""
    tensors = SINKS.tensors(mechanism, Shape().long(40))
    before = mechanism.run(tensors, impl)
    tensors["sinks"][2] += 1
    after = mechanism.run(tensors, impl)
    less = after[0][:, 2] / before[0][:, 2]
    assert bool(((less > 0) & (less < 1)).all())
    torch.testing.assert_close(less, less[..., :1].expand_as(less))  # one factor per row
    others = [0, 1, 3]
    assert torch.equal(after[0][:, others], before[0][:, others])
    assert all(torch.equal(x, y) for x, y in zip(after[1:], before[1:], strict=True))


@each_impl
def test_what_is_masked_from_is_not_the_sink(impl):
    """F takes weight from tokens; the sink keeps its logit."""
    tensors = SINKS.tensors(selecting, Shape().long(30))
    state = torch.full((2, 1, 30), 200.0, dtype=torch.float64)
    out = selective_attention(**tensors, state=state, impl=impl).output
    assert out.abs().max() < 1e-60


PROGRAM = """
import torch
from heedful.ops import *
T = 2048
q, k, v = (torch.randn(1, 8, T, 32, requires_grad=True) for _ in range(3))
c = torch.randn(8, 6, 11)
b = torch.randn(1, 1, T, T, requires_grad=True)
def run(n=T):
    x, y, z = (t[:, :, :n] for t in (q, k, v))
    terms = {terms}
    {call}.sum().backward()
run(70)
for t in (q, k, v, b):
    t.grad = None
"""
SELECTIVE = "selective_attention(x, y, z, **terms).output"
A_BIAS, A_CAP = '{"bias": b[:, :, :n, :n]}', '{"softcap": 5.0}'
# A map of all heads would take 128 MiB, a tile takes 4. The bias takes 16, and so does its
# gradient, of which autograd holds two at a time.
MEMORY = {
    "mta": ("multi_token_attention(x, y, z, conv=c, **terms)", A_BIAS, 3 * 16 + 8),
    "selective": (SELECTIVE, A_BIAS, 3 * 16 + 8),
    "differential": (
        "differential_attention(x, y, torch.cat([z[:, ::2], z[:, 1::2]], -1), "
        "lam=torch.tensor(0.5), **terms)",
        A_BIAS,
        3 * 16 + 8,
    ),
    "selective, capped": (SELECTIVE, A_CAP, 4 * 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
def test_memory_beside_that_of_what_is_added(name):
    call, inputs, most = MEMORY[name]
    plain, more = (peak_memory_mib(PROGRAM.format(call=call, terms=x)) for x in ("{}", inputs))
    assert more - plain < most, (plain, more)
