"""What a trained model shows: its kernels, and one real sample with what attends and what hides."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from heedful.figures import HidingExhibit, KernelExhibit, MapExhibit, MixExhibit
from heedful.hf.look import LayerLook, look
from heedful.nn import MultiTokenAttention
from heedful.tasks import Assignment, Blocks, Task, Text

_TEXT_TOKENS = 48


def exhibits_of(
    model: PreTrainedModel, task: Task, name: str, mechanism: str
) -> Iterator[KernelExhibit | MixExhibit | MapExhibit | HidingExhibit]:
    """Pictures of one trained model: kernels and mixing, a map, and what hid what.

    The map is that of the sharpest head: the largest mean, over queries, of the greatest weight on
    another token than the first. The hiding is that of the layer that hides most.
    """
    yield from _parameters(model, name, mechanism)
    ids = sample(task)
    looks = look(model, ids[None])
    # Both ends of a row are written as nothing; in text, which has no end, BOS parts documents.
    end = "BOS" if isinstance(task, Text) else "EOS"
    tokens = ["BOS", *(task.decode([i]) or end for i in ids.tolist()[1:])]
    layer, head = max(
        ((i, h) for i, seen in looks.items() for h in range(len(seen.weights))),
        key=lambda at: _sharpness(looks[at[0]], at[1]),
    )
    weights = looks[layer].weights[head].numpy()
    yield MapExhibit(name, mechanism, layer, head, tokens, weights)
    hiding = {i: seen for i, seen in looks.items() if seen.hiding is not None}
    if hiding:
        layer = max(hiding, key=lambda i: hiding[i].hidden.sum().item())
        seen = hiding[layer]
        yield HidingExhibit(
            name, mechanism, layer, tokens, seen.hiding.mean(0).numpy(), seen.hidden.mean(0).numpy()
        )


def sample(task: Task) -> torch.Tensor:
    """A held-out row short enough to be read: `[T]` token ids."""
    if isinstance(task, Blocks):
        task = replace(task, blocks=min(task.blocks, 6))
    if isinstance(task, Assignment):
        task = replace(task, assignments=min(task.assignments, 16), queries=min(task.queries, 3))
    if isinstance(task, Text):
        return task.evaluations()["held-out"].sample(1, 0).input_ids[0, :_TEXT_TOKENS]
    return task.sample(1, 0).input_ids[0]


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
