"""The laws that every mechanism keeps, in every implementation and precision."""

import pytest
import torch
from mechanisms import MECHANISMS, Mechanism, Shape, ragged
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Queries, Visibility
from heedful.testing import assert_causal, assert_matches_oracle, peak_memory_mib

IMPLS = ("reference", "tiled")
every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
each_impl = pytest.mark.parametrize("impl", IMPLS)


VISIBILITIES = {
    "window 1": lambda keys: Visibility(window=1),
    "window 9": lambda keys: Visibility(window=9),
    "window 70": lambda keys: Visibility(window=70),
    "ragged documents": lambda keys: ragged(keys)[0],
    "documents in a window": lambda keys: Visibility(documents=ragged(keys)[1], window=20),
    "one row of documents for all": lambda keys: Visibility(documents=ragged(keys)[1][:1]),
    "all padding": lambda keys: Visibility(padding=torch.zeros(2, keys, dtype=torch.bool)),
    "mutual": lambda keys: Visibility(mutual=runs(keys)),
    "mutual in a window": lambda keys: Visibility(
        window=20, mutual=runs(keys), padding=ragged(keys)[2]
    ),
}


def runs(keys: int) -> Tensor:
    """Two rows with runs of tokens that see each other; one crosses the border of a row block."""
    token = torch.arange(keys)
    first = torch.where((token > 3) & (token < 30), 0, -1)
    second = torch.where((token >= keys - 95) & (token < keys - 75), 4, first)
    return torch.stack([second, first.roll(2)])


def with_grads(
    mechanism: Mechanism, tensors: dict[str, Tensor], impl: str, visibility, **options
) -> dict:
    """Outputs and the gradient of a fixed functional of them in every tensor."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    outputs = mechanism.run(leaves | options, impl, visibility)
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (
            out.to(torch.float64) * torch.randn(out.shape, generator=generator, dtype=torch.float64)
        ).sum()
        for out in outputs
    )
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    return named | {f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}


def against_oracle(
    mechanism: Mechanism, shape: Shape, dtype: torch.dtype, visibility, impl: str = "tiled"
) -> None:
    """Law 2 for one case."""
    tensors = {name: x.to(dtype) for name, x in mechanism.draw(shape).items()}
    actual = with_grads(mechanism, tensors, impl, visibility)
    plain = with_grads(mechanism, tensors, "reference", visibility)
    exact = {name: x.double() for name, x in tensors.items()}
    oracle = with_grads(mechanism, exact, "reference", visibility)
    for name, x in actual.items():
        assert_matches_oracle(
            f"{mechanism} {name} {shape}", x, plain[name], oracle[name], shape.keys
        )


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(mechanism, dtype):
    against_oracle(mechanism, Shape().long(111), dtype, None)


@every
@pytest.mark.parametrize("units", [False, True], ids=["widened", "units"])
def test_bfloat16_on_a_cpu_with_and_without_units_for_it(mechanism, units, monkeypatch):
    monkeypatch.setattr("heedful.ops.common.precision._bf16_cpu", lambda: units)
    against_oracle(mechanism, Shape().long(111), torch.bfloat16, None)


@every
def test_fused_too_through_the_public_functions(mechanism, interpreted):
    """One case each; the fused kernels have test files of their own."""
    shape = Shape(batch=1).long(37)
    against_oracle(mechanism, shape, torch.float32, Visibility(window=30), impl="fused")


@every
@pytest.mark.parametrize("visible", ["causal", "ragged documents", "window 70"])
def test_tiled_is_the_definition_in_fp64(mechanism, visible):
    visibility = VISIBILITIES[visible](150) if visible in VISIBILITIES else None
    tensors = mechanism.draw(Shape(queries=140, keys=150))
    actual = with_grads(mechanism, tensors, "tiled", visibility)
    expected = with_grads(mechanism, tensors, "reference", visibility)
    for name, x in actual.items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-13 * (1 + scale), msg=name)


@every
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_that_are_not_positive(mechanism, scale):
    """Also with identity parameters, where torch's own kernel runs."""
    tensors = mechanism.draw(Shape(batch=1).long(130))
    for given in (tensors, mechanism.identity(tensors) if mechanism.identity else tensors):
        actual = with_grads(mechanism, given, "tiled", None, scale=scale)
        expected = with_grads(mechanism, given, "reference", None, scale=scale)
        for name, x in actual.items():
            size = expected[name].abs().max().item()
            torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-13 * (1 + size), msg=name)


@every
def test_transposed_inputs_give_the_same_bits(mechanism):
    """As models hand them over: [B, T, H, D] seen as [B, H, T, D]."""
    tensors = {n: x.float() for n, x in mechanism.draw(Shape().long(100)).items()}
    transposed = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) if name in mechanism.per_token else x
        for name, x in tensors.items()
    }
    actual = with_grads(mechanism, transposed, "tiled", None)
    for name, x in with_grads(mechanism, tensors, "tiled", None).items():
        assert torch.equal(actual[name], x), name


