"""The laws that every mechanism keeps, in every implementation and precision."""

from itertools import filterfalse

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Queries, Visibility
from heedful.testing import assert_causal, assert_matches_oracle
from helpers.mechanisms import (
    FUSED,
    LOW_RANK,
    LOW_RANK_TWO_SIDED,
    MECHANISMS,
    TWO_SIDED,
    VISIBILITIES,
    Mechanism,
    Shape,
    forms,
    ragged,
    run_by,
)
from helpers.oracle import against_oracle, assert_equal_in_fp64, with_grads

ALL, ENCODING = [*MECHANISMS, *LOW_RANK], [*TWO_SIDED, LOW_RANK_TWO_SIDED]
every = pytest.mark.parametrize("mechanism", ALL, ids=str)
with_two_sided = pytest.mark.parametrize("mechanism", [*ALL, *ENCODING], ids=str)
each_impl = pytest.mark.parametrize("impl", ("reference", "tiled", "composed"))
in_blocks = pytest.mark.parametrize("impl", ("tiled", "composed"))
fused = pytest.mark.parametrize("mechanism", FUSED, ids=str)


def each_form(mechanisms: list[Mechanism], without: str = ""):
    """In the interpreter each law takes the fused form half a minute; on a GPU, no time."""
    cases = [
        pytest.param(x, impl, marks=pytest.mark.slow if impl.interpreted else (), id=f"{x}-{impl}")
        for x, impl in forms(mechanisms)
        if impl.name != without
    ]
    return pytest.mark.parametrize(("mechanism", "impl"), cases)


pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def forms_run(request: pytest.FixtureRequest) -> None:
    """Laws of the fused form need its kernels, in the interpreter or on the GPU, and those of the
    composed form several blocks."""
    parameters = getattr(request.node, "callspec", None)
    impl = "" if parameters is None else str(parameters.params.get("impl"))
    needed = {"fused": ("interpreted", "bfloat16"), "composed": ("small_blocks",)}
    for name in needed.get(impl, ()):
        request.getfixturevalue(name)


def hold(
    mechanism: Mechanism, shape: Shape, dtype: torch.dtype, visibility, impl: str = "auto"
) -> None:
    """Law 2 for one case; `auto` is tiled on a CPU and composed on a GPU."""
    functions = (run_by(mechanism, name, visibility) for name in (impl, "reference"))
    against_oracle(*functions, mechanism.draw(shape), dtype, f"{mechanism} {shape}")


def assert_same(actual: Tensor, mechanism: Mechanism, tensors: dict[str, Tensor], impl, part=0):
    """`actual` is what the mechanism makes of these tensors: in fp64, or by law 2 of the oracle."""
    if impl.dtype == torch.float64:
        expected = mechanism.run(tensors, impl.name)[part]
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
        return
    plain = mechanism.run(tensors, "reference")[part]
    exact = {name: x.double() for name, x in tensors.items()}
    oracle = mechanism.run(exact, "reference")[part]
    assert_matches_oracle(str(mechanism), actual, plain, oracle, tensors["k"].shape[2])


@with_two_sided
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(mechanism, dtype):
    hold(mechanism, Shape().long(111), dtype, None)


@with_two_sided
@pytest.mark.parametrize("units", [False, True], ids=["widened", "units"])
def test_bfloat16_on_a_cpu_with_and_without_units_for_it(mechanism, units, monkeypatch):
    monkeypatch.setattr("heedful.ops.common.precision.bf16_on_cpu", lambda: units)
    hold(mechanism, Shape().long(111), torch.bfloat16, None)


@pytest.mark.sampled(2)
@fused
def test_fused_too_through_the_public_functions(mechanism, interpreted):
    """One case each; the fused kernels have test files of their own."""
    shape = Shape(batch=1).long(20)
    hold(mechanism, shape, torch.float32, Visibility(window=15), impl="fused")


