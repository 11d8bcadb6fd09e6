"""An order in which a cache evicts, learned from the attention maps of the model itself.

A cache with room for n tokens evicts those with the highest F. Which tokens are worth keeping can
be read off the model without a mechanism: later queries attend to them. So the selectors of each
layer learn from that layer alone, beside a frozen base, without a gradient through the model.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.hf.family.modules import layers_of
from heedful.hf.intercept import LayerCall, intercept
from heedful.nn import Layer, LayerInputs, LayerOutput, Standard
from heedful.ops import Visibility
from heedful.ops.common.standard import masked_softmax
from heedful.ops.selective.reference import selection
from heedful.ops.selective.soft_eviction import cached_shares
from heedful.training.sequences import IGNORE

CHUNK = 32  # tokens after which the imitated cache evicts
QUERIES = 128  # of each sequence whose attention is compared
ANSWER = 2.0  # weight of a query that answers, in a text of which only answers are learned
# Of F on average, once it has a scale: large enough to rank tokens, too small to change the output.
LEVEL = 0.2
_LEAST_SHARE = 1e-3  # of attention, below which a query has no gradient


class _Report(NamedTuple):
    """Report of one layer on a forward pass."""

    f: Float[Tensor, "B C T"]
    visible: Bool[Tensor, "B C T"]
    maps: Float[Tensor, "B H R T"]
    values: Float[Tensor, "B Hk T D"]


class EvictionOrderLoss:
    r"""Loss of the base's attention and outputs in a cache that evicts by what layers keep.

    $$ \frac{1}{L R} \sum_{l,i} \Big( -\frac{1}{H} \sum_h \log \sum_j A_{hij} a_{ij}
       + \frac{\sum_h |\tilde o_{hi} - o_{hi}|^2}{\langle \sum_h |o_h|^2 \rangle} \Big) $$

    over L layers, H heads and R queries drawn from each sequence. A is the attention map without
    masks, $a_{ij}$ how far token j is still in the cache when query i comes (`cached_shares`), o
    the heads' outputs and $\tilde o$ those of the tokens that are left, with weights that add up
    to 1 again. The first term weights every head equally, also one that looks far back once in
    a thousand queries; the second measures the error of the heads' outputs.

    While a model in training mode runs within `observing()`, its layers compute standard attention,
    so that every layer has the base's own input, and report what this loss reads. Only the order of
    F matters to it: `rescale` gives F a scale afterwards. Another number that a layer keeps per
    token, set when the token comes, and of which the lowest go first, stands for -F, and needs no
    scale.

    Arguments:
        model: with layers that mask, converted by `selective` with selectors of their own, or that
            keep another number per token.
        seed: of the queries that are drawn.

    Raises:
        ValueError: no layer masks or keeps another number, or a selector has no parameters of its
            own.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self._model, self._is_observing = model, False
        self._layers = ordering_layers(model)
        self._maskers = [layer for layer in self._layers if layer.running == "F"]
        if any(layer.query is None for layer in self._maskers):
            raise UserError(
                "targets='maps' trains selectors of their own, and these are heads of the base; "
                "take --mechanism selective:selector=extra"
            )
        self._seed, self._reports = seed, []
        self._queries: Int[Tensor, "B R"] | None = None
        self._weights: Float[Tensor, "B R"] | None = None

    @property
    def is_observing(self) -> bool:
        """True while layers report."""
        return self._is_observing

    @contextmanager
    def observing(self) -> Iterator["EvictionOrderLoss"]:
        """Within it the layers compute standard attention in training mode, and report."""
        standard = StandardAround(self._layers, self._report)

        def around(
            layer: Layer, call: LayerCall, compute: Callable[[LayerCall], LayerOutput]
        ) -> LayerOutput:
            return standard(layer, call, compute) if layer.training else compute(call)

        self._is_observing = True
        try:
            with intercept(self._model, around):
                yield self
        finally:
            self._is_observing, self._reports = False, []

    def draw(self, labels: Int[Tensor, "B T"], step: int) -> None:
        """Choose the queries of the next forward pass, the same ones again for the same step."""
        draws = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        rows = [_queries(row.cpu(), draws) for row in labels]
        self._queries = torch.stack([queries for queries, _ in rows]).to(labels.device)
        self._weights = torch.stack([weights for _, weights in rows]).to(labels.device)
        self._reports = []

    def __call__(self, tokens: int) -> Float[Tensor, ""]:
        """The loss of the newest forward pass, for a cache of so many tokens per layer."""
        reports, self._reports = self._reports, []
        if not reports:
            raise UserError("no layer has reported: draw(labels, step), then run the model")
        f, visible = (torch.cat([getattr(x, name) for x in reports]) for name in ("f", "visible"))
        shares = cached_shares(f, visible, tokens).chunk(len(reports))
        total = f.new_zeros(())
        for report, share in zip(reports, shares, strict=True):
            total = total + self._of_one_layer(report, share)
        return total / len(reports)

    @torch.no_grad()
    def levels(self, model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, " L"]:
        """F of each layer that masks at the end of a batch's sequences, on average.

        Within `observing()`.
        """
        training = model.training
        self.draw(batch["labels"], 0)
        model.train()
        model(**{name: x for name, x in batch.items() if name != "labels"}, use_cache=False)
        model.train(training)
        reports, self._reports = self._reports, []
        each = zip(self._layers, reports, strict=True)
        ends = [(x.f[:, -1], x.visible[:, -1]) for layer, x in each if layer.running == "F"]
        if not ends:
            return torch.empty(0, device=batch["labels"].device)
        return torch.stack([(f * visible).sum() / visible.sum() for f, visible in ends])

    @torch.no_grad()
    def rescale(self, levels: Float[Tensor, " L"]) -> None:
        """Scale the selectors' queries so that F is `LEVEL` where it was so much."""
        for layer, level in zip(self._maskers, levels.tolist(), strict=True):
            layer.query.weight.mul_(LEVEL / max(level, 1e-6))

    @contextmanager
    def settled(self, levels: Float[Tensor, " L"]) -> Iterator[None]:
        """`rescale`, taken back afterwards: for evaluation in the course of training."""
        weights = [layer.query.weight.detach().clone() for layer in self._maskers]
        self.rescale(levels)
        try:
            yield
        finally:
            with torch.no_grad():
                for layer, weight in zip(self._maskers, weights, strict=True):
                    layer.query.weight.copy_(weight)

    def _of_one_layer(self, report: _Report, shares: Tensor) -> Tensor:
        # While a chunk of tokens is read, the cache is what the chunk before it has left.
        chunk = self._queries // CHUNK
        shares = torch.cat([torch.ones_like(shares[:, :1]), shares], 1)
        shares = shares.gather(1, _wide(chunk, shares))
        token = torch.arange(shares.shape[2], device=shares.device)
        shares = shares.masked_fill(token >= chunk[..., None] * CHUNK, 1)
        attended = report.maps * shares[:, None]
        whole = attended.sum(-1, keepdim=True).clamp(min=_LEAST_SHARE)
        values = report.values.repeat_interleave(report.maps.shape[1] // report.values.shape[1], 1)
        output = report.maps @ values
        error = ((attended / whole) @ values - output).square().sum((1, 3))
        size = output.square().sum((1, 3)).mean(1, keepdim=True).clamp(min=1e-12)
        cost = error / size - whole[..., 0].log().mean(1)
        return (cost * self._weights).sum() / self._weights.sum()

    def _report(self, layer: Layer, call: LayerCall) -> LayerInputs:
        q, k, v, visibility, scale, inputs = call
        if self._queries is None:
            raise UserError("draw(labels, step) chooses the queries, before the model runs")
        tokens = k.shape[2]
        dense = visibility.dense(tokens, tokens, q.device).expand(len(q), -1, -1)
        if layer.running == "F":
            selectors = layer.selectors(q, k, inputs)
            masking = selection(*selectors, layer.config.protect_first, visibility, scale)
            f, visible = after_chunks(masking, dense)
        else:
            options = {"visibility": visibility, "scale": scale, "inputs": inputs}
            f, visible = _set_once(layer(q, k, v, **options).state, dense)
        with torch.no_grad():
            maps = self._maps(q, k, dense, scale, inputs)
        self._reports.append(_Report(f, visible, maps.to(f.dtype), v.detach().to(f.dtype)))
        return inputs

    def _maps(self, q, k, dense, scale, inputs: LayerInputs) -> Float[Tensor, "B H R T"]:
        """The standard attention of the drawn queries."""
        rows = self._queries
        q = q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        visible = dense.gather(1, _wide(rows, dense))[:, None]
        logits = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * scale
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if inputs.softcap is not None:
            logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
        if inputs.bias is not None:
            bias = inputs.bias.expand(len(q), -1, -1, -1)
            logits = logits + bias.gather(
                2, rows[:, None, :, None].expand(-1, bias.shape[1], -1, bias.shape[3])
            )
        sinks = None if inputs.sinks is None else inputs.sinks[:, None, None]
        return masked_softmax(logits, visible, sinks)


class StandardAround:
    """In place of some layers' calls: standard attention, and before it `prepare`.

    Arguments:
        layers: whose calls it replaces; others compute what they do.
        prepare: is given the layer and its call, visibility and scale included, and returns the
            inputs of standard attention.
    """

    def __init__(
        self, layers: Iterable[Layer], prepare: Callable[[Layer, LayerCall], LayerInputs]
    ) -> None:
        self._prepare = prepare
        self._standard = {layer: Standard().build(layer.shape) for layer in layers}

    def __call__(
        self, layer: Layer, call: LayerCall, compute: Callable[[LayerCall], LayerOutput]
    ) -> LayerOutput:
        if layer not in self._standard:
            return compute(call)
        q, k, v, visibility, scale, inputs = call
        view = Visibility() if visibility is None else visibility
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        inputs = self._prepare(layer, LayerCall(q, k, v, view, factor, inputs))
        return self._standard[layer](q, k, v, visibility=visibility, scale=scale, inputs=inputs)


def after_chunks(
    masking: Float[Tensor, "B Hs T T"], dense: Bool[Tensor, "B T T"]
) -> tuple[Float[Tensor, "B C T"], Bool[Tensor, "B C T"]]:
    """F after each chunk of `CHUNK` tokens, and what the last query of the chunk sees.

    A cache evicts a token for all heads, by the selector that masks it least.
    """
    tokens = masking.shape[3]
    rest = -tokens % CHUNK
    chunks = torch.nn.functional.pad(masking, (0, 0, 0, rest)).unflatten(2, (-1, CHUNK))
    return chunks.sum(3).cumsum(2).amin(1), dense[:, _ends(dense)]


def _set_once(
    numbers: Float[Tensor, "B 1 T"], dense: Bool[Tensor, "B T T"]
) -> tuple[Float[Tensor, "B C T"], Bool[Tensor, "B C T"]]:
    """As `after_chunks`, of numbers that stay what they were: minus these."""
    ends = _ends(dense)
    return -numbers.expand(-1, len(ends), -1), dense[:, ends]


def _ends(dense: Bool[Tensor, "B T T"]) -> Int[Tensor, " C"]:
    """The last token of each chunk."""
    tokens = dense.shape[1]
    ends = torch.arange(CHUNK - 1, tokens + CHUNK - 1, CHUNK, device=dense.device)
    return ends.clamp(max=tokens - 1)


def check_length(length: int, tokens: int) -> None:
    """Raise if no query of a sequence comes after a cache of so many tokens has evicted."""
    first = CHUNK * -(-(tokens + 1) // CHUNK)
    if length <= first:
        raise UserError(
            f"length must be above {first} with soft_budgets from {tokens}: the imitated cache "
            f"evicts after every {CHUNK} tokens, and a sequence of {length} would teach nothing"
        )


def ordering_layers(model: nn.Module) -> list[Layer]:
    """The layers that keep F or another number per token: they tell a cache which to evict.

    Raises:
        ValueError: there is none.
    """
    kept = [x for x in layers_of(model) if x.running]
    layers = [x for x in kept if x.reports_memory or x.running != "F"]
    if others := [type(x).__name__ for x in layers if x.tails]:
        raise UserError(
            f"targets='maps' compares with the base's own attention, which {others[0]} changes; "
            "train it with the memory loss, or take --mechanism selective:selector=extra"
        )
    if not layers:
        raise UserError(
            f"targets='maps' teaches what a cache evicts by what layers keep per token, such as F, "
            f"and no layer of this {type(model).__name__} learns any; take --mechanism "
            "selective:selector=extra"
        )
    return layers


def _queries(labels: Int[Tensor, " T"], draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the queries of a sequence to compare, and their weights.

    Any, and where only answers are learned (less than half of the tokens) as many of those.
    """
    queries = torch.randint(len(labels) - 1, (QUERIES,), generator=draws)
    weights = torch.ones(QUERIES)
    answers = (labels[1:] != IGNORE).nonzero()[:, 0]
    if 0 < len(answers) < len(labels) // 2:
        sample = answers[torch.randperm(len(answers), generator=draws)[: QUERIES // 2]]
        queries[: len(sample)], weights[: len(sample)] = sample, ANSWER
    return queries, weights


def _wide(rows: Int[Tensor, "B R"], like: Tensor) -> Int[Tensor, "B R T"]:
    return rows[..., None].expand(-1, -1, like.shape[-1])
