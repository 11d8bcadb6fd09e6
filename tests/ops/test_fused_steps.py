"""Multi-token attention with its convolution and softmax in Triton, under its interpreter."""

import functools

import pytest
import torch
from torch import Tensor

from heedful.ops import Visibility
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import Scope, Sight
from heedful.ops.mta.api import unfused
from heedful.ops.mta.convolution import Parameters, TileSteps
from heedful.ops.mta.fused.steps import FusedSteps
from heedful.ops.mta.reference import multi_token_attention_reference as reference
from heedful.ops.mta.tiled import multi_token_attention_tiled
from heedful.testing import assert_causal, assert_matches_oracle
from helpers.crosses import exhausting
from helpers.mechanisms import MECHANISMS, TWO_SIDED, VISIBILITIES, Shape, ragged, run_by
from helpers.oracle import against_oracle, with_grads

NONE, PRE, POST = {}, {"conv": (4, 3, 5)}, {"post_conv": (4, 3, 5)}
FULL = {"conv": (4, 3, 5), "post_conv": (4, 2, 3), "mix": (2, 2, 2), "post_mix": (1, 4, 4)}
TALKING = {"mix": (1, 4, 4), "post_mix": (2, 2, 2)}

# Small blocks, so that a sequence has several.
pytestmark = [pytest.mark.usefixtures("bfloat16", "small_blocks"), pytest.mark.device]

by_kernel = functools.partial(multi_token_attention_tiled, impl="fused")


def draw(parameters: dict, queries: int, keys: int, dim: int = 16, batch: int = 2) -> dict:
    tokens = Shape(batch, 4, 2, queries, keys, dim)
    tensors = MECHANISMS[0].draw(tokens)
    tensors.pop("conv")
    for name, size in parameters.items():
        tensors[name] = torch.randn(size, dtype=torch.float64) / size[-1] ** 0.5
    return tensors


def run(function, tensors: dict, visibility: Visibility) -> Tensor:
    parameters = dict(tensors)
    q, k, v = (parameters.pop(name) for name in ("q", "k", "v"))
    return function(q, k, v, Parameters(**parameters), Terms(visibility, 0.25))


def fused(visibility: Visibility):
    return lambda x: run(by_kernel, x, visibility)


def hold(parameters, queries, keys, dtype, visibility, dim=16, batch=1) -> None:
    """Law 2 for one case."""
    tensors = draw(parameters, queries, keys, dim, batch)
    against_oracle(fused(visibility), lambda x: run(reference, x, visibility), tensors, dtype)


slow = pytest.mark.slow


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "parameters",
    [PRE, POST, TALKING, exhausting(NONE), pytest.param(FULL, marks=slow)],
    ids=["pre", "post", "talking", "none", "full"],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(x, marks=slow) for x in (torch.float16, torch.bfloat16))],
    ids=str,
)
def test_it_errs_at_most_twice_as_much_as_the_definition(parameters, dtype):
    hold(parameters, 41, 41, dtype, Visibility())