@every
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 63, 64, 65, 257])
def test_odd_lengths(mechanism, tokens):
    against_oracle(mechanism, Shape(batch=1).long(tokens), torch.float32, None)


@every
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_head_dims(mechanism, dim):
    against_oracle(mechanism, Shape(batch=1, dim=dim).long(70), torch.float32, None)


@every
@pytest.mark.parametrize("queries", [150, 70, 1])
@pytest.mark.parametrize("visible", VISIBILITIES)
def test_visibilities_and_cross_lengths(mechanism, visible, queries):
    shape = Shape(queries=queries, keys=150)
    against_oracle(mechanism, shape, torch.float32, VISIBILITIES[visible](150))


INTEGERS = [
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
]  # fmt: skip


@every
@each_impl
def test_documents_may_be_integers_of_any_type(mechanism, impl):
    """Numbers up to the largest of the narrowest types, beside padding."""
    _, documents, padding = ragged(30)
    tensors = mechanism.draw(Shape().long(30))
    for largest, types in ((127, INTEGERS), (255, [torch.uint8])):
        numbers = documents * (largest - 3) + 3
        expected = mechanism.run(tensors, impl, Visibility(documents=numbers, padding=padding))
        for dtype in types:
            narrow = Visibility(documents=numbers.to(dtype), padding=padding)
            for x, y in zip(mechanism.run(tensors, impl, narrow), expected, strict=True):
                assert torch.equal(x, y), dtype


@every
@each_impl
def test_negative_documents_are_padding(mechanism, impl):
    _, documents, padding = ragged(30)
    tensors = mechanism.draw(Shape().long(30))
    negative = Visibility(documents=documents.where(padding, -1 - documents))
    expected = mechanism.run(tensors, impl, Visibility(documents=documents, padding=padding))
    for x, y in zip(mechanism.run(tensors, impl, negative), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if "selective" not in str(m)], ids=str)
def test_non_causal(mechanism):
    against_oracle(mechanism, Shape().long(130), torch.float32, Visibility(causal=False))


@every
@each_impl
@pytest.mark.parametrize("visible", ["causal", "ragged"])
def test_gradients_by_finite_differences(mechanism, impl, visible):
    shape = Shape(batch=2, heads=2, key_heads=1, queries=9, keys=12, dim=3)
    tensors = mechanism.draw(shape)
    names = list(tensors)

    def function(*values):
        visibility = ragged(12)[0] if visible == "ragged" else None
        return mechanism.run(dict(zip(names, values, strict=True)), impl, visibility)

    leaves = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.identity], ids=str)
