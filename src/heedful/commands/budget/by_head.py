"""Share out the tokens of budgets that were found among single key heads.

What each head would save with more tokens is known of all heads from one gradient; the trials, with
real caches, only say whether the budgets that follow are better.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.commands.budget.options import BudgetSearch
from heedful.commands.budget.rows import Rows, read_rows
from heedful.commands.budget.search import (
    BAR,
    OPEN_BAR,
    PIECES,
    Measure,
    NoTrialsLeft,
    SearchLog,
    SearchResult,
    Trials,
    check_rows_fit,
    history,
    least_budget,
    search_identity,
)
from heedful.commands.budget.shrink import Budgets, spread
from heedful.commands.models import open_model, open_tokenizer
from heedful.eviction import Eviction
from heedful.hf.budgets import NAME, read_budgets, write_budgets
from heedful.hf.cache.new import attention_modules, new_cache
from heedful.records.files import only_writer
from heedful.training.head_savings import head_savings
from heedful.training.under_eviction import EvictionInTraining

LOG = "budgets.by-head.jsonl"

_BEFORE = "tokens before"  # in a budgets.json of this search
_SMOOTH = 0.3  # of the mean cost, added to that of each head, which is known only roughly


def search_by_head(options: BudgetSearch) -> SearchResult:
    """Share out the tokens of each layer in the folder's `budgets.json` among its key heads.

    The sum over all key heads stays; a layer may have more or fewer than before. What was tried
    goes into a file beside it, so that a search that was stopped goes on there.

    Raises:
        ValueError: an option cannot be read or does not fit the model, there is no budgets.json,
            or its policy or the layers cannot have budgets of key heads.
    """
    folder, begun = Path(options.adapter or options.model), time.perf_counter()
    model = open_model(
        options.model,
        options.device,
        dtype=options.dtype,
        adapter=options.adapter,
        budgets=False,
    )
    tokenizer = open_tokenizer(options.tokenizer, options.model, model)
    check_rows_fit(options, model, options.model)
    layers = _budgets_before(folder, model, options.restart)
    rows = read_rows(options.data, tokenizer, options.length, options.rows)
    heads = [module.heedful.shape.key_heads for module in attention_modules(model)]

    def nested(flat: Budgets) -> Budgets:
        """The budgets of the heads, layer by layer."""
        each = iter(flat)
        return tuple(
            None if n is None else tuple(next(each) for _ in range(count))
            for n, count in zip(layers.tokens, heads, strict=True)
        )

    start: Budgets = tuple(
        tokens
        for n, count in zip(layers.tokens, heads, strict=True)
        if n is not None
        for tokens in (n if isinstance(n, tuple) else (n,) * count)
    )
    if start and max(start) > options.length:
        raise UserError(
            f"length must be at least the {max(start)} tokens of the largest budget, got "
            f"{options.length}: the sum of the budgets could not stay; give longer sequences"
        )
    whole = tuple(options.length for _ in start)
    first = dataclasses.replace(layers, tokens=nested(start))
    new_cache(model, first), EvictionInTraining(model, first)  # raise for what they cannot serve
    with only_writer(folder):
        identity = search_identity(options, layers, rows, model, None)
        log, most = SearchLog(folder / LOG, identity, options.restart), options.trials or None
        with tqdm(unit=" trials", total=most, bar_format=BAR if most else OPEN_BAR) as bar:
            everything = dataclasses.replace(layers, tokens=nested(whole))
            step = max(1, options.length // PIECES)
            measure = Measure(model, rows, everything, log, bar, step)
            trials = Trials(measure, most, everything.tokens)
            savings = _Savings(model, rows, layers, log, nested, trials)
            best, ended = start, False
            with suppress(NoTrialsLeft):
                least = least_budget(layers, model)
                for flat in spread(start, whole, least, lambda x: trials(nested(x)), savings):
                    best = flat
                ended = True
        eviction = dataclasses.replace(layers, tokens=nested(best))
        result = SearchResult(
            path=folder / NAME, eviction=eviction, start=everything.tokens,
            perplexity=measure(eviction.tokens), whole=measure(everything.tokens), limit=None,
            rows=options.rows, length=options.length, trials=len(log.perplexities),
            measured=log.measured, ended=ended, seconds=time.perf_counter() - begun,
        )  # fmt: skip
        about = history(options, result) | {_BEFORE: layers.tokens}
        write_budgets(result.path, eviction, model, about)
    return result


def _budgets_before(folder: Path, model: PreTrainedModel, restart: bool) -> Eviction:
    """The budgets that are there, or those that a search was begun with, to go on with it."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(
            f"by_head shares out the budgets that a folder has, and {path} is not there; search "
            "budgets of layers first (heedful budget without --by-head)"
        )
    eviction = read_budgets(path, model)
    before = (json.loads(path.read_text()).get("about") or {}).get(_BEFORE)
    if before is not None and not restart:
        return dataclasses.replace(eviction, tokens=tuple(before))
    return dataclasses.replace(eviction, tokens=eviction.budgets(len(attention_modules(model))))


class _Savings:
    """What each head saves, from the log where it is known."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        layers: Eviction,
        log: SearchLog,
        nested: Callable[[Budgets], Budgets],
        trials: Trials,
    ) -> None:
        self.model, self.rows, self.layers = model, rows, layers
        self.log, self.nested, self.trials = log, nested, trials

    def __call__(self, budgets: Budgets, others: Budgets) -> Sequence[float]:
        """Of the logarithm of perplexity, for spread(); each with a share of the mean cost."""
        saved = self.log.savings.get(self.nested(budgets))
        if saved is None:
            self.trials.check_left()
            saved = self._measured(budgets, others)
            self.log.add_savings(self.nested(budgets), saved)
        per_cost = [1 / n - 1 / other for n, other in zip(budgets, others, strict=True)]
        costs = [max(x / y, 0.0) if y else 0.0 for x, y in zip(saved, per_cost, strict=True)]
        least = _SMOOTH * sum(costs) / len(costs)
        return [(x + least) * y for x, y in zip(costs, per_cost, strict=True)]

    def _measured(self, budgets: Budgets, others: Budgets) -> list[float]:
        now, then = (
            dataclasses.replace(self.layers, tokens=self.nested(x)) for x in (budgets, others)
        )
        table = head_savings(self.model, now, then, self._sequences())
        return [
            saving
            for row, n in zip(table.tolist(), self.nested(budgets), strict=True)
            if n is not None
            for saving in row[: len(n)]
        ]

    def _sequences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One at a time, since a gradient goes back through the whole model."""
        for ids, labels in zip(*self.rows, strict=True):
            yield ids[None].to(self.model.device), labels[None].to(self.model.device)
