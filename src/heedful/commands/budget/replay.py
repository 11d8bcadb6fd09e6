"""The perplexity of rows under budgets, where most of a model need not run again.

Two sets of budgets that agree in the first layers give the same there. So the outputs of all
decoder layers are kept for one set, and another one runs from the first layer that differs.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from heedful.eviction import Eviction
from heedful.hf.cache.new import attention_modules
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.family.modules import decoder_layers

_LOGITS = 2**26  # numbers of logits at a time, which decides how many rows run together
_MOST = 700.0  # exp of more is no number


class Replay:
    """Perplexity of rows under budgets, in terms of budgets that have been kept.

    Arguments:
        model: a converted model, in eval mode.
        rows: tokens `[rows, length]` without padding; each token but the first is predicted.
    """

    def __init__(self, model: PreTrainedModel, rows: Tensor) -> None:
        self.model, self.count = model, rows.shape[0] * (rows.shape[1] - 1)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        size = max(1, _LOGITS // (rows.shape[1] * vocabulary))
        self.batches = list(rows.to(model.device).split(size))
        attention = attention_modules(model)
        self.layers = decoder_layers(model, attention) or []
        holds = [{id(part) for part in layer.modules()} for layer in self.layers]
        self.place = [
            next((i for i, parts in enumerate(holds) if id(module) in parts), 0)
            for module in attention
        ]
        self.eviction: Eviction | None = None
        self.outputs: list[list[object]] = []  # per batch, of each decoder layer

    def whole(self) -> float:
        """Perplexity without any eviction."""
        return self._perplexity(None, 0)

    def keep(self, eviction: Eviction) -> float:
        """Perplexity under a policy, whose layers' outputs are kept from now on."""
        first = self._first(eviction)
        if self.eviction is None:
            self.outputs = [[None] * len(self.layers) for _ in self.batches]
        found = self._perplexity(eviction, first, keep=True)
        fresh, self.eviction = self.eviction is None, eviction
        if fresh and self.layers:
            again = self._perplexity(eviction, len(self.layers) - 1)
            if not math.isclose(again, found, rel_tol=1e-5):
                kind = type(self.model).__name__
                warnings.warn(
                    f"{kind}: layers hand on more than their outputs, so every trial runs all of "
                    "them",
                    stacklevel=2,
                )
                self.layers, self.outputs = [], []
        return found

    def of(self, eviction: Eviction) -> float:
        """Perplexity under another policy or budgets; what is kept stays as it is."""
        return self._perplexity(eviction, self._first(eviction))

    def _first(self, eviction: Eviction) -> int:
        """The first decoder layer that differs from what is kept."""
        if self.eviction is None or not self.layers:
            return 0
        count = len(self.place)
        pairs = zip(self.place, self.eviction.budgets(count), eviction.budgets(count), strict=True)
        return min((place for place, a, b in pairs if a != b), default=len(self.layers) - 1)

    @torch.no_grad()
    def _perplexity(self, eviction: Eviction | None, first: int, keep: bool = False) -> float:
        total = 0.0
        with evicting(self.model, eviction):
            for index, ids in enumerate(self.batches):
                outputs = self.outputs[index] if self.layers and self.outputs else []
                with _replaying(self.layers[:first], outputs):
                    kept = _keeping(self.layers, outputs, first) if keep else ()
                    try:
                        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
                    finally:
                        for hook in kept:
                            hook.remove()
                logits = logits if logits.dtype == torch.float64 else logits.float()
                losses = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
                total += losses.double().sum().item()
        mean = total / self.count
        return math.inf if mean > _MOST else math.exp(mean)


@contextmanager
def _replaying(layers: list[nn.Module], outputs: list[object]) -> Iterator[None]:
    """Within it, these layers return the kept outputs and compute nothing."""
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer, output in zip(layers, outputs, strict=False):
            layer.forward = _Kept(output)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


class _Kept:
    """In place of a layer's forward: what it returned."""

    def __init__(self, output: object) -> None:
        self.output = output

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.output


def _keeping(layers: list[nn.Module], outputs: list[object], first: int) -> list:
    """Hooks that write down what the layers from `first` on return."""

    def note(index: int):
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            outputs[index] = output

        return hook

    return [layers[i].register_forward_hook(note(i)) for i in range(first, len(layers))]
