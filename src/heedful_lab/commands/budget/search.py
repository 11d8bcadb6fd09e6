"""Search how many tokens each layer's cache needs; how is in shrink.py.

Long sequences are tried in pieces of a 64th: a step of each layer's cache takes a piece in place of
a token, which is faster. The result is measured token by token at the
end, and raised where that passes the limit.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.eviction import POLICIES, Eviction
from heedful.eviction.selection import check_policy
from heedful.files import append_line, only_writer, read_each, write_whole
from heedful.hf.budgets import NAME, write_budgets
from heedful.hf.cache.base import CacheLayer
from heedful.hf.cache.new import attention_modules, new_cache
from heedful.hf.convert import replace_attention
from heedful.hf.converted_model import ConvertedModel
from heedful.hf.identity import model_identity
from heedful.training.checkpoints import differences
from heedful_lab.commands.budget.options import BudgetSearch
from heedful_lab.commands.budget.rows import Rows, Sequences, perplexity
from heedful_lab.commands.budget.shrink import (
    Budgets,
    common_level,
    greedy,
    raised,
    shrink,
    spread,
    total,
)
from heedful_lab.commands.models import ModelSource
from heedful_lab.commands.policies import policy_named
from heedful_lab.records.environment import environment

LOG = "budgets.search.jsonl"
FORMAT = 2

OPEN_BAR = "{desc} [{n} trials, {elapsed}]"
BAR = "{desc} [{n} of at most {total} --trials, {elapsed}, at most {remaining} left]"
PIECES = 64  # of a sequence, while searching


class SearchResult(NamedTuple):
    """Result of a search.

    path: the file that was written.
    eviction: the policy with a budget for every layer.
    start: the budgets that hold everything.
    perplexity: under it; `whole` with all tokens; `limit`: what it must not pass, unless the sum
        of tokens is given.
    rows, length: of the data.
    trials: budgets that were tried; `measured`: those of them that this run measured.
    ended: nothing is left to try; else the trials were used up before.
    seconds: that this run took.
    """

    path: Path
    eviction: Eviction
    start: Budgets
    perplexity: float
    whole: float
    limit: float | None
    rows: int
    length: int
    trials: int
    measured: int
    ended: bool
    seconds: float

    @property
    def share_of_tokens(self) -> float:
        """The share of all layers' tokens that the budgets hold."""
        return share(self.eviction.budgets(len(self.start)), self.start, self.length)


def share(budgets: Budgets, start: Budgets, length: int) -> float:
    """Share of the starting budgets' tokens that these hold; `None` is a whole sequence."""
    cached, whole = (sum(n or length for n in those) for those in (budgets, start))
    return cached / whole


def search(options: BudgetSearch) -> SearchResult:
    """Search as `heedful budget` does, and write `budgets.json` into the model's folder.

    Every trial goes into a file beside it, so that a search that was stopped goes on there.

    Raises:
        ValueError: an option cannot be read, does not fit the model, or cannot be met; or
            the folder holds another search.
    """
    source = ModelSource(
        options.model, options.device, options.dtype, options.adapter, options.tokenizer
    )
    plan = SearchPlan(
        source,
        Path(options.adapter or options.model),
        Sequences(options.data, options.length, options.rows),
        options.eviction,
        {"recent": options.recent} | ({} if options.sinks is None else {"sinks": options.sinks}),
        Limit(
            options.loss,
            options.reference and replace(source, name=options.reference, adapter=None),
            options.tokens,
        ),
        options.trials or None,
        options.restart,
    )
    return _run(plan)


class Limit(NamedTuple):
    """Limit of a search, one of three.

    loss: percent of perplexity above that of the full cache.
    reference: a model whose perplexity is the limit.
    tokens: of each layer on average, whose sum is given.
    """

    loss: float
    reference: ModelSource | None
    tokens: int | None

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens} tokens per layer on average"
        if self.reference is not None:
            return f"perplexity of {self.reference.name} with its full cache"
        return f"{self.loss} % above the full cache"


class SearchPlan(NamedTuple):
    """A search in plain values.

    source: the model.
    folder: for the budgets.
    sequences: that they are measured on.
    eviction, protection: the policy by name, and which tokens it never evicts.
    limit: what the budgets must not pass.
    most: trials, unless until nothing is left to try.
    restart: begin anew, whatever is in the folder.
    """

    source: ModelSource
    folder: Path
    sequences: Sequences
    eviction: str
    protection: dict[str, int]
    limit: Limit
    most: int | None
    restart: bool


