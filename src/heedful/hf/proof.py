"""The proof that a conversion changes nothing but the attention itself, by a few forward passes.

The model runs a few tokens as it is and converted to `standard`, both times with one and the same
attention in place of the family's kernels and of ours: a softmax over the keys that a query sees,
one query after the other. So what reaches attention (queries, keys, values, mask, scale, bias, cap,
sinks, cache) and what becomes of its output must agree to the last bit, and does not have to agree
where two kernels round otherwise. A third run, with the family's own attention, shows that the
family adds nothing to a softmax of its own; it may differ by rounding.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sdpa_mask

from heedful.compatibility import TESTED
from heedful.hf.intercept import LayerCall, intercept
from heedful.hf.versions import attention_replaced
from heedful.nn import Layer, LayerInputs, LayerOutput, Standard
from heedful.ops import Visibility

_TOKENS = 6
_PADDING = 2  # tokens on the left of the second row, where there is a mask
_NEW = 2  # tokens that are generated, the second from the cache

Ways = dict[str, Tensor | ValueError]


def prove(model: PreTrainedModel, convert: Callable) -> None:
    """Raise unless a model converted to `standard` computes what it computes unconverted.

    Arguments:
        model: not converted; comes out as it went in.
        convert: `heedful.convert`.

    Raises:
        ValueError: it does not, or it cannot be run on token ids alone, or has no weights yet.
    """
    if any(p.device.type == "meta" for p in model.parameters()):
        raise _unproven(model, "its weights are on meta, and nothing can be computed")
    with evaluated(model), torch.no_grad():
        own = _ways(model, only="no mask")["no mask"]
        if isinstance(own, Exception):
            raise _unproven(model, f"it cannot be run on token ids alone ({own})")
        with attention_replaced(model, _stock, _dense_mask):
            before = _ways(model)
        conversion = convert(model, Standard(), verify=False)
        try:
            with intercept(model, _converted):
                after = _ways(model)
        finally:
            conversion.revert()
    _compare(model, before, after)
    error = (own - before["no mask"]).abs().max().item()
    if not error <= rounding(own) * own.abs().max().item():
        raise _unproven(
            model,
            f"its own attention is more than a softmax over what it tells its attention function "
            f"(its outputs differ by {error:.2g})",
        )


def _compare(model: PreTrainedModel, before: Ways, after: Ways) -> None:
    refusals = []
    for way, expected in before.items():
        if isinstance(expected, Exception):
            continue  # what the model itself cannot do is not compared
        result = after[way]
        if isinstance(result, ValueError):
            refusals.append(result)  # at the call, by name
        elif isinstance(result, Exception):
            raise _unproven(model, f"{way}: {type(result).__name__}: {result}") from result
        elif not torch.equal(result, expected):
            same = result.shape == expected.shape
            error = (result - expected).abs().max().item() if same else math.nan
            raise _unproven(model, f"{way}: the outputs differ by {error:.2g}")
    if len(refusals) == sum(not isinstance(x, Exception) for x in before.values()):
        raise _unproven(model, str(refusals[0])) from refusals[0]


def _unproven(model: PreTrainedModel, reason: str) -> ValueError:
    oldest, *_, newest = TESTED["transformers"]
    return ValueError(
        f"model: {type(model).__name__} is not proven to compute the same when converted, with "
        f"transformers {transformers.__version__} (heedful is tested with {oldest} to "
        f"{newest}): {reason}. The model is left as it was; take a tested version, or "
        "verify=False to go on without the proof"
    )


def rounding(x: Tensor) -> float:
    """Tolerance of outputs, relative to the largest, where kernels round otherwise."""
    # Half of the digits: layers add up, and some families compute in fp32 whatever their weights.
    return max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5


def _ways(model: PreTrainedModel, only: str | None = None) -> Ways:
    """The model's logits of the same tokens in each way of calling it, or why it cannot."""
    ids, pair = ordinary_tokens(model, _TOKENS), model.config.is_encoder_decoder
    mask = torch.ones_like(ids)
    mask[1, :_PADDING] = 0
    target = "decoder_input_ids" if pair else "input_ids"
    source = {"input_ids": ids} if pair else {}

    def once(mask: Tensor | None) -> Tensor:
        options = {} if mask is None else {"attention_mask": mask}
        out = model(**source | {target: ids}, **options, use_cache=False)[0]
        return out if mask is None or pair else out[mask.bool()]

    def generated() -> Tensor:
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=_NEW, do_sample=False, num_beams=1,
            eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return torch.stack(output.logits)

    calls = {"no mask": lambda: once(None), "padding on the left": lambda: once(mask)}
    if model.can_generate():
        calls["generate with a cache"] = generated
    results: Ways = {}
    for way, call in calls.items():
        if only in (None, way):
            try:
                results[way] = call()
            except Exception as error:  # a stranger's model: any of its ways may not be there
                results[way] = error
    return results


