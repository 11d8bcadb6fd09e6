"""Multi-token attention of a few new queries, as in cached decoding: its definition, dense.

Nothing stands above the first of the queries: a caller that wants the newest row right hands over
the rows before it that the convolutions read, too.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common.few import few_outputs, few_scores, few_weights, masked_from
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import Masked, cap_
from heedful.ops.mta.convolution import Parameters, convolve, mix, reach_of

_WIDTHS = 64


def multi_token_attention_few(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    terms: Terms,
    *,
    two_sided: bool = False,
    new: int | None = None,
) -> Float[Tensor, "B H new Dv"]:
    """The operator of `multi_token_attention`, in fp32 at least.

    Outputs are those of the last `new` queries, of all by default; the others are read by the
    convolutions, and of no step more rows are computed than the next one reads.
    """
    visibility, scale, bias, softcap, sinks, _ = terms
    queries, keys = q.shape[2], k.shape[2]
    new = queries if new is None else new
    masked = masked_from(visibility, queries, keys, q.device)
    segments = None if visibility.documents is None else visibility.query_segments(queries)
    wide = torch.promote_types(q.dtype, torch.float32)
    conv, post_conv, pre_mix, post_mix = (None if x is None else x.to(wide) for x in parameters)
    # The scale in what is linear in the logits: they are passed over once less.
    if conv is not None:
        conv, scale = conv * scale, 1.0
    elif pre_mix is not None:
        pre_mix, scale = pre_mix * scale, 1.0
    above = 0 if post_conv is None else reach_of(post_conv, two_sided).before
    rows = min(queries, new + above)
    logits = few_scores(q, k, scale)
    if conv is not None:
        logits = _convolved(_blank(logits, masked), conv, segments, two_sided, rows)
    elif rows < queries:
        logits = logits[:, :, -rows:].contiguous()
    masked = None if masked is None else masked.last(rows)
    if pre_mix is not None:
        logits = mix(logits, pre_mix)
    logits = cap_(logits, softcap)
    if bias is not None:
        logits += bias[:, :, -rows:]
    weights = few_weights(logits, masked, sinks)
    if post_conv is not None:
        segments = None if segments is None else segments[:, -rows:]
        weights = _convolved(weights, post_conv, segments, two_sided, new)
        weights = _blank(weights, None if masked is None else masked.last(new))
    if post_mix is not None:
        weights = mix(weights, post_mix)
    return few_outputs(weights, v)


def _blank(x: Tensor, masked: Masked | None) -> Tensor:
    return x if masked is None else masked.fill(x, 0)


def _convolved(
    x: Tensor, kernel: Tensor, segments: Tensor | None, two_sided: bool, rows: int
) -> Tensor:
    """The last rows of the convolution, with zeros around what is there."""
    before, after = reach_of(kernel, two_sided)
    read = min(x.shape[2], rows + before)
    above = rows + before - read
    x, columns = x[:, :, -read:], x.shape[3]
    if segments is not None:
        segments = pad(segments[:, -read:], (above, after), value=-1)
    elif x.device.type == "cpu":
        x = _filled_up(x)
    y = convolve(x, kernel, above, after, segments, before)[..., :columns]
    return y.contiguous(memory_format=torch.contiguous_format)


def _filled_up(x: Float[Tensor, "B H R C"]) -> Float[Tensor, "B H R width"]:
    """With columns of zeros up to a multiple of `_WIDTHS`, and heads last.

    A step has one column more than the one before, and a CPU's convolution is compiled for each
    new width.
    """
    *lead, columns = x.shape
    width = -(-columns // _WIDTHS) * _WIDTHS
    filled = torch.empty((*lead, width), dtype=x.dtype, memory_format=torch.channels_last)
    filled[..., :columns] = x
    filled[..., columns:] = 0
    return filled