def _run(plan: SearchPlan) -> SearchResult:
    name, folder, begun = plan.source.name, plan.folder, time.perf_counter()
    if not folder.is_dir():
        raise UserError(
            f"model must be a folder, as budgets.json is written into it, got {name!r}; "
            f"heedful convert {name} OUT --mechanism standard makes one"
        )
    model = plan.source.open(budgets=False, convert=False)
    if model.config.is_encoder_decoder:
        raise UserError(
            f"model {name!r} has an encoder, and budgets are searched for decoders alone; "
            "give heedful generate a number of tokens with --budget"
        )
    if not isinstance(model, ConvertedModel):  # layers beside its own, for policies to check
        replace_attention(model, "standard", attends=False)
    rows = plan.sequences.read(plan.source, model)
    policy, start = _start(plan.eviction, plan.protection, plan.sequences.length, model)
    least, tokens = least_budget(policy, model), plan.limit.tokens
    if tokens is not None and tokens < least:
        raise UserError(
            f"tokens must be at least the {least} that every budget holds, got {tokens}; give "
            "more, or protect fewer with --sinks and --recent"
        )
    reference = None
    if plan.limit.reference is not None:
        reference = _reference(plan.limit.reference, plan.sequences, rows, name)
    with only_writer(folder):
        identity = {
            "policy": {"kind": type(policy).__name__, **asdict(policy)},
            "loss": plan.limit.loss if reference is None and tokens is None else None,
            "mean_tokens": tokens,
            "dtype": plan.source.dtype,
            "length": plan.sequences.length,
            "rows": plan.sequences.count,
            "tokens": hashlib.sha256(torch.stack(rows).numpy().tobytes()).hexdigest()[:16],
            "model": model_identity(model),
            "reference": None if reference is None else model_identity(reference),
        }
        log = SearchLog(folder / LOG, identity, plan.restart)
        bar_format = BAR if plan.most else OPEN_BAR
        with tqdm(unit=" trials", total=plan.most, bar_format=bar_format) as bar:
            pieces = max(1, plan.sequences.length // PIECES)
            rough = Measure(model, rows, policy, log, bar, pieces)
            # Only a limit must hold token by token.
            exact = rough if tokens else Measure(model, rows, policy, log, bar)
            whole, limit = exact(start), None
            if not math.isfinite(whole):
                raise UserError(f"model {name!r} has a perplexity of {whole} on the data")
            if tokens is not None:
                budgets, ended = _spread(start, least, tokens, rough, plan.most)
            else:
                limit = whole * (1 + plan.limit.loss / 100)
                if reference is not None:
                    limit = log.once("reference", lambda: perplexity(reference, rows))
                    _check_reference(plan.limit.reference.name, whole, limit)
                    limit = max(limit, whole)  # the same model may differ by rounding
                rough.limit = exact.limit = limit
                reference = None
                budgets, ended = _shrunk(start, least, limit, rough, plan.most)
                if pieces > 1:
                    budgets = raised(budgets, start, limit, exact)
        eviction = replace(policy, tokens=budgets)
        result = SearchResult(
            path=folder / NAME, eviction=eviction, start=start,
            perplexity=exact(budgets), whole=whole, limit=limit,
            rows=plan.sequences.count, length=plan.sequences.length,
            trials=len(log.perplexities), measured=log.measured, ended=ended,
            seconds=time.perf_counter() - begun,
        )  # fmt: skip
        about = history(result, plan.sequences.data, str(plan.limit))
        write_budgets(result.path, eviction, model, about)
    return result


def _shrunk(
    start: Budgets, least: int, limit: float, measure: "Measure", most: int | None
) -> tuple[Budgets, bool]:
    """The smallest budgets in so many trials, and whether the search came to its end.

    Trials that are left go to the paper's own search, one layer at a time from the full cache: in
    small models it sometimes ends lower.
    """
    best, ended = start, False
    length, trials = measure.rows.ids.shape[1], Trials(measure, most, start)

    def cost(trial: Budgets) -> float:
        nonlocal best
        value = trials(trial)
        if value <= limit and total(trial) < total(best):
            best = trial
        return value

    def settle() -> None:
        """Until no layer of the best budgets can give up one more token."""
        before = math.inf
        while total(best) < before:
            before = total(best)
            greedy(best, least, 1, limit, cost)

    with suppress(NoTrialsLeft):
        shrink(start, least, length, limit, cost)
        settle()
        ended = True
        greedy(start, least, max(1, length // 8), limit, cost)
        settle()
    return best, ended


def _spread(
    start: Budgets, least: int, tokens: int, measure: "Measure", most: int | None
) -> tuple[Budgets, bool]:
    """The best budgets of so many tokens on average in so many trials, and whether it ended."""
    best, trials = common_level(start, tokens), Trials(measure, most, start)
    with suppress(NoTrialsLeft):
        for budgets in spread(best, start, least, trials):
            best = budgets
        return best, True
    return best, False


class Trials:
    """A measure that raises `NoTrialsLeft` once so many budgets were tried, `start` included."""

    def __init__(self, measure: "Measure", most: int | None, start: Budgets) -> None:
        self.measure, self.most, self.tried = measure, most, {start}
        measure.bar.update()

    def __call__(self, trial: Budgets) -> float:
        if trial not in self.tried and self.most is not None and len(self.tried) >= self.most:
            raise NoTrialsLeft
        value = self.measure(trial)
        self.measure.bar.update(trial not in self.tried)
        self.tried.add(trial)
        return value


class NoTrialsLeft(Exception):
    """All trials were used up."""


class Measure:
    """Perplexity of budgets, from the log where it is known.

    step: tokens that a cache gets at a time.
    limit: perplexity that budgets must not pass, once it is known; none where the sum is given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        policy: Eviction,
        log: "SearchLog",
        bar: tqdm,
        step: int = 1,
    ) -> None:
        self.model, self.rows, self.policy, self.log, self.bar = model, rows, policy, log, bar
        self.step = step
        self.limit: float | None = None

    def __call__(self, trial: Budgets) -> float:
        value = self.log.perplexities.get((trial, self.step))
        if value is None:
            policy = replace(self.policy, tokens=trial)
            value = perplexity(self.model, self.rows, policy, self.step)
            self.log.add(trial, self.step, value)
        limit = "" if self.limit is None else f" (limit {self.limit:.4f})"
        part = share(trial, self.policy.tokens, self.rows.ids.shape[1])
        self.bar.set_description_str(f"perplexity {value:.4f}{limit} with {part:.1%} of the tokens")
        return value


class SearchLog:
    """The trials of a search as JSON lines; the first line says which search it is.

    Arguments:
        path: the file.
        identity: what makes it this search, as JSON.
        restart: begin anew, whatever is there.

    Raises:
        ValueError: the file is of another search, or damaged.
    """

    def __init__(self, path: Path, identity: dict, restart: bool) -> None:
        self.path = path
        self.perplexities: dict[tuple[Budgets, int], float] = {}  # by budgets and step
        self.others: dict[str, float] = {}
        self.measured = 0  # now
        identity = {"format": FORMAT, **json.loads(json.dumps(identity))}
        if restart or not path.exists():
            write_whole(path, json.dumps(identity) + "\n")
            return
        try:
            first, *lines = [line for _, line in read_each(path, json.loads, "a trial")]
            for line in lines:
                if "budgets" in line:
                    key = (tuple(line["budgets"]), int(line.get("step", 1)))
                    self.perplexities[key] = float(line["perplexity"])
                else:
                    self.others[line["name"]] = float(line["perplexity"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path} is damaged ({error!r}); add --restart to search from the beginning"
            ) from None
        if first.get("format") == 1:
            raise UserError(
                f"{path} was written by an older version, which did not note the adapter and the "
                "weights that its trials belong to; add --restart to search from the beginning"
            )
        if first != identity:
            raise UserError(
                f"{path} holds another search: {'; '.join(differences(first, identity))}; give the "
                "same options to go on there, or --restart to search from the beginning"
            )

    def add(self, budgets: Budgets, step: int, perplexity: float) -> None:
        """Write down one trial."""
        self.perplexities[budgets, step] = perplexity
        self.measured += 1
        steps = {} if step == 1 else {"step": step}
        self._log_trial({"budgets": budgets, **steps, "perplexity": perplexity})

    def once(self, name: str, measure: Callable[[], float]) -> float:
        """A perplexity of another kind, measured unless it is there."""
        if name not in self.others:
            self.others[name] = measure()
            self._log_trial({"name": name, "perplexity": self.others[name]})
        return self.others[name]

    def _log_trial(self, line: dict) -> None:
        append_line(self.path, json.dumps(line))


def _start(
    eviction: str, protection: dict[str, int], length: int, model: PreTrainedModel
) -> tuple[Eviction, Budgets]:
    """The policy, and the budgets that hold all that the queries of a sequence see."""
    policy = policy_named(eviction, model, length, **protection)
    if type(policy) not in POLICIES:
        raise UserError(
            f"eviction={eviction!r} is {type(policy).__name__} for this model, and "
            "budgets.json names policies of the library: take another, such as streaming-llm"
        )
    modules = attention_modules(model)
    cache = new_cache(model, eviction=False)
    windows = [layer.window for layer in cache.layers if isinstance(layer, CacheLayer)]
    start: list[int | None] = []
    reasons = []
    for module, window in zip(modules, windows, strict=True):
        try:
            check_policy(policy, module.heedful, length)
            start.append(length if window is None else min(length, window))
        except ValueError as error:
            reasons.append(error)
            start.append(None)
    if all(tokens is None for tokens in start):
        raise reasons[0]
    least = least_budget(policy, model)
    if all(tokens is None or tokens <= least for tokens in start):
        raise UserError(
            f"length must be more than the {least} tokens that every budget holds, got "
            f"{length}; give longer sequences, or protect fewer tokens"
        )
    start = [n if n is None else max(n, least) for n in start]
    return replace(policy, tokens=tuple(start)), tuple(start)


def least_budget(policy: Eviction, model: PreTrainedModel) -> int:
    """Least size of every budget: protected tokens, and the next one."""
    first = any(module.heedful.keeps_first for module in attention_modules(model))
    return max(policy.sinks, int(first)) + policy.recent + 1


def history(result: SearchResult, data: tuple[str, ...], limit: str) -> dict:
    """History of a search for budgets, for readers of their file."""
    return {
        "perplexity": {"whole": result.whole, "found": result.perplexity, "limit": result.limit},
        "limit": limit,
        "share_of_tokens_kept": result.share_of_tokens,
        "length": result.length,
        "rows": result.rows,
        "data": list(data),
        "trials": result.trials,
        "environment": environment(),
    }


def _reference(
    reference: ModelSource, sequences: Sequences, rows: Rows, name: str
) -> PreTrainedModel:
    """The model whose perplexity is the limit; raises unless it reads the same tokens."""
    model = reference.open(budgets=False, convert=False)
    if not torch.equal(sequences.read(reference, model).ids, rows.ids):
        raise UserError(
            f"reference {reference.name!r} splits the data into other tokens than {name!r}, so "
            "that perplexities per token do not compare; take a reference with the same "
            "tokenizer, or --loss"
        )
    return model


def _check_reference(name: str, whole: float, limit: float) -> None:
    if whole > limit * (1 + 1e-6):
        raise UserError(
            f"reference {name!r} has a perplexity of {limit:.4f}, and the model with its full "
            f"cache has {whole:.4f}: no budget can reach that; give --loss in place of --reference"
        )


def format_result(result: SearchResult) -> str:
    """A small table of what was found, and what to do with it."""
    budgets = result.eviction.budgets(len(result.start))
    lines = ["layer  tokens   share"]
    for index, tokens in enumerate(budgets):
        part = share((tokens,), (result.start[index],), result.length)
        own = "all" if tokens is None else tokens
        lines.append(f"{index:5}  {own:>6}  {part:6.1%}")
    limit = "" if result.limit is None else f", limit {result.limit:.4f}"
    lines += [
        f"  sum  {sum(n or result.length for n in budgets):6}  {result.share_of_tokens:6.1%}",
        "",
        f"{type(result.eviction).__name__}: perplexity {result.perplexity:.4f}, with the full "
        f"cache {result.whole:.4f}{limit} ({result.rows} sequences)",
        f"{result.trials} trials, {result.measured} of them now, in {result.seconds:.0f} s; "
        + (
            "nothing is left to try"
            if result.ended
            else "a higher --trials goes on (0: until nothing is left to try)"
        ),
        f"written: {result.path}; heedful.load, heedful.new_cache and heedful generate use it",
    ]
    return "\n".join(lines)
