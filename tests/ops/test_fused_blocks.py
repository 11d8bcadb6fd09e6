"""The fused form of multi-token attention, under Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from heedful.ops import Visibility
from heedful.ops.common.tiles import Scope, Sight
from heedful.ops.mta import tiled
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.fused import blocks
from heedful.ops.mta.fused.plan import multi_token_attention_limit
from heedful.ops.mta.reference import multi_token_attention_map
from heedful.ops.mta.reference import multi_token_attention_reference as reference
from heedful.testing import assert_causal
from helpers.crosses import exhausting
from helpers.mechanisms import MECHANISMS, Shape, ragged
from helpers.oracle import against_oracle, with_grads

# The interpreter's time goes by operations, whatever their size: larger blocks than on a GPU.
LARGE = blocks.BlockLaunch(64, 128, 4, 64)
NONE, PRE, POST = {}, {"conv": (4, 3, 5)}, {"post_conv": (4, 3, 5)}
FULL = {"conv": (4, 3, 5), "post_conv": (4, 2, 3), "mix": (2, 2, 2), "post_mix": (1, 4, 4)}
TALKING = {"mix": (1, 4, 4), "post_mix": (2, 2, 2)}

pytestmark = [pytest.mark.usefixtures("bfloat16"), pytest.mark.device]


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "block_launch", lambda: LARGE)


def draw(parameters: dict, queries: int, keys: int, dim: int = 16, batch: int = 2) -> dict:
    tokens = Shape(batch, 4, 2, queries, keys, dim)
    tensors = MECHANISMS[0].draw(tokens)
    tensors.pop("conv")
    for name, size in parameters.items():
        tensors[name] = torch.randn(size, dtype=torch.float64) / size[-1] ** 0.5
    return tensors


def run(function, tensors: dict, visibility: Visibility) -> Tensor:
    all_parameters = dict.fromkeys(("conv", "post_conv", "mix", "post_mix")) | tensors
    q, k, v = (all_parameters.pop(name) for name in ("q", "k", "v"))
    return function(q, k, v, **all_parameters, visibility=visibility, scale=0.25)


def fused(visibility: Visibility):
    return lambda x: run(blocks.multi_token_attention_fused, x, visibility)


def hold(parameters, queries, keys, dtype, visibility, dim=16, batch=1) -> None:
    """Law 2 for one case."""
    tensors = draw(parameters, queries, keys, dim, batch)
    against_oracle(fused(visibility), lambda x: run(reference, x, visibility), tensors, dtype)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "parameters",
    [NONE, PRE, POST, pytest.param(FULL, marks=slow), TALKING],
    ids=["none", "pre", "post", "full", "talking"],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(x, marks=slow) for x in (torch.float16, torch.bfloat16))],
    ids=str,
)
def test_it_errs_at_most_twice_as_much_as_the_definition(parameters, dtype):
    hold(parameters, 71, 71, dtype, Visibility())


@pytest.mark.parametrize(
    ("queries", "visible"),
    [
        pytest.param(70, ragged(70)[0], marks=slow),
        pytest.param(40, ragged(70)[0], marks=slow),
        pytest.param(70, Visibility(window=9), marks=slow),
        (41, Visibility(documents=ragged(70)[1][:1], window=20)),
        exhausting(1, Visibility()),
        pytest.param(40, Visibility(causal=False), marks=slow),
        exhausting(70, Visibility(padding=torch.zeros(2, 70, dtype=torch.bool))),
    ],
    ids=["ragged", "ragged, cross", "window", "documents in a window", "one", "both ways", "none"],
)
def test_visibilities_and_cross_lengths(queries, visible):
    rows = [x for x in (visible.documents, visible.padding) if x is not None]
    hold(FULL, queries, 70, torch.float32, visible, batch=max(map(len, rows), default=1))


@pytest.mark.parametrize(
    ("tokens", "dim"), [(1, 16), exhausting(3, 5), (17, 96), pytest.param(65, 16, marks=slow)]
)
def test_odd_sizes(tokens, dim):
    hold(FULL, tokens, tokens, torch.float32, Visibility(), dim)


@pytest.mark.parametrize("kernel", [(1, 1), (8, 15)], ids=str)
def test_the_smallest_and_the_largest_kernel(kernel):
    hold({"conv": (4, *kernel)}, 20, 20, torch.float32, Visibility())


def test_the_widest_heads():
    hold(PRE, 20, 20, torch.float16, Visibility(), 256)


@pytest.mark.slow
def test_published_kernel_size():
    full = FULL | {"conv": (4, 6, 11), "post_conv": (4, 6, 11)}
    hold(full, 20, 20, torch.float32, Visibility())


def test_no_token_changes_an_earlier_output_by_a_bit():
    tensors = {name: x.float() for name, x in draw(FULL, 9, 9).items()}
    v = tensors.pop("v")
    rest = {name: tensors.pop(name) for name in FULL}
    joined = torch.cat([tensors["q"], tensors["k"], v], dim=1).transpose(1, 2)

    def function(tokens):
        q, k, v = tokens.transpose(1, 2).split([4, 2, 2], dim=1)
        out = blocks.multi_token_attention_fused(
            q, k, v, **rest, visibility=Visibility(), scale=0.25
        )
        return out.transpose(1, 2)

    assert_causal(function, joined, dim=1)


def test_padding_gives_zero_and_no_gradient():
    padding = ragged(40)[2]
    tensors = {name: x.half() for name, x in draw(PRE, 40, 40).items()}
    actual = with_grads(fused(Visibility(padding=padding)), tensors)
    for name in ("output", "grad q", "grad k", "grad v"):
        assert bool((actual[name].transpose(1, 2)[~padding] == 0).all()), name


def test_the_message_names_the_limit():
    def limit(*kernels, dtype=torch.float16, dims=(64, 64), batch=1):
        q, v = (torch.empty(batch, 2, 1, dim, dtype=dtype, device="meta") for dim in dims)
        return multi_token_attention_limit(q, v, *(torch.empty(2, *size) for size in kernels))

    assert limit((8, 15), (6, 11)) is None
    assert limit(dtype=torch.float64) == "torch.float64 is not float32, float16 or bfloat16"
    assert limit(dims=(300, 64)) == "q has head dim 300, above 256"
    assert limit(dims=(64, 300)) == "v has head dim 300, above 256"
    assert limit((9, 5)) == "c_q 9 is above 8"
    assert limit((2, 3), (2, 17)) == "c_k 17 is above 15"
    assert limit(batch=40_000) == "batch times heads is 80000, above 65535; split the batch"


@pytest.mark.slow
def test_registered_operators():
    tensors = {name: x.float().requires_grad_() for name, x in draw(FULL, 20, 20).items()}
    parameters = [tensors[name] for name in FULL]
    inputs = (None, None, False, True, None, 0.25, False)
    args = (*(tensors[name] for name in "qkv"), *parameters, *inputs)
    torch.library.opcheck(torch.ops.heedful.multi_token_attention_fused.default, args)


def steps_of(queries: int, dtype: torch.dtype) -> blocks.TritonSteps:
    sight, device = Sight(None, False, True, None), torch.ones(()).device
    scope = Scope(sight, queries, queries, device, composed=True)
    return blocks.TritonSteps(scope, dtype)


def test_logits_are_not_rounded_before_the_softmax():
    """With large logits a rounding to bf16 would move the probabilities far more than their own."""
    tensors = {n: x.bfloat16() for n, x in draw(POST, 40, 40).items()}
    q, k, v = 20 * tensors["q"], tensors["k"], tensors["v"]
    steps = steps_of(40, torch.bfloat16)
    x = tiled.operands(q, k, v, Parameters(None, None, None, None), 0.25, steps)
    (block,) = tiled._row_blocks(x, steps)
    exact = multi_token_attention_map(q.double(), k.double(), scale=0.25)
    actual = tiled._probabilities(x, steps, block).soft.p
    assert actual.dtype == torch.bfloat16
    assert (actual - exact).abs().max() <= 2.0**-8  # the interpreter cuts off, a GPU rounds

    x = torch.randn(2, 4, 10, 40).bfloat16()
    kernel, weights = torch.randn(4, 3, 5), torch.randn(1, 4, 4)
    assert steps.convolve(x, kernel, 0, 0, range(2, 10), last=True).dtype == torch.float32
    assert steps.mix(x, weights, last=True).dtype == torch.float32


def test_gradients_of_mixing_are_not_rounded_block_by_block():
    steps = steps_of(16, torch.bfloat16)
    x, grad = (torch.randn(2, 4, 8, 16).bfloat16() for _ in range(2))
    exact = torch.einsum("boqk,biqk->oi", grad.double(), x.double())[None]
    actual = steps.mix_backward(grad, x, torch.randn(1, 4, 4))[1]
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
