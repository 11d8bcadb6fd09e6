"""What a trained model shows: its kernels, and one real sample with what attends and what hides."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from heedful.hf.look import LayerLook, look
from heedful.nn import MultiTokenAttention
from heedful.report.figures import HidingExhibit, KernelExhibit, MapExhibit, MixExhibit
from heedful.tasks import Task


def exhibits_of(
    model: PreTrainedModel, task: Task, name: str, mechanism: str
) -> Iterator[KernelExhibit | MixExhibit | MapExhibit | HidingExhibit]:
    """Pictures of one trained model: kernels and mixing, a map, and what hid what.

    The map is that of the sharpest head: the largest mean, over queries, of the greatest weight on
    another token than the first. The hiding is that of the layer that hides most.
    """
    yield from _parameters(model, name, mechanism)
    ids = task.shown()
    looks, tokens = look(model, ids[None]), task.tokens(ids)
    layer, head = max(
        ((i, h) for i, seen in looks.items() for h in range(len(seen.weights))),
        key=lambda at: _sharpness(looks[at[0]], at[1]),
    )
    weights = looks[layer].weights[head].numpy()
    unit = "head" if len(looks[layer].weights) == model.config.num_attention_heads else "pair"
    yield MapExhibit(name, mechanism, layer, head, tokens, weights, unit=unit)
    hiding = {i: seen for i, seen in looks.items() if seen.hiding is not None}
    if hiding:
        layer = max(hiding, key=lambda i: hiding[i].hidden.sum().item())
        seen = hiding[layer]
        yield HidingExhibit(
            name, mechanism, layer, tokens, seen.hiding.mean(0).numpy(), seen.hidden.mean(0).numpy()
        )


def _parameters(model: PreTrainedModel, name: str, mechanism: str) -> Iterator:
    for module in model.modules():
        layer = getattr(module, "heedful", None)
        if not isinstance(layer, MultiTokenAttention):
            continue
        index = module.layer_idx
        for kind, kernel in (("pre", layer.conv), ("post", layer.post_conv)):
            if kernel is not None:
                yield KernelExhibit(name, mechanism, index, kind, kernel.detach().cpu().numpy())
        if layer.conv is None and layer.post_conv is None:
            continue  # one layer's mixing is enough to see: that beside the convolutions
        for kind, mix in (("pre", layer.mix), ("post", layer.post_mix)):
            if mix is not None:
                matrix = torch.block_diag(*mix.detach().cpu()).numpy()
                yield MixExhibit(name, mechanism, index, matrix, kind)


def _sharpness(seen: LayerLook, head: int) -> float:
    weights = seen.weights[head][2:, 1:]
    others = weights.clone()
    others.diagonal(1).zero_()  # the token itself
    return others.amax(-1).mean().item()
