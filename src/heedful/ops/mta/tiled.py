"""Multi-token attention in memory linear in T, in plain torch."""

from jaxtyping import Float
from torch import Tensor

from heedful.ops.mta.block_operator import Call, define, operands
from heedful.ops.mta.blocks import attend
from heedful.ops.mta.flash import flash_attention
from heedful.ops.mta.identity import identity_attention
from heedful.ops.mta.low_rank import low_rank
from heedful.ops.mta.tile import TorchSteps
from heedful.ops.products import widen


def _steps(call: Call) -> TorchSteps:
    return TorchSteps(call.field())


def _forward(call: Call) -> Float[Tensor, "B H Tq Dv"]:
    qkv = (widen(x) if call.wide else x for x in call[:3])
    out = identity_attention(*qkv, call.parameters, call.sight, call.scale)
    if out is not None:
        return out
    steps = _steps(call)
    x = operands(call, steps)
    conv, *rest = x.parameters
    wide = None if conv is None else low_rank(x.q, x.k, conv, call.sight, call.scale)
    if wide is not None and all(parameter is None for parameter in rest):
        out = flash_attention(wide, x.v, call.sight)
        if out is not None:
            return out
    return attend(*x, steps, call.scale, wide)


multi_token_attention_tiled = define("multi_token_attention_tiled", _forward, _steps)