@each_impl
def test_identity_parameters_are_standard_attention(mechanism, impl):
    tensors = mechanism.identity(mechanism.draw(Shape().long(130)))
    expected = scaled_dot_product_attention(
        tensors["q"], tensors["k"], tensors["v"], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(mechanism.run(tensors, impl)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_differential_without_its_second_map_is_standard_attention(impl):
    mechanism = MECHANISMS[-1]
    tensors = mechanism.draw(Shape().long(70)) | {"lam": torch.zeros((), dtype=torch.float64)}
    expected = scaled_dot_product_attention(
        tensors["q"][:, ::2], tensors["k"][:, ::2], tensors["v"], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(mechanism.run(tensors, impl)[0], expected, rtol=1e-12, atol=1e-12)


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
        named = {
            name: part.unflatten(2, (heads, dim)).transpose(1, 2)
            for name, part, (_, heads, _, dim) in zip(
                mechanism.per_token, parts, widths, strict=True
            )
        }
        return mechanism.run(tensors | named, impl, visibility)[0].transpose(1, 2)

    assert_causal(function, joined, dim=1)


@every
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


@every
def test_fused_kernels_refuse_tokens_that_see_later_ones(mechanism, interpreted):
    tensors = {name: x.float() for name, x in mechanism.draw(Shape()).items()}
    with pytest.raises(ValueError, match=r"impl='fused' cannot .* see later ones"):
        mechanism.run(tensors, "fused", Visibility(mutual=torch.zeros(1, 17).long()))


JOINING = ("conv", "post_conv")


@every
@each_impl
def test_keys_may_lie_anywhere_if_their_positions_are_told(mechanism, impl):
    """As in a cache that has let some go: what is left, in any order, is a row with padding."""
    shape = Shape(queries=9, keys=90)
    tensors = mechanism.draw(shape)
    kept = torch.ones(90, dtype=torch.bool)
    kept[torch.randperm(81)[:50]] = False
    order = torch.cat([torch.randperm(int(kept.sum()) - 9), torch.arange(int(kept.sum()))[-9:]])
    places = kept.nonzero()[:, 0][order]
    fewer = dict(tensors)
    for name in ("k", "v", "selector_k"):
        if name in fewer:
            fewer[name] = tensors[name][:, :, places]
    evicted = Visibility(positions=places[None], window=60)
    if any(name in tensors for name in JOINING):
        with pytest.raises(ValueError, match=r"conv joins neighbours, and with"):
            mechanism.run(fewer, impl, evicted)
        return
    whole = mechanism.run(tensors, impl, Visibility(padding=kept[None], window=60))
    found = mechanism.run(fewer, impl, evicted)
    torch.testing.assert_close(found[0], whole[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if "selective" not in m.name], ids=str)
@each_impl
def test_cross_attention(mechanism, impl):
    """Queries of their own, not causal: one call for all is one call for each document."""
    tensors = mechanism.draw(Shape(queries=40, keys=70))
    of_queries, of_keys = (torch.arange(n)[None] // 30 for n in (40, 70))
    padding = torch.ones(2, 70, dtype=torch.bool)
    padding[0, 50:] = False
    queries = Queries(documents=of_queries, padding=(torch.arange(40) < 38)[None])
    visibility = Visibility(causal=False, documents=of_keys, padding=padding, queries=queries)
    found = mechanism.run(tensors, impl, visibility)[0]
    assert not bool(found[:, :, 38:].any()), "padded queries get zeros"
    for number in (0, 1):
        rows, columns = of_queries[0] == number, of_keys[0] == number
        rows[38:] = False
        part = dict(tensors)
        part["q"] = tensors["q"][:, :, rows]
        part |= {name: tensors[name][:, :, columns] for name in ("k", "v")}
        alone = Visibility(causal=False, padding=padding[:, columns], queries=Queries())
        expected = mechanism.run(part, impl, alone)[0]
        torch.testing.assert_close(found[:, :, rows], expected, rtol=0, atol=1e-12)


@every
def test_gradients_under_positions_and_queries(mechanism):
    at = torch.randperm(200)[:150].sort().values[None]
    shape = Shape(queries=70, keys=150)
    if not any(name in mechanism.draw(shape) for name in JOINING):
        against_oracle(mechanism, shape, torch.float32, Visibility(positions=at))
    if "selective" not in mechanism.name:
        queries = Queries(padding=torch.arange(70)[None] < 60)
        visibility = Visibility(causal=False, queries=queries)
        against_oracle(mechanism, Shape(queries=70, keys=50), torch.float32, visibility)


@every
@each_impl
def test_packed_documents_are_separate_documents(mechanism, impl):
    lengths = [1, 40, 3, 66, 30]
    shape = Shape(batch=1).long(sum(lengths))
    tensors = mechanism.draw(shape)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = mechanism.run(tensors, impl, Visibility.packed(offsets))[0]
    for start, length in zip(offsets.tolist(), lengths, strict=False):
        alone = {
            name: x[:, :, start : start + length] if name in mechanism.per_token else x
            for name, x in tensors.items()
        }
        torch.testing.assert_close(
            packed[:, :, start : start + length],
            mechanism.run(alone, impl)[0],
            rtol=1e-11,
            atol=1e-12,
        )


@every
@each_impl
def test_a_padded_row_is_the_row_alone_and_padding_gives_zero(mechanism, impl):
    tensors = mechanism.draw(Shape().long(100))
    visibility = Visibility(padding=ragged(100)[2])
    padded = mechanism.run(tensors, impl, visibility)[0]
    for row in range(2):
        real = visibility.padding[row]
        assert bool((padded[row][:, ~real] == 0).all())
        alone = {
            name: x[row : row + 1, :, real] if name in mechanism.per_token else x
            for name, x in tensors.items()
        }
        torch.testing.assert_close(
            padded[row][:, real], mechanism.run(alone, impl)[0][0], rtol=1e-11, atol=1e-12
        )


@every
@each_impl
@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_queries_are_repeated_keys(mechanism, impl, key_heads):
    tensors = mechanism.draw(Shape(key_heads=key_heads).long(70))
    repeated = dict(tensors)
    if str(mechanism) == "differential":
        pairs = tensors["k"].unflatten(1, (-1, 2)).repeat_interleave(4 // key_heads, dim=1)
        repeated["k"] = pairs.flatten(1, 2)
    else:
        repeated["k"] = tensors["k"].repeat_interleave(4 // key_heads, dim=1)
    repeated["v"] = tensors["v"].repeat_interleave(4 // key_heads, dim=1)
    for grouped, full in zip(
        mechanism.run(tensors, impl), mechanism.run(repeated, impl), strict=True
    ):
        torch.testing.assert_close(grouped, full, rtol=1e-12, atol=1e-13)


@every
@each_impl
def test_rows_do_not_depend_on_the_batch_and_runs_repeat_bit_for_bit(mechanism, impl):
    tensors = {n: x.float() for n, x in mechanism.draw(Shape(batch=3).long(100)).items()}
    whole = with_grads(mechanism, tensors, impl, None)
    again = with_grads(mechanism, tensors, impl, None)
    for name, x in whole.items():
        assert torch.equal(x, again[name]), name
    for row in range(3):
        alone = {
            name: x[row : row + 1] if name in mechanism.per_token else x
            for name, x in tensors.items()
        }
        assert torch.equal(mechanism.run(alone, impl)[0][0], whole["output 0"][row])


@every
@each_impl
def test_autocast_casts_the_inputs_and_nothing_else(mechanism, impl):
    tensors = {n: x.float() for n, x in mechanism.draw(Shape(batch=1).long(100)).items()}
    tokens = [name for name in tensors if name in mechanism.per_token]
    half = {n: x.bfloat16() if n in tokens else x for n, x in tensors.items()}
    expected = with_grads(mechanism, half, impl, None)
    with torch.autocast("cpu", torch.bfloat16):
        actual = with_grads(mechanism, tensors, impl, None)
    for name, x in actual.items():
        assert torch.equal(x, expected[name].to(x.dtype)), name
        assert name.startswith("grad") or x.dtype == expected[name].dtype


@every
@each_impl
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_how_far_nan_reaches(mechanism, impl, part):
    """Never into another row; of q and k, without a convolution, not out of the document."""
    tensors = mechanism.draw(Shape().long(100))
    visibility = Visibility(documents=(torch.arange(100) >= 61).long()[None])
    damaged = tensors | {part: tensors[part].clone()}
    damaged[part][0, :, 60] = float("nan")
    before, after = (mechanism.run(x, impl, visibility)[0] for x in (tensors, damaged))
    assert bool(after[0, :, 60].isnan().all())
    assert torch.equal(after[1], before[1])
    if part != "v" and not {"conv", "post_conv"} & tensors.keys():
        assert torch.equal(after[0, :, :60], before[0, :, :60])
        assert torch.equal(after[0, :, 61:], before[0, :, 61:])


PROGRAM = """
import torch
from heedful.ops import *
torch.manual_seed(0)
T = {tokens}
q, k, v = (torch.randn(1, {heads}, T, {dim}, requires_grad={train}) for _ in range(3))
c = torch.randn({heads}, 6, 11, requires_grad={train})
m = torch.randn(1, {heads}, {heads}, requires_grad={train})
def attend(q, k, v):
    out = {call}
    if {train}:
        out.sum().backward()
attend(*(x[:, :, :70].detach().requires_grad_({train}) for x in (q, k, v)))  # imports and pools
def run():
    attend(q, k, v)
"""
CALLS = {
    "mta-pre": "multi_token_attention(q, k, v, conv=c, impl='{impl}')",
    "mta": "multi_token_attention(q, k, v, conv=c, post_conv=c, mix=m, post_mix=m, impl='{impl}')",
    "selective": "selective_attention(q, k, v, tau=1.0, impl='{impl}').output",
    "differential": "differential_attention(q, k, torch.cat([v[:, ::2], v[:, 1::2]], -1), "
    "lam=torch.tensor(0.5), impl='{impl}')",
}


def peak(name: str, impl: str, tokens: int, train: bool, heads: int = 8, dim: int = 64) -> float:
    sizes = {"tokens": tokens, "heads": heads, "dim": dim}
    call = CALLS[name].format(impl=impl)
    return peak_memory_mib(PROGRAM.format(call=call, train=train, **sizes))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_peak_memory_grows_linearly(name, train):
    short, long = (peak(name, "tiled", tokens, train) for tokens in (1024, 4096))
    assert long < 5 * short, (short, long)


@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_a_map_in_memory_shows_up_in_this_measure(train):
    tiled, dense = (peak("mta-pre", impl, 2048, train) for impl in ("tiled", "reference"))
    assert dense > 4 * tiled, (dense, tiled)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_long_rows_of_selective_attention(train):
    """Few and narrow heads: beside them anything kept per block of queries would show."""
    short, long = (
        peak("selective", "tiled", tokens, train, heads=2, dim=32) for tokens in (8192, 32768)
    )
    assert long < 4.5 * short, (short, long)


@every
def test_what_is_kept_for_the_backward_grows_linearly(mechanism):
    def kept(tokens: int) -> int:
        sizes = []
        tensors = mechanism.draw(Shape(batch=1).long(tokens))
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        pack = torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        )
        with pack:
            mechanism.run(leaves, "tiled")
        return sum(sizes)

    one, two, three = (kept(tokens) for tokens in (128, 256, 384))
    assert three - two == two - one
