"""What single key heads would save with more tokens: of all heads from one gradient.

Trying budgets out, one head at a time, takes as many passes as a model has key heads. To first
order one pass back through the model says the same of all of them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from heedful.eviction import Eviction
from heedful.hf.cache.new import attention_modules
from heedful.hf.intercept import LayerCall, intercept
from heedful.nn import Layer, LayerOutput, Standard
from heedful.ops import Visibility
from heedful.training.sequences import IGNORE
from heedful.training.under_eviction import EvictionInTraining


def head_savings(
    model: nn.Module,
    eviction: Eviction,
    wider: Eviction,
    batches: Iterable[tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]],
) -> Float[Tensor, "L Hk"]:
    r"""How much less a model's loss would be if one key head alone had the wider budget.

    $$ -\frac{\partial L}{\partial a_{lh}}\Big|_{a = 0}, \qquad
       o_{lh} \leftarrow o_{lh} + a_{lh} (\hat o_{lh} - o_{lh}) $$

    with o the output of the query heads that read key head h of layer l from what its cache has,
    and $\hat o$ from what it would have under the wider budget. What a head changes of F in later
    layers is left out.

    Arguments:
        model: as for `EvictionInTraining`, in eval mode.
        eviction: with its tokens per layer or key head.
        wider: the same policy with more tokens.
        batches: tokens, and the labels that count (`IGNORE`: not counted).

    Returns:
        Nats per label, of each attention layer and key head; 0 where a layer has no budget.

    Raises:
        ValueError: as `EvictionInTraining`.
    """
    now, then = (EvictionInTraining(model, x) for x in (eviction, wider))
    modules = attention_modules(model)
    heads = max(module.heedful.shape.key_heads for module in modules)
    shares = torch.zeros(len(modules), heads, requires_grad=True)
    total, labelled = torch.zeros(len(modules), heads), 0
    parts = {
        module.heedful: _Between(module.heedful, now, then, share)
        for share, module in zip(shares, modules, strict=True)
        if now.has_budget(module.heedful)
    }

    def around(
        layer: Layer, call: LayerCall, compute: Callable[[LayerCall], LayerOutput]
    ) -> LayerOutput:
        return parts[layer](call) if layer in parts else compute(call)

    with now.evicting(), intercept(model, around), _frozen(model):
        for ids, labels in batches:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            nats = cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
            )
            total -= torch.autograd.grad(nats, shares)[0]
            labelled += int((labels[:, 1:] != IGNORE).sum())
    return total / max(1, labelled)


class _Between:
    """In place of a layer's call: from its output under one budget towards that under another.

    Arguments:
        layer: whose call it replaces.
        now, then: tell what its cache has under the two budgets.
        shares: how far towards the second, of each key head.
    """

    def __init__(
        self, layer: Layer, now: EvictionInTraining, then: EvictionInTraining, shares: Tensor
    ) -> None:
        self._layer, self._now, self._then, self._shares = layer, now, then, shares
        self._standard = Standard().build(layer.shape)

    def __call__(self, call: LayerCall) -> LayerOutput:
        q, k, v, visibility, scale, inputs = call
        view = Visibility() if visibility is None else visibility
        factor = q.shape[-1] ** -0.5 if scale is None else scale

        def attend(owner: EvictionInTraining) -> Tensor:
            bias = owner.bias(self._layer, q, k, view, factor, inputs).to(q.dtype)
            return self._standard(
                q, k, v, visibility=visibility, scale=scale, inputs=inputs.with_bias(bias)
            ).output

        def between(shares: Tensor) -> Tensor:
            output = attend(self._now)
            shares = shares[: k.shape[1]].repeat_interleave(q.shape[1] // k.shape[1])
            return output + shares.to(output)[:, None, None] * (attend(self._then) - output)

        # Maps of two budgets in every layer are not kept until the gradient comes.
        return LayerOutput(checkpoint(between, self._shares, use_reentrant=False))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Within it no parameter has a gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
