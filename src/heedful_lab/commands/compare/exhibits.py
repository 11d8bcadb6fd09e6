"""Exhibits of a trained model: its kernels, and attention and masking on one real sample."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from heedful.hf.look import LayerLook
from heedful_lab.commands.compare.figures import (
    Exhibit,
    HidingExhibit,
    KernelExhibit,
    MapExhibit,
    MixExhibit,
)


def exhibits_of(
    task: str, mechanism: str, tokens: Sequence[str], looks: Mapping[int, LayerLook]
) -> Iterator[Exhibit]:
    """Pictures of one trained model: kernels and mixing, a map, and what hid what.

    The map is that of the sharpest head: the largest mean, over queries, of the greatest weight on
    another token than the first. The hiding is that of the layer that hides most.

    Arguments:
        task, mechanism: names to show.
        tokens: the text of each token of the sample.
        looks: what each layer did with the sample, by layer index.
    """
    for index, look in looks.items():
        yield from _parameters(task, mechanism, index, look)
    layer, head = max(
        ((i, h) for i, look in looks.items() for h in range(len(look.weights))),
        key=lambda at: _sharpness(looks[at[0]], at[1]),
    )
    weights = looks[layer].weights[head].numpy()
    unit = "head" if looks[layer].heads_per_map == 1 else "pair"
    yield MapExhibit(task, mechanism, layer, head, tokens, weights, unit=unit)
    hiding = {i: look for i, look in looks.items() if look.hiding is not None}
    if hiding:
        layer = max(hiding, key=lambda i: hiding[i].hidden.sum().item())
        look = hiding[layer]
        yield HidingExhibit(
            task, mechanism, layer, tokens, look.hiding.mean(0).numpy(), look.hidden.mean(0).numpy()
        )


def _parameters(task: str, mechanism: str, index: int, look: LayerLook) -> Iterator[Exhibit]:
    for kind, kernel in (("pre", look.conv), ("post", look.post_conv)):
        if kernel is not None:
            yield KernelExhibit(task, mechanism, index, kind, kernel.numpy())
    if look.conv is None and look.post_conv is None:
        return  # one layer's mixing is enough to see: that beside the convolutions
    for kind, mix in (("pre", look.mix), ("post", look.post_mix)):
        if mix is not None:
            matrix = torch.block_diag(*mix).numpy()
            yield MixExhibit(task, mechanism, index, matrix, kind)


def _sharpness(look: LayerLook, head: int) -> float:
    weights = look.weights[head][2:, 1:]
    others = weights.clone()
    others.diagonal(1).zero_()  # the token itself
    return others.amax(-1).mean().item()
