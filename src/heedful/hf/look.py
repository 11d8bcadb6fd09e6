"""Look into a converted model: attention maps, what masks what, learned kernels."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.eviction import Eviction
from heedful.hf.attention import NAME
from heedful.hf.cache.new import attention_layers, new_cache
from heedful.hf.intercept import LayerCall, intercept
from heedful.hf.versions import cache_argument
from heedful.nn import Layer, LayerOutput, MultiTokenAttention
from heedful.nn.layer import Step


class LayerLook(NamedTuple):
    """Attention matrices of one layer for one sequence, and multi-token attention's kernels.

    weights: the map that multiplies the values, `[H, T, T]`; differential has one per pair.
    masking: for selective attention, how much token p masks token j from later ones, `[Hs, T, T]`.
    masked: its sum over all tokens p: F of each token at the end, `[Hs, T]`.
    heads_per_map: how many heads of the model share a map: two in differential attention.
    conv, post_conv, mix, post_mix: the layer's parameters, as the operator takes them.
    two_sided: whether kernels look at later queries too, with the current one in the middle row.
    groups: the first and the last token of every group of grouped attention, `[G, 2]`.
    steps: the maps on the way to the weights, each `[H, T, T]`; only from `look_into`.
    """

    weights: Float[Tensor, "H T T"]
    masking: Float[Tensor, "Hs T T"] | None = None
    masked: Float[Tensor, "Hs T"] | None = None
    heads_per_map: int = 1
    conv: Float[Tensor, "H cq ck"] | None = None
    post_conv: Float[Tensor, "H cq2 ck2"] | None = None
    mix: Float[Tensor, "n g g"] | None = None
    post_mix: Float[Tensor, "n2 g2 g2"] | None = None
    two_sided: bool = False
    groups: Int[Tensor, "G 2"] | None = None
    steps: Sequence[Step] = ()


def look(model: PreTrainedModel, input_ids: Int[Tensor, "1 T"]) -> dict[int, LayerLook]:
    """Attention maps of one sequence in every converted layer; dense, so for short sequences.

    Arguments:
        model: a converted model.
        input_ids: one row of tokens, `[1, T]`.

    Returns:
        What each layer did, by layer index.

    Raises:
        ValueError: the model is not converted, or `input_ids` is not one sequence.
    """
    return dict(look_into(model, input_ids, steps=False))


def look_into(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "1 T"],
    layers: Sequence[int] = (),
    *,
    steps: bool = True,
) -> Iterator[tuple[int, LayerLook]]:
    """As `look`, one layer at a time: the maps of a layer are computed when it is reached.

    The model runs once, before this returns; only queries and keys are kept.

    Arguments:
        model: a converted model.
        input_ids: one row of tokens, `[1, T]`.
        layers: only these, by index; all by default.
        steps: also the maps on the way to the weights.

    Returns:
        Index and look of each layer, in order.

    Raises:
        ValueError: as `look`, or the model does not have a layer.
    """
    modules, calls = _calls(model, input_ids, layers)
    return ((index, _look(modules[index], *calls[index], steps)) for index in sorted(modules))


@torch.no_grad()
def _calls(
    model: PreTrainedModel, input_ids: Int[Tensor, "1 T"], indices: Sequence[int]
) -> tuple[dict[int, Layer], dict[int, tuple]]:
    """The layers by index, and what each was called with."""
    layers_of_model = [getattr(module, NAME, None) for module in model.modules()]
    layers_of_model = [layer for layer in layers_of_model if isinstance(layer, nn.Module)]
    layers = {layer.shape.layer: layer for layer in layers_of_model}
    if not layers:
        raise UserError("model must be converted; heedful.convert(model, 'standard') is enough")
    if len({layer.shape.role for layer in layers_of_model}) > 1:
        raise UserError(
            f"model must be one stack of layers, and {type(model).__name__} has an encoder or "
            "cross-attention beside its decoder, which look at two rows: look at its encoder alone"
        )
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise UserError(f"input_ids must be one row [1, T], got {tuple(input_ids.shape)}")
    for index in indices:
        if index not in layers:
            names = ", ".join(map(str, sorted(layers)))
            raise UserError(f"layers must be converted ones ({names}), got {index}")
    layers = {index: layers[index] for index in indices or layers}
    calls: dict[int, tuple] = {}

    def note(
        layer: Layer, call: LayerCall, compute: Callable[[LayerCall], LayerOutput]
    ) -> LayerOutput:
        if layer.shape.layer in layers:
            calls[layer.shape.layer] = call[:3], dict(zip(call._fields[3:], call[3:], strict=True))
        return compute(call)

    training = model.training
    with intercept(model, note):
        try:
            model.eval()(input_ids=input_ids.to(model.device), use_cache=False)
        finally:
            model.train(training)
    return layers, calls


@torch.no_grad()
def _look(layer: Layer, qkv: tuple, options: dict, steps: bool) -> LayerLook:
    q, k = qkv[0].float(), qkv[1].float()
    maps = layer.maps(q, k, **options)
    weights = maps.weights[0].cpu()
    look = LayerLook(weights, heads_per_map=layer.shape.heads // len(weights))
    if maps.masking is not None:
        masking = maps.masking[0].cpu()
        look = look._replace(masking=masking, masked=masking.sum(1))
    if isinstance(layer, MultiTokenAttention):
        shown = layer.shown()
        copies = {name: None if x is None else x.cpu().clone() for name, x in shown.items()}
        look = look._replace(**copies, two_sided=layer.two_sided)
    if maps.groups is not None:
        there = maps.groups.there[0]
        spans = torch.stack([maps.groups.start[0][there], maps.groups.end[0][there]], dim=1)
        look = look._replace(groups=spans.cpu())
    if steps:
        on_the_way = [x._replace(map=x.map[0].cpu()) for x in layer.steps(q, k, **options)]
        look = look._replace(steps=on_the_way)
    return look


@torch.no_grad()
def cached_over_time(
    model: PreTrainedModel, input_ids: Int[Tensor, "1 T"], eviction: Eviction
) -> dict[int, Bool[Tensor, "T T"]]:
    """Tokens in each layer's cache after every token of one sequence, read one by one.

    Arguments:
        model: a converted model, or a decoder of transformers.
        input_ids: one row of tokens, `[1, T]`.
        eviction: the policy and its budget.

    Returns:
        By layer index, `[T, T]`: `True` at `[t, j]` where token j is still cached after token t.
    """
    cache = new_cache(model, eviction)
    length = input_ids.shape[1]
    own = attention_layers(cache)
    indices = [i for i, layer in enumerate(cache.layers) if layer in own]
    cached = {index: torch.zeros(length, length, dtype=torch.bool) for index in indices}
    training = model.training
    model.eval()
    for t in range(length):
        model(input_ids=input_ids[:, t : t + 1].to(model.device), **cache_argument(model, cache))
        for index, at in zip(indices, cache.positions(), strict=True):
            cached[index][t, at[0].cpu()] = True
    model.train(training)
    return cached