VISIBLE = {
    "ragged": lambda: ragged(70)[0],
    "window": lambda: Visibility(window=9),
    "documents in a window": lambda: Visibility(documents=ragged(70)[1][:1], window=20),
    "causal": Visibility,
    "both ways": lambda: Visibility(causal=False),
    "window both ways": lambda: Visibility(causal=False, window=9),
    "mutual": lambda: VISIBILITIES["mutual"](70),
    "none": lambda: Visibility(padding=torch.zeros(2, 70, dtype=torch.bool)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("queries", "visible"),
    [
        pytest.param(70, "ragged", marks=slow),
        pytest.param(40, "ragged", marks=slow),
        pytest.param(70, "window", marks=slow),
        (41, "documents in a window"),
        exhausting(1, "causal"),
        pytest.param(40, "both ways", marks=slow),
        pytest.param(70, "window both ways", marks=slow),
        (20, "mutual"),
        exhausting(70, "none"),
    ],
)
def test_visibilities_and_cross_lengths(queries, visible):
    visibility = VISIBLE[visible]()  # made here, on the device of the test
    parts = (visibility.documents, visibility.padding, visibility.mutual)
    batch = max((len(x) for x in parts if x is not None), default=1)
    hold(FULL, queries, 70, torch.float32, visibility, batch=batch)


@pytest.mark.parametrize(
    ("tokens", "dim"), [(1, 16), exhausting(3, 5), (17, 96), pytest.param(65, 16, marks=slow)]
)
def test_odd_sizes(tokens, dim):
    hold(FULL, tokens, tokens, torch.float32, Visibility(), dim)


def test_tokens_with_positions_have_no_segments():
    """As evicted keys and packed documents have them; there is nothing to convolve then."""
    documents = torch.arange(40)[None] // 20
    positions = torch.arange(40)[None] * 2
    hold(TALKING, 40, 40, torch.float32, Visibility(documents=documents, positions=positions))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mechanism", [*TWO_SIDED[:2], exhausting(TWO_SIDED[2])], ids=str)
def test_kernels_that_look_to_both_sides(mechanism, interpreted):
    functions = (run_by(mechanism, impl) for impl in ("fused", "reference"))
    against_oracle(*functions, mechanism.draw(Shape(dim=16).long(40)), torch.float32)


@pytest.mark.parametrize("kernel", [(1, 1), (8, 15)], ids=str)
def test_the_smallest_and_the_largest_kernel(kernel):
    hold({"conv": (4, *kernel)}, 20, 20, torch.float32, Visibility())


@pytest.mark.slow
def test_published_kernel_size():
    full = FULL | {"conv": (4, 6, 11), "post_conv": (4, 6, 11)}
    hold(full, 20, 20, torch.float32, Visibility())


def test_no_token_changes_an_earlier_output_by_a_bit():
    tensors = {name: x.float() for name, x in draw(FULL, 9, 9, batch=1).items()}
    v = tensors.pop("v")
    rest = {name: tensors.pop(name) for name in FULL}
    joined = torch.cat([tensors["q"], tensors["k"], v], dim=1).transpose(1, 2)

    def function(tokens):
        q, k, v = tokens.transpose(1, 2).split([4, 2, 2], dim=1)
        out = by_kernel(q, k, v, Parameters(**rest), Terms(Visibility(), 0.25))
        return out.transpose(1, 2)

    assert_causal(function, joined, dim=1)


def test_padding_gives_zero_and_no_gradient():
    padding = ragged(40)[2]
    tensors = {name: x.half() for name, x in draw(PRE, 40, 40).items()}
    actual = with_grads(fused(Visibility(padding=padding)), tensors)
    for name in ("output", "grad q", "grad k", "grad v"):
        assert bool((actual[name].transpose(1, 2)[~padding] == 0).all()), name


def test_the_message_names_the_limit():
    def limit(*kernels, dtype=torch.float16, batch=1):
        q = torch.empty(batch, 2, 1, 64, dtype=dtype, device="meta")
        return unfused(q, *(torch.empty(2, *size) for size in kernels))

    assert limit((8, 15), (6, 11)) is None
    assert limit(dtype=torch.float64) == "torch.float64 is not float32, float16 or bfloat16"
    assert limit((9, 5)) == "c_q 9 is above 8"
    assert limit((2, 3), (2, 17)) == "c_k 17 is above 15"
    assert limit(batch=40_000) == "batch times heads is 80000, above 65535; split the batch"


@pytest.mark.slow
def test_registered_operators():
    tensors = {name: x.float().requires_grad_() for name, x in draw(FULL, 20, 20).items()}
    parameters = [tensors[name] for name in FULL]
    inputs = (*[None] * 6, False, True, None, 0.25, None, 0.0, False, "fused", False)
    args = (*(tensors[name] for name in "qkv"), *parameters, *inputs)
    torch.library.opcheck(torch.ops.heedful.multi_token_attention_tiled.default, args)


# Rows above the tile and below it, its own, columns, and whether its kernel looks both ways.
TILES = [(0, 0, 70, 16, False), (5, 0, 9, 130, False), (2, 3, 64, 33, True)]


def tile_steps(kind: type[TileSteps], two_sided: bool = False, documents=None) -> TileSteps:
    """Those of 400 tokens."""
    sight = Sight(documents, documents is not None, not two_sided, None)
    return kind(Scope(sight, 400, 400, torch.ones(()).device, composed=True), two_sided)


@pytest.mark.sampled(2)
@pytest.mark.crossed
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("ragged_documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
def test_the_convolution_of_a_tile_and_its_gradient(tile, ragged_documents, narrow):
    """Beside torch's in fp64: as exact as fp32, or where an fp32 tile is split, to 16 bits."""
    above, below, rows, columns, two_sided = tile
    documents = torch.arange(400)[None].repeat(2, 1) // 7 if ragged_documents else None
    x = torch.randn(2, 2, rows, columns, dtype=torch.float64)
    kernel = torch.randn(2, 5 if two_sided else 6, 11, dtype=torch.float64)
    outputs = above + rows + below - kernel.shape[1] + 1
    grad, place = torch.randn(2, 2, outputs, columns, dtype=torch.float64), (above, below)
    tokens = range(100, 100 + outputs)
    plain, fused_steps = (
        tile_steps(kind, two_sided, documents) for kind in (TileSteps, FusedSteps)
    )
    fused_steps._narrow = narrow
    expected = (
        plain.convolve(x, kernel, *place, tokens),
        plain.input_gradient(grad, rows, kernel, *place, tokens),
    )
    x, grad, kernel = x.float(), grad.float(), kernel.float()
    actual = (
        fused_steps.convolve(x, kernel, *place, tokens),
        fused_steps.input_gradient(grad, rows, kernel, *place, tokens),
    )
    # The interpreter cuts numbers off where a GPU rounds them.
    limit = 2.0**-14 if narrow == torch.bfloat16 else 2.0**-22
    for y, exact in zip(actual, expected, strict=True):
        assert y.dtype == torch.float32 and y.shape == exact.shape
        assert (y - exact).norm() <= limit * exact.norm()


def test_a_tile_in_half_precision_keeps_it():
    steps = tile_steps(FusedSteps)
    steps._narrow = torch.bfloat16
    x, kernel = torch.randn(2, 4, 20, 40).bfloat16(), torch.randn(4, 3, 5)
    y = steps.convolve(x, kernel, 0, 0, range(2, 20))
    exact = TileSteps.convolve(steps, x.double(), kernel.double(), 0, 0, range(2, 20))
    assert y.dtype == torch.bfloat16
    assert (y - exact).norm() <= 2.0**-7 * exact.norm()


# Columns and, of these, the last that have a mask; how many masks. The third row sees nothing where
# all columns have one; 1,024 columns are read at a time.
SOFTMAXES = [(40, 15, 1), (33, 33, 2), (1100, 1100, 2), (2100, 60, 1)]


@pytest.mark.parametrize("case", SOFTMAXES, ids=str)
@pytest.mark.parametrize("sunk", [False, True], ids=["plain", "sinks"])
def test_the_softmax_of_a_tile_and_its_gradient(case, sunk):
    """Beside the written one in fp64."""
    columns, masked, masks = case
    logits, grad = 4 * torch.randn(2, 2, 3, 3, columns, dtype=torch.float64)
    sinks = torch.randn(3, 1, 1, dtype=torch.float64) if sunk else None
    mask = torch.rand(masks, 1, 3, masked) < 0.5
    mask[:, :, 2] = True
    plain, steps = (tile_steps(kind) for kind in (TileSteps, FusedSteps))
    p, log_sum = plain._map(logits, mask, sinks, torch.float64)
    d, total = plain._map_backward(grad, logits, log_sum, mask, torch.float64)
    narrow = [None if x is None else x.float() for x in (logits, sinks, grad)]
    actual_p, actual_sum = steps._map(narrow[0], mask, narrow[1], torch.float32)
    actual_d, actual_total = steps._map_backward(
        narrow[2], narrow[0], actual_sum, mask, torch.float32
    )
    written = plain._map(narrow[0], mask, narrow[1], torch.float32)
    written += plain._map_backward(narrow[2], narrow[0], written[1], mask, torch.float32)
    actual = (actual_p, actual_sum, actual_d, actual_total)
    for name, y, x, exact in zip(
        ("p", "log sum", "gradient", "total"), actual, written, (p, log_sum, d, total), strict=True
    ):
        assert y.dtype == torch.float32
        some = exact.abs() < 1e30  # of a row that sees nothing the sum is far below all logits
        assert_matches_oracle(name, y[some], x[some], exact[some], terms=columns)
    if masked == columns:
        assert not actual_p[:, :, 2].any() and not actual_d[:, :, 2].any()


def test_the_softmax_of_a_tile_is_rounded_once():
    steps = tile_steps(FusedSteps)
    logits, mask = torch.randn(1, 2, 3, 40), torch.zeros(1, 1, 3, 1, dtype=torch.bool)
    p, _ = steps._map(logits, mask, None, torch.bfloat16)
    assert p.dtype == torch.bfloat16
    exact = logits.double().softmax(-1)
    assert ((p - exact).abs() <= 2.0**-7 * exact).all()  # the interpreter cuts numbers off
