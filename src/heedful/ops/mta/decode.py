"""Multi-token attention of a few new queries, as in cached decoding: its definition, dense.

Nothing stands above the first of the queries: a caller that wants the newest row right hands over
the rows before it that the convolutions read, too.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common.few import few_outputs, few_scores, few_weights, hidden_from
from heedful.ops.common.tiles import cap_
from heedful.ops.mta.convolution import Parameters, convolve, mix, reach_of
from heedful.ops.visibility import Visibility


def multi_token_attention_few(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    *,
    visibility: Visibility,
    scale: float,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    two_sided: bool = False,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `multi_token_attention`, in fp32 at least."""
    queries, keys = q.shape[2], k.shape[2]
    hidden = hidden_from(visibility, queries, keys, q.device)
    segments = None if visibility.documents is None else visibility.query_segments(queries)
    logits = few_scores(q, k, scale)
    conv, post_conv, pre_mix, post_mix = (
        None if x is None else x.to(logits.dtype) for x in parameters
    )
    if conv is not None:
        logits = _convolved(_blank(logits, hidden), conv, segments, two_sided)
    if pre_mix is not None:
        logits = mix(logits, pre_mix)
    logits = cap_(logits, softcap)
    if bias is not None:
        logits += bias
    weights = few_weights(logits, hidden, sinks)
    if post_conv is not None:
        weights = _blank(_convolved(weights, post_conv, segments, two_sided), hidden)
    if post_mix is not None:
        weights = mix(weights, post_mix)
    return few_outputs(weights, v)


def _blank(x: Tensor, hidden: Tensor | None) -> Tensor:
    return x if hidden is None else x.masked_fill(hidden, 0)


def _convolved(x: Tensor, kernel: Tensor, segments: Tensor | None, two_sided: bool) -> Tensor:
    """Over the rows that are there, and zeros around them."""
    reach = reach_of(kernel, two_sided)
    if segments is not None:
        segments = pad(segments, reach, value=-1)
    y = convolve(x, kernel, *reach, segments, reach.before)
    return y.contiguous(memory_format=torch.contiguous_format)
