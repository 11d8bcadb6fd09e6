"""Multi-token attention with head mixing, or with a convolution after the softmax, on a GPU.

Mixing joins all heads of a group and what follows the softmax joins rows, so no tile stands for
itself as in flash attention. Instead the blocks of `blocks.py` pass from one kernel to the next, by
way of a GPU's second-level cache where they fit: library matrix products, with Triton between.
"""

from jaxtyping import Float
from torch import Tensor

from heedful.ops.mta.block_operator import Call, define, operands
from heedful.ops.mta.blocks import attend
from heedful.ops.mta.fused_steps import TritonSteps


def _steps(call: Call) -> TritonSteps:
    return TritonSteps(call.field())


def _forward(call: Call) -> Float[Tensor, "B H Tq Dv"]:
    steps = _steps(call)
    return attend(*operands(call, steps), steps, call.scale)


multi_token_attention_blocks = define("multi_token_attention_fused_blocks", _forward, _steps)