@every
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_that_are_not_positive(mechanism, scale):
    """Also with identity parameters, where torch's own kernel runs."""
    tensors = mechanism.draw(Shape(batch=1).long(130))
    for inputs in (tensors, mechanism.identity(tensors) if mechanism.identity else tensors):
        functions = (run_by(mechanism, x, None, scale=scale) for x in ("tiled", "reference"))
        assert_equal_in_fp64(*functions, inputs, 1e-13)


@each_form(ALL, "reference")
def test_transposed_inputs_give_the_same_bits(mechanism, impl):
    """As models hand them over: [B, T, H, D] seen as [B, H, T, D]; torch's own may differ."""
    tensors = impl.draw(mechanism, Shape(), 100, torch.float32)
    transposed = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) if name in mechanism.per_token else x
        for name, x in tensors.items()
    }
    actual = with_grads(run_by(mechanism, impl.name), transposed)
    for name, x in with_grads(run_by(mechanism, impl.name), tensors).items():
        assert torch.equal(actual[name], x), name


@with_two_sided
@pytest.mark.parametrize(
    ("tokens", "dim"),
    [(1, 16), (2, 16), (17, 96), (63, 64), (64, 16), (65, 256), (257, 16)],
    ids=str,
)
def test_odd_lengths_and_head_dims(mechanism, tokens, dim):
    if "low-rank" in mechanism.name and tokens == 1:
        pytest.skip("torch's kernels round gradients that are zero, see test_low_rank.py")
    hold(mechanism, Shape(batch=1, dim=dim).long(tokens), torch.float32, None)


@pytest.mark.crossed
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@in_blocks
@pytest.mark.parametrize("queries", [150, 70, 1])
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "both" not in name])
def test_visibilities_and_cross_lengths(mechanism, visible, queries, impl):
    """In fp64 the definition, gradients too; low rank has all of these in test_low_rank.py."""
    visibility = VISIBILITIES[visible](150)
    functions = (run_by(mechanism, name, visibility) for name in (impl, "reference"))
    assert_equal_in_fp64(*functions, mechanism.draw(Shape(queries=queries, keys=150)), 1e-13)


@pytest.mark.parametrize(
    "mechanism", [m for m in ALL if m.name.startswith(("mta", "low"))], ids=str
)
@pytest.mark.parametrize("visible", ["causal", "ragged documents"])
def test_more_heads_than_a_kernel_s_gradient_takes_at_a_time(mechanism, visible):
    shape = Shape(heads=12, key_heads=4).long(20)
    hold(mechanism, shape, torch.float32, VISIBILITIES[visible](20))


@pytest.mark.crossed
@pytest.mark.parametrize(
    "mechanism", [*ENCODING, *(m for m in ALL if "selective" not in str(m))], ids=str
)
@in_blocks
@pytest.mark.parametrize("queries", [150, 70, 5])
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "both" in name])
def test_non_causal(mechanism, visible, queries, impl):
    visibility = VISIBILITIES[visible](150)
    functions = (run_by(mechanism, name, visibility) for name in (impl, "reference"))
    assert_equal_in_fp64(*functions, mechanism.draw(Shape(queries=queries, keys=150)), 1e-12)


@every
@each_impl
def test_gradients_by_finite_differences(mechanism, impl):
    shape = Shape(batch=2, heads=2, key_heads=1, queries=9, keys=12, dim=3)
    tensors = mechanism.draw(shape)
    names = list(tensors)

    def function(*values):
        return mechanism.run(dict(zip(names, values, strict=True)), impl, ragged(12)[0])

    leaves = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@each_form([m for m in ALL if m.identity])
def test_identity_parameters_are_standard_attention(mechanism, impl):
    tensors = mechanism.identity(impl.draw(mechanism, Shape(), 130))
    actual = mechanism.run(tensors, impl.name)[0]

    def standard(x: dict[str, Tensor]) -> Tensor:
        return scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True)

    exact = standard({name: x.double() for name, x in tensors.items()})
    if impl.dtype == torch.float64:
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
    else:
        assert_matches_oracle(str(mechanism), actual, standard(tensors), exact, 130)


