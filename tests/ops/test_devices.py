"""Away from a CPU nothing looks at values, and every constant is made on the inputs' device.

The meta device stands for all others: it holds no values and refuses to mix with the CPU.
"""

import contextlib

import pytest
import torch

from heedful.ops.common.tiles import Scope, Sight, segment_bounds
from heedful.ops.mta import tiled
from heedful.ops.mta.convolution import Parameters
from heedful.ops.selective import tiled as selective
from helpers.mechanisms import MECHANISMS, Shape

META = torch.device("meta")
Q = torch.zeros(1, 4, 130, 8, device=META)
CONV, MIX = torch.zeros(4, 3, 5, device=META), torch.zeros(1, 4, 4, device=META)
CAUSAL = Sight(None, False, True, None)


def test_no_look_for_the_identity():
    parameters = Parameters(CONV, None, MIX, None)
    assert tiled.identity_attention(Q, Q, Q, parameters, CAUSAL, 0.5) is None
    assert selective._nothing_selected(Q, Q, Q, Q[:, :1], Q[:, :1], 0.5) is None


def test_multi_token_attention_makes_its_constants_there():
    for window in (None, 70):
        for parameters in ((CONV, CONV, MIX, MIX), (None, None, None, None)):
            inputs = (Q, Q, Q, *parameters, *[None] * 6, False, True, window, 0.5, None, 0.0,
                      False, "composed", False)  # fmt: skip
            forward, backward = (x._init_fn for x in (tiled._tiled, tiled._tiled_backward))
            out = forward(*inputs)
            assert out.shape == Q.shape and out.device == META
            assert {x.device for x in backward(out, *inputs)} == {META}


def test_selective_attention_makes_its_constants_there():
    first = torch.zeros(1, 130, dtype=torch.bool, device=META)
    inputs = (Q, Q, Q, Q[:, :1], Q[:, :1], *[None] * 7, first, None, 1.0, 0.5, 3.0, 0.0, True)
    forward, backward = (x._init_fn for x in (selective._tiled, selective._tiled_backward))
    out, last, memory, pair = forward(*inputs)
    grads = backward(out, last, memory, pair, *inputs)
    assert {x.device for x in (out, last, memory, pair, *grads)} == {META}


def test_documents_and_mutual_tokens_are_not_looked_at():
    """Blocks take all columns that causal order and the window leave; the rest is masked."""
    numbers = torch.zeros(2, 130, dtype=torch.int64, device=META)
    scope = Scope(Sight(numbers, True, True, None, numbers), 130, 130, META, composed=True)
    assert scope.columns(range(0, 64)) == range(0, 130)
    assert scope.masked(range(0, 64), range(0, 130)).mask.device == META
    assert scope.row_documents(-2, 64).shape == (2, 66)
    assert {x.device for x in segment_bounds(numbers)} == {META}


def test_the_bounds_of_segments():
    """Of numbers that come in any order, padding in between."""
    segments = torch.tensor([[0, -1, 0, 7, 7, -1, 3], [5, 5, 5, 5, 2, 2, 5]])
    first, stop = segment_bounds(segments)
    assert first.tolist() == [[0, 1, 0, 3, 3, 1, 6], [0, 0, 0, 0, 4, 4, 0]]
    assert stop.tolist() == [[3, 6, 3, 5, 5, 6, 7], [7, 7, 7, 7, 6, 6, 7]]


FUSED = [m for m in MECHANISMS if str(m) in ("mta-pre-conv", "selective")]


@pytest.mark.parametrize("mechanism", FUSED, ids=str)
def test_gpu_kernels_are_launched_on_the_device_of_their_tensors(
    mechanism, interpreted, monkeypatch
):
    """Triton launches on the current device, which need not be that of the tensors."""
    from triton.runtime.interpreter import GridExecutor

    inside, launches = [], []

    @contextlib.contextmanager
    def device_of(x):
        inside.append(x)
        yield
        inside.pop()

    launch = GridExecutor.__call__
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda *a, **b: launches.append(len(inside)) or launch(*a, **b)
    )
    tensors = mechanism.draw(Shape(batch=1, heads=2, key_heads=2).long(5))
    leaves = {name: x.float().requires_grad_() for name, x in tensors.items()}
    sum(out.sum() for out in mechanism.run(leaves, "fused")).backward()
    assert launches and all(launches)
