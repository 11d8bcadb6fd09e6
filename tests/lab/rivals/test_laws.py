"""The laws of the baselines' layers: identity, order, derivatives, precision, maps, memory."""

import pytest
import torch
from torch import Tensor

from heedful.nn import HeadShape, LayerInputs, Standard
from heedful.ops import Visibility
from heedful.testing import assert_causal, assert_matches_oracle, peak_memory_mib
from heedful_lab.rivals.dex import Dex
from heedful_lab.rivals.differential_v2 import DifferentialV2
from heedful_lab.rivals.exclusive import Exclusive
from heedful_lab.rivals.parallax import Parallax
from heedful_lab.rivals.retention import RetentionGate
from heedful_lab.rivals.simplicial import Simplicial
from helpers.families import stir
from helpers.layers import SHAPE, qkvx, stirred
from helpers.oracle import EXACT, draw

LAYERS = {
    "simplicial": Simplicial(5, 3, every=1),
    "retention-gate": RetentionGate(),
    "self-pruned": RetentionGate(window=3),
    "simplicial wider": Simplicial(6, 20, every=1),
    "differential-v2": DifferentialV2(),
    "exclusive": Exclusive(),
    "parallax": Parallax(),
    "dex": Dex(),
}
IDENTITIES = ("parallax", "dex", "retention-gate", "self-pruned")
every = pytest.mark.parametrize("name", LAYERS)


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_new_layer_is_standard_attention(name):
    q, k, v, x = qkvx(70)
    out = LAYERS[name].build(SHAPE).double()(q, k, v, inputs=LayerInputs(input=x)).output
    torch.testing.assert_close(out, Standard().build(SHAPE)(q, k, v).output, **EXACT)


@every
def test_every_parameter_learns(name):
    layer, (q, k, v, x) = stirred(LAYERS[name]), qkvx(9)
    q, k, v = (y.requires_grad_() for y in (q, k, v))
    out = layer(q, k, v, inputs=LayerInputs(input=x))
    # Gates without a window are in no output: what learns them reads the state.
    gates = out.state.square().sum() if name == "retention-gate" else 0
    (out.output.square().sum() + gates).backward()
    for parameter, p in [("q", q), ("k", k), ("v", v), *layer.named_parameters()]:
        assert p.grad is not None and bool((p.grad != 0).any()), parameter


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_later_token_changes_a_bit(name, dtype):
    layer = stirred(LAYERS[name]).float()

    def attend(tokens: Tensor) -> Tensor:
        q, k, v, x = tokens.split([24, 12, 12, 20], dim=2)
        q, k, v = (y.unflatten(2, (-1, 6)).transpose(1, 2) for y in (q, k, v))
        return layer(q, k, v, inputs=LayerInputs(input=x)).output.transpose(1, 2).flatten(2)

    q, k, v, x = qkvx(70, batch=1)
    parts = [y.transpose(1, 2).flatten(2) for y in (q, k, v)]
    assert_causal(attend, torch.cat([*parts, x], dim=2).to(dtype), dim=1)


SMOOTH = [Parallax(), Dex((1,)), DifferentialV2(), RetentionGate(window=2)]
SMOOTH += [Simplicial(*x, every=1) for x in ((2, 2), (3, 1), (1, 3))]


@pytest.mark.parametrize("config", SMOOTH, ids=str)
def test_gradients_by_finite_differences(config):
    """Of the last three of four tokens."""
    layer = config.build(HeadShape(heads=2, key_heads=1, dim=2, hidden=3, layer=0)).double()
    sizes = ((2, 3, 2), (1, 4, 2), (1, 4, 2), (4, 3))
    q, k, v, x = (draw(1, *size).requires_grad_() for size in sizes)

    def attend(*tensors: Tensor) -> Tensor:
        *heads, x = tensors[:4]
        names = [name for name, _ in layer.named_parameters()]
        own = dict(zip(names, tensors[4:], strict=True))
        options = {"inputs": LayerInputs(input=x)}
        return torch.func.functional_call(layer, own, tuple(heads), options).output

    parameters = [draw(*p.shape).requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(attend, (q, k, v, x, *parameters))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_beside_fp32_parameters(name, dtype):
    layer = LAYERS[name].build(SHAPE)
    stir(layer, 0.3)
    q, k, v, x = (y.to(dtype) for y in qkvx(40))
    actual = layer(q, k, v, inputs=LayerInputs(input=x)).output
    assert actual.dtype == dtype
    exact = LayerInputs(input=x.double())
    oracle = layer.double()(q.double(), k.double(), v.double(), inputs=exact).output
    assert_matches_oracle(name, actual, oracle.to(dtype), oracle, terms=40)


@every
def test_maps_are_what_multiplies_the_values(name):
    layer, (q, k, v, x) = stirred(LAYERS[name]), qkvx(9)
    options = {"visibility": Visibility(window=5), "inputs": LayerInputs(input=x)}
    if name.startswith("simplicial"):  # whose second values act behind the map: all one
        layer.second_value.forward = lambda x: x.new_ones(*x.shape[:2], 12)
    out = layer(q, k, v, **options).output
    wide = v.repeat_interleave(2, dim=1)
    actual = layer.maps(q, k, **options).weights @ wide
    if name == "exclusive":  # whose projection acts behind the map
        along = (actual * wide).sum(-1, keepdim=True) / wide.square().sum(-1, keepdim=True)
        actual = actual - along * wide
    if name == "dex":  # whose matrix does too
        actual = actual - layer.factor * (actual @ layer.matrix)
    torch.testing.assert_close(actual, out, **EXACT)


PROGRAM = """
import torch
from heedful.nn import HeadShape, LayerInputs
{imports}
torch.set_num_threads(1)
module = {config}.build(HeadShape(4, 2, 16, 64, 0))
q, k, v = (torch.randn(1, heads, {tokens}, 16, requires_grad=True) for heads in (4, 2, 2))
x = torch.randn(1, {tokens}, 64)
def run():
    module(q, k, v, inputs=LayerInputs(input=x)).output.sum().backward()
"""


def peak(config, tokens: int) -> float:
    kind = type(config)
    imports = f"from {kind.__module__} import {kind.__name__}"
    return peak_memory_mib(PROGRAM.format(imports=imports, config=config, tokens=tokens))


@pytest.mark.slow
def test_maps_of_parallax_are_not_in_memory():
    """One of four heads has 64 MiB at 2,048 tokens, and there would be half a dozen."""
    assert peak(Parallax(), 2048) < 120


@pytest.mark.slow
def test_memory_of_simplicial_attention_grows_linearly():
    short, long = (peak(Simplicial(64, 8, every=1), tokens) for tokens in (1024, 4096))
    assert long < 5 * short and long < 60, "a map of 4,096 tokens and four heads has 256 MiB"


@pytest.mark.slow
def test_no_bias_of_all_rows_is_in_memory():
    """The difference, since the first call of the operator below imports a compiler."""
    short, long = (peak(RetentionGate(window=64), tokens) for tokens in (1024, 4096))
    assert long - short < 40, "the gates' bias of 4,096 tokens has 64 MiB, a map of a head too"
