"""Away from a CPU nothing looks at values, and every constant is made on the inputs' device.

The meta device stands for all others: it holds no values and refuses to mix with the CPU.
"""

import torch

from heedful.ops.common.tiles import Sight
from heedful.ops.mta import tiled, wide
from heedful.ops.mta.convolution import Parameters
from heedful.ops.selective import tiled as selective

META = torch.device("meta")
Q = torch.zeros(1, 4, 130, 8, device=META)
CONV, MIX = torch.zeros(4, 3, 5, device=META), torch.zeros(1, 4, 4, device=META)
CAUSAL = Sight(None, False, True, None)


def test_no_look_for_the_identity_or_a_rank():
    parameters = Parameters(CONV, None, MIX, None)
    assert wide.identity_attention(Q, Q, Q, parameters, CAUSAL, 0.5) is None
    assert wide.low_rank(Q, Q, CONV, CAUSAL, 0.5) is None
    assert selective._nothing_selected(Q, Q, Q, Q[:, :1], Q[:, :1], 0.5) is None


def test_multi_token_attention_makes_its_constants_there():
    for window in (None, 70):
        for parameters in ((CONV, CONV, MIX, MIX), (None, None, None, None)):
            inputs = (Q, Q, Q, *parameters, None, None, False, True, window, 0.5, False)
            forward, backward = (x._init_fn for x in (tiled._tiled, tiled._tiled_backward))
            out = forward(*inputs)
            assert out.shape == Q.shape and out.device == META
            assert {x.device for x in backward(out, *inputs)} == {META}


def test_selective_attention_makes_its_constants_there():
    first = torch.zeros(1, 130, dtype=torch.bool, device=META)
    inputs = (Q, Q, Q, Q[:, :1], Q[:, :1], None, None, None, first, None, 1.0, 0.5)
    forward, backward = (x._init_fn for x in (selective._tiled, selective._tiled_backward))
    out, last, memory, pair = forward(*inputs)
    assert {x.device for x in (out, last, memory, pair)} == {META}
    grads = backward(out, last, memory, pair, *inputs)
    assert {x.device for x in grads} == {META}
