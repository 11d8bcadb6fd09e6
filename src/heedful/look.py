"""Look into a converted model: attention maps, what hides what, learned kernels."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.nn import MultiTokenAttention, SelectiveAttention, StandardAttention
from heedful.ops import Visibility
from heedful.ops.mta.reference import multi_token_attention_map
from heedful.ops.selective.reference import selection


class LayerLook(NamedTuple):
    """What one layer did with one row of tokens.

    weights: the map that multiplies the values, `[H, T, T]`.
    hiding: for selective attention, how much token p hides token j from later ones, `[Hs, T, T]`.
    hidden: its sum over all tokens p: how far each token ends up hidden, `[Hs, T]`.
    """

    weights: Float[Tensor, "H T T"]
    hiding: Float[Tensor, "Hs T T"] | None = None
    hidden: Float[Tensor, "Hs T"] | None = None


@torch.no_grad()
def look(model: PreTrainedModel, input_ids: Int[Tensor, "1 T"]) -> dict[int, LayerLook]:
    """Attention maps of one row in every converted layer, dense: for short rows.

    Arguments:
        model: a converted model (standard, multi-token, talking heads or selective).
        input_ids: one row of tokens, `[1, T]`.

    Returns:
        What each layer did, by layer index.

    Raises:
        ValueError: the model is not converted, or not one row is given.
    """
    layers = {
        module.layer_idx: module.heedful
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "heedful")
    }
    if not layers:
        raise ValueError("model must be converted; heedful.convert(model, 'standard') is enough")
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(f"input_ids must be one row [1, T], got {tuple(input_ids.shape)}")
    seen: dict[int, tuple] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, options, index=index: seen.update({index: (given, options)}),
            with_kwargs=True,
        )
        for index, layer in layers.items()
    ]
    training = model.training
    try:
        model.eval()(input_ids=input_ids.to(model.device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {index: _look(layers[index], *seen[index]) for index in layers}


def _look(layer: nn.Module, given: tuple, options: dict) -> LayerLook:
    q, k = given[0].float(), given[1].float()
    visibility = options["visibility"] or Visibility()
    scale = options["scale"] or q.shape[-1] ** -0.5
    match layer:
        case MultiTokenAttention():
            parts = {
                name: getattr(layer, name) for name in ("conv", "post_conv", "mix", "post_mix")
            }
            maps = multi_token_attention_map(
                q, k, **parts, visibility=visibility, scale=options["scale"]
            )
            return LayerLook(maps[0].cpu())
        case StandardAttention():
            maps = multi_token_attention_map(q, k, visibility=visibility, scale=options["scale"])
            return LayerLook(maps[0].cpu())
        case SelectiveAttention():
            selectors = layer.selectors(q, k, options["hidden"])
            protect = layer.config.protect_first
            hiding = selection(*selectors, protect, visibility, scale)
            f = hiding.cumsum(2) - hiding
            visible = visibility.dense(q.shape[2], k.shape[2], q.device)[:, None]
            spread = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            logits = (q @ spread.mT * scale - f).masked_fill(~visible, float("-inf"))
            return LayerLook(logits.softmax(-1)[0].cpu(), hiding[0].cpu(), hiding[0].sum(1).cpu())
    raise ValueError(f"{type(layer).__name__} has no single attention map to show")