@each_impl
def test_differential_without_its_second_map_is_standard_attention(impl):
    mechanism = MECHANISMS[-1]
    tensors = mechanism.draw(Shape().long(70)) | {"lam": torch.zeros((), dtype=torch.float64)}
    expected = scaled_dot_product_attention(
        tensors["q"][:, ::2], tensors["k"][:, ::2], tensors["v"], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(mechanism.run(tensors, impl)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.crossed
@every
@each_impl
@pytest.mark.parametrize("visible", ["causal", "window", "ragged"])
def test_no_token_changes_an_earlier_output_by_a_bit(mechanism, impl, visible):
    tensors = mechanism.draw(Shape().long(70))
    tensors = {name: x.float() for name, x in tensors.items()}
    widths = [tensors[name].shape for name in mechanism.per_token]
    joined = torch.cat(
        [tensors[name].transpose(1, 2).flatten(2) for name in mechanism.per_token], dim=2
    )
    visibility = {
        "causal": None,
        "window": Visibility(window=9),
        "ragged": Visibility(documents=ragged(70)[1]),
    }[visible]

    def function(tokens):
        parts = tokens.split([heads * dim for _, heads, _, dim in widths], dim=2)
        all_tensors = {
            name: part.unflatten(2, (heads, dim)).transpose(1, 2)
            for name, part, (_, heads, _, dim) in zip(
                mechanism.per_token, parts, widths, strict=True
            )
        }
        return mechanism.run(tensors | all_tensors, impl, visibility)[0].transpose(1, 2)

    assert_causal(function, joined, dim=1)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@each_impl
def test_of_tokens_that_see_each_other_only_they_see_later_ones(mechanism, impl):
    tensors = mechanism.draw(Shape().long(70))
    mutual = torch.full((1, 70), -1)
    mutual[:, 60:66] = 0
    visibility = Visibility(mutual=mutual)
    before = mechanism.run(tensors, impl, visibility)[0]
    changed = {name: x.clone() for name, x in tensors.items()}
    for name in mechanism.per_token:
        changed[name][:, :, 64] += 1
    moved = (mechanism.run(changed, impl, visibility)[0] != before).any(-1).any(1)
    assert not bool(moved[:, :60].any()) and bool(moved[:, 60:].all())
    alone = mechanism.run(tensors, impl)[0]
    torch.testing.assert_close(before[:, :, :60], alone[:, :, :60], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mechanism", [x for x in FUSED if x.name.startswith("selective")], ids=str)
def test_fused_kernels_refuse_tokens_that_see_later_ones(mechanism, interpreted):
    tensors = {name: x.float() for name, x in mechanism.draw(Shape()).items()}
    with pytest.raises(ValueError, match=r"impl='fused' does not support .* see later ones"):
        mechanism.run(tensors, "fused", Visibility(mutual=torch.zeros(1, 17).long()))


def joins_neighbours(mechanism: Mechanism) -> bool:
    return not {"conv", "post_conv", "u"}.isdisjoint(mechanism.draw(Shape()))


def with_evicted_keys(mechanism: Mechanism):
    """A call of 90 keys, the same of fewer in any order with their positions, and those kept."""
    tensors = mechanism.draw(Shape(queries=9, keys=90))
    rest = torch.ones(90, dtype=torch.bool)
    rest[torch.randperm(81)[:50]] = False
    order = torch.cat([torch.randperm(int(rest.sum()) - 9), torch.arange(int(rest.sum()))[-9:]])
    places = rest.nonzero()[:, 0][order]
    fewer = dict(tensors)
    for name in ("k", "v", "selector_k"):
        if name in fewer:
            fewer[name] = tensors[name][:, :, places]
    return tensors, fewer, Visibility(positions=places[None], window=60), rest


@pytest.mark.parametrize("mechanism", [*filter(joins_neighbours, ALL)], ids=str)
@each_impl
def test_a_convolution_refuses_keys_out_of_order(mechanism, impl):
    _, fewer, evicted, _ = with_evicted_keys(mechanism)
    with pytest.raises(ValueError, match=r"conv joins neighbours, and with"):
        mechanism.run(fewer, impl, evicted)


@pytest.mark.parametrize("mechanism", [*filterfalse(joins_neighbours, MECHANISMS)], ids=str)
@each_impl
def test_keys_may_lie_anywhere_with_their_positions(mechanism, impl):
    """As in a cache under a budget: what is left, in any order, is a sequence with padding."""
    tensors, fewer, evicted, rest = with_evicted_keys(mechanism)
    whole = mechanism.run(tensors, impl, Visibility(padding=rest[None], window=60))
    actual = mechanism.run(fewer, impl, evicted)
    torch.testing.assert_close(actual[0], whole[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mechanism", [m for m in ALL if "selective" not in m.name], ids=str)
@each_impl
def test_cross_attention(mechanism, impl):
    """Queries of their own, not causal: one call for all is one call for each document."""
    tensors = mechanism.draw(Shape(queries=40, keys=70))
    of_queries, of_keys = (torch.arange(n)[None] // 30 for n in (40, 70))
    padding = torch.ones(2, 70, dtype=torch.bool)
    padding[0, 50:] = False
    queries = Queries(documents=of_queries, padding=(torch.arange(40) < 38)[None])
    visibility = Visibility(causal=False, documents=of_keys, padding=padding, queries=queries)
    actual = mechanism.run(tensors, impl, visibility)[0]
    assert not bool(actual[:, :, 38:].any()), "padded queries get zeros"
    for number in (0, 1):
        rows, columns = of_queries[0] == number, of_keys[0] == number
        rows[38:] = False
        part = dict(tensors)
        part["q"] = tensors["q"][:, :, rows]
        part |= {name: tensors[name][:, :, columns] for name in ("k", "v")}
        alone = Visibility(causal=False, padding=padding[:, columns], queries=Queries())
        expected = mechanism.run(part, impl, alone)[0]
        torch.testing.assert_close(actual[:, :, rows], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mechanism", [m for m in ALL if "selective" not in m.name], ids=str)
@pytest.mark.parametrize("queries", [70, 40])
def test_a_source_without_padding_needs_no_queries_of_its_own(mechanism, queries):
    """All see all, so that no place counts, however many queries there are."""
    tensors = mechanism.draw(Shape(queries=queries, keys=50))
    plain, explicit = Visibility(causal=False), Visibility(causal=False, queries=Queries())
    for impl in ("reference", "auto"):
        actual, expected = (
            mechanism.run(tensors, impl, visibility)[0] for visibility in (plain, explicit)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    hold(mechanism, Shape(queries=queries, keys=50), torch.float32, plain)


@every
def test_gradients_under_positions_and_queries(mechanism):
    at = torch.randperm(200)[:150].sort().values[None]
    shape = Shape(queries=70, keys=150)
    if not joins_neighbours(mechanism):
        hold(mechanism, shape, torch.float32, Visibility(positions=at))
    if "selective" not in mechanism.name:
        queries = Queries(padding=torch.arange(70)[None] < 60)
        visibility = Visibility(causal=False, queries=queries)
        hold(mechanism, Shape(queries=70, keys=50), torch.float32, visibility)


@each_form(ALL)
def test_packed_documents_are_separate_documents(mechanism, impl):
    lengths = impl.lengths
    tensors = impl.draw(mechanism, Shape(batch=1), sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = mechanism.run(tensors, impl.name, Visibility.packed(offsets))[0]
    for start, length in zip(offsets.tolist(), lengths, strict=False):
        rows = slice(start, start + length)
        alone = {
            name: x[:, :, rows] if name in mechanism.per_token else x for name, x in tensors.items()
        }
        assert_same(packed[:, :, rows], mechanism, alone, impl)


@each_form(ALL)
def test_a_padded_row_is_the_row_alone_and_padding_gives_zero(mechanism, impl):
    tokens = impl.at_most(100)
    tensors = impl.draw(mechanism, Shape(), tokens)
    visibility = Visibility(padding=ragged(tokens)[2])
    padded = mechanism.run(tensors, impl.name, visibility)[0]
    for row in range(2):
        real = visibility.padding[row]
        assert bool((padded[row][:, ~real] == 0).all())
        alone = {
            name: x[row : row + 1, :, real] if name in mechanism.per_token else x
            for name, x in tensors.items()
        }
        assert_same(padded[row : row + 1, :, real], mechanism, alone, impl)


@each_form(ALL)
def test_grouped_queries_are_repeated_keys(mechanism, impl):
    tensors = impl.draw(mechanism, Shape(key_heads=1), 70)
    repeated = dict(tensors)
    if str(mechanism) == "differential":
        repeated["k"] = tensors["k"].unflatten(1, (-1, 2)).repeat_interleave(4, dim=1).flatten(1, 2)
    else:
        repeated["k"] = tensors["k"].repeat_interleave(4, dim=1)
    repeated["v"] = tensors["v"].repeat_interleave(4, dim=1)
    for part, grouped in enumerate(mechanism.run(tensors, impl.name)):
        assert_same(grouped, mechanism, repeated, impl, part)


@each_form(ALL)
def test_rows_do_not_depend_on_the_batch_and_runs_repeat_bit_for_bit(mechanism, impl):
    tensors = impl.draw(mechanism, Shape(batch=3), 100, torch.float32)
    whole = with_grads(run_by(mechanism, impl.name), tensors)
    again = with_grads(run_by(mechanism, impl.name), tensors)
    for name, x in whole.items():
        assert torch.equal(x, again[name]), name
    for row in range(3):
        alone = {
            name: x[row : row + 1] if name in mechanism.per_token else x
            for name, x in tensors.items()
        }
        assert torch.equal(mechanism.run(alone, impl.name)[0][0], whole["output 0"][row])


@every
@each_impl
def test_autocast_casts_the_inputs_and_nothing_else(mechanism, impl):
    tensors = {n: x.float() for n, x in mechanism.draw(Shape(batch=1).long(100)).items()}
    tokens = [name for name in tensors if name in mechanism.per_token]
    half = {n: x.bfloat16() if n in tokens else x for n, x in tensors.items()}
    expected = with_grads(run_by(mechanism, impl, None), half)
    with torch.autocast("cpu", torch.bfloat16):
        actual = with_grads(run_by(mechanism, impl, None), tensors)
    for name, x in actual.items():
        assert torch.equal(x, expected[name].to(x.dtype)), name
        assert name.startswith("grad") or x.dtype == expected[name].dtype


@every
@each_impl
def test_how_far_nan_reaches(mechanism, impl):
    """Never into another row; of q and k, without a convolution, not out of the document.

    But of k in composed selective attention, into other queries of a block and later documents.
    """
    tensors = mechanism.draw(Shape().long(100))
    visibility = Visibility(documents=(torch.arange(100) >= 61).long()[None])
    before = mechanism.run(tensors, impl, visibility)[0]
    for part in "qkv":
        damaged = tensors | {part: tensors[part].clone()}
        damaged[part][0, :, 60] = float("nan")
        after = mechanism.run(damaged, impl, visibility)[0]
        assert bool(after[0, :, 60].isnan().all())
        assert torch.equal(after[1], before[1])
        if part != "v" and not joins_neighbours(mechanism):
            start, stop = 60, 61
            if impl == "composed" and "selective" in mechanism.name and part == "k":
                start, stop = 32, 100  # its block, and the end: torch's own attention adds its mask
            assert torch.equal(after[0, :, :start], before[0, :, :start])
            assert torch.equal(after[0, :, stop:], before[0, :, stop:])