def ordinary_tokens(model: PreTrainedModel, count: int) -> Int[Tensor, "2 T"]:
    """Two sequences of so many tokens that are not special."""
    embedding = model.get_input_embeddings().weight
    config = model.config.get_text_config()
    fields = [x for name, x in config.to_dict().items() if name.endswith("token_id")]
    special = {i for x in fields for i in (x if isinstance(x, list) else [x])}
    ordinary = [i for i in range(3, min(embedding.shape[0], 1000)) if i not in special]
    ids = [ordinary[7 * i % len(ordinary)] for i in range(2 * count)]
    return torch.tensor(ids, device=embedding.device).view(2, count)


@contextlib.contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """In eval mode, and afterwards each module in its own."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _dense_mask(*args: object, **options: object) -> Tensor:
    """transformers' whole mask, also where its kernels could do without."""
    skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    return sdpa_mask(*args, **options | skips)


def _stock(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Stands in for the attention function of an unconverted model."""
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True)
        visible = Visibility(causal=causal and queries > 1).dense(queries, keys, query.device)
    else:
        visible = attention_mask[:, 0, :, :keys]
    inputs = LayerInputs(bias=position_bias, softcap=softcap, sinks=s_aux)
    return _attend(query, key, value, visible, scaling, inputs).transpose(1, 2).contiguous(), None


def _converted(
    layer: Layer, call: LayerCall, compute: Callable[[LayerCall], LayerOutput]
) -> LayerOutput:
    """Stands in for the call of a layer."""
    q, k, v, visibility, scale, inputs = call
    visibility = Visibility() if visibility is None else visibility
    visible = visibility.dense(q.shape[2], k.shape[2], q.device)
    return LayerOutput(_attend(q, k, v, visible, scale, inputs))


def _attend(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    visible: Bool[Tensor, "#B Tq Tk"],
    scale: float | None,
    inputs: LayerInputs,
) -> Float[Tensor, "B H Tq Dv"]:
    """Softmax attention, each query over the keys that it sees, whatever else there is."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    per_head = q.shape[1] // k.shape[1]
    k, v = (x.to(wide).repeat_interleave(per_head, 1) for x in (k, v))
    visible = visible.expand(q.shape[0], -1, -1)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            keys = visible[b, i].nonzero()[:, 0]
            if not len(keys):
                continue
            logits = (k[b][:, keys] @ q[b, :, i, :, None].to(wide))[..., 0] * scale
            if inputs.softcap is not None:
                logits = inputs.softcap * (logits / inputs.softcap).tanh()
            if inputs.bias is not None:
                bias = inputs.bias.expand(q.shape[0], q.shape[1], -1, -1)
                logits = logits + bias[b, :, i, keys]
            if inputs.sinks is not None:
                logits = torch.cat([logits, inputs.sinks[:, None].to(wide)], 1)
            weights = logits.softmax(1)[:, : len(keys)]
            out[b, :, i] = (weights[:, None] @ v[b][:, keys])[:, 0].to(q.dtype)
    return out
