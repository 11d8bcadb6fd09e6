"""The fused form of mixing and of what follows the softmax, under Triton's interpreter."""

import pytest
import torch
from mechanisms import MECHANISMS, Shape, ragged

from heedful.ops import Visibility
from heedful.ops.mta.fused import blocks
from heedful.ops.mta.reference import multi_token_attention_reference as reference
from heedful.testing import assert_causal, assert_matches_oracle

# The interpreter's time goes by operations, whatever their size: larger blocks than on a GPU.
LARGE = blocks.BlockLaunch(64, 128, 4, 64)
SHAPE = Shape(batch=2, heads=4, key_heads=2, dim=16)
POST = {"post_conv": (4, 3, 5)}
FULL = {"conv": (4, 3, 5), "post_conv": (4, 2, 3), "mix": (2, 2, 2), "post_mix": (1, 4, 4)}
TALKING = {"mix": (1, 4, 4), "post_mix": (2, 2, 2)}

pytestmark = pytest.mark.usefixtures("bfloat16")


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "block_launch", lambda: LARGE)


def draw(parameters: dict, queries: int, keys: int, dim: int = 16) -> dict:
    tokens = Shape(2, 4, 2, queries, keys, dim)
    tensors = MECHANISMS[0].draw(tokens)
    tensors.pop("conv")
    for name, size in parameters.items():
        tensors[name] = torch.randn(size, dtype=torch.float64) / size[-1] ** 0.5
    return tensors


def run(function, tensors: dict, visibility: Visibility) -> dict:
    """Output and gradients of a fixed functional of it."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    all_parameters = dict.fromkeys(("conv", "post_conv", "mix", "post_mix")) | leaves
    q, k, v = (all_parameters.pop(name) for name in ("q", "k", "v"))
    out = function(q, k, v, **all_parameters, visibility=visibility, scale=0.25)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * weight).sum(), list(leaves.values()))
    return {"output": out.detach()} | dict(zip(leaves, grads, strict=True))


def against_oracle(parameters, queries, keys, dtype, visibility, dim=16) -> None:
    tensors = {n: x.to(dtype) for n, x in draw(parameters, queries, keys, dim).items()}
    actual = run(blocks.multi_token_attention_blocks, tensors, visibility)
    plain = run(reference, tensors, visibility)
    exact = run(reference, {name: x.double() for name, x in tensors.items()}, visibility)
    for name, x in actual.items():
        assert_matches_oracle(name, x, plain[name], exact[name], keys)


@pytest.mark.parametrize("parameters", [POST, FULL, TALKING], ids=["post", "full", "talking"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_errs_at_most_twice_as_much_as_the_definition(parameters, dtype):
    against_oracle(parameters, 71, 71, dtype, Visibility())


@pytest.mark.parametrize(
    ("queries", "visible"),
    [
        (70, ragged(70)[0]),
        (40, ragged(70)[0]),
        (70, Visibility(window=9)),
        (41, Visibility(documents=ragged(70)[1][:1], window=20)),
        (1, Visibility()),
        (40, Visibility(causal=False)),
        (70, Visibility(padding=torch.zeros(2, 70, dtype=torch.bool))),
    ],
    ids=["ragged", "ragged, cross", "window", "documents in a window", "one", "both ways", "none"],
)
def test_visibilities_and_cross_lengths(queries, visible):
    against_oracle(FULL, queries, 70, torch.float32, visible)


@pytest.mark.parametrize(("tokens", "dim"), [(1, 16), (3, 5), (17, 96), (65, 16)])
def test_odd_sizes(tokens, dim):
    against_oracle(FULL, tokens, tokens, torch.float32, Visibility(), dim)


def test_published_kernel_size():
    full = FULL | {"conv": (4, 6, 11), "post_conv": (4, 6, 11)}
    against_oracle(full, 20, 20, torch.float32, Visibility())


def test_runs_repeat_bit_for_bit():
    tensors = {name: x.float() for name, x in draw(FULL, 20, 20).items()}
    once, again = (
        run(blocks.multi_token_attention_blocks, tensors, Visibility()) for _ in range(2)
    )
    assert all(torch.equal(x, again[name]) for name, x in once.items())


def test_no_token_changes_an_earlier_output_by_a_bit():
    tensors = {name: x.float() for name, x in draw(FULL, 9, 9).items()}
    v = tensors.pop("v")
    rest = {name: tensors.pop(name) for name in FULL}
    joined = torch.cat([tensors["q"], tensors["k"], v], dim=1).transpose(1, 2)

    def function(tokens):
        q, k, v = tokens.transpose(1, 2).split([4, 2, 2], dim=1)
        out = blocks.multi_token_attention_blocks(
            q, k, v, **rest, visibility=Visibility(), scale=0.25
        )
        return out.transpose(1, 2)

    assert_causal(function, joined, dim=1)


def test_registered_operators():
    tensors = {name: x.float().requires_grad_() for name, x in draw(FULL, 20, 20).items()}
    parameters = [tensors[name] for name in FULL]
    given = (None, None, False, True, None, 0.25, False)
    args = (*(tensors[name] for name in "qkv"), *parameters, *given)
    torch.library.opcheck(torch.ops.heedful.multi_token_attention_fused_blocks.default, args)
