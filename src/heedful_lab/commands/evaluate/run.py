"""Models answer the same questions side by side; every answer is kept as soon as it is there."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from heedful.checks import UserError
from heedful.eviction import Eviction
from heedful.files import only_writer
from heedful.hf import conversion_of
from heedful.hf.budgets import NAME
from heedful.hf.cache.new import new_cache
from heedful.hf.converted_model import ConvertedModel
from heedful.hf.stock import stock_class
from heedful_lab.commands.evaluate.answers import Answers, LanguageModel
from heedful_lab.commands.evaluate.harness import (
    Harness,
    HarnessTask,
    harness_names,
    run_task,
)
from heedful_lab.commands.evaluate.items import Item, check_fits, finite, items, texts
from heedful_lab.commands.evaluate.options import OWN, ROWS, Evaluation
from heedful_lab.commands.evaluate.store import WHOLE, AnswerStore
from heedful_lab.commands.models import (
    ModelSource,
    configuration_of,
    convert_if_needed,
    device_in_words,
    tokenizer_named,
)
from heedful_lab.commands.options import CacheDtype
from heedful_lab.commands.policies import cache_dtype_of, policy_named, spelled
from heedful_lab.records import Sample
from heedful_lab.rivals.models import has_cache


class EvaluationPlan(NamedTuple):
    """A model that is not open yet, and all its items."""

    source: ModelSource
    tokenizer: object
    items: list[Item]

    @property
    def name(self) -> str:
        return self.source.name


class Caches(NamedTuple):
    """Caches with which every model is evaluated; fields are those of `Evaluation`."""

    budget: tuple[str, ...]
    eviction: str
    cache_dtype: CacheDtype
    seed: int

    @property
    def count(self) -> int:
        """Number of caches, the full one included."""
        return 1 + (self.cache_dtype != "auto") + len(self.budget)

    def of(self, model: PreTrainedModel, plan: EvaluationPlan) -> dict[str, LanguageModel]:
        """A model with its full cache, then with that quantized, then with those of a budget.

        Raises:
            ValueError: the model cannot have one of them.
        """
        dtype = cache_dtype_of(self.cache_dtype)
        policies: dict[str, Eviction | bool] = {} if dtype is None else {self.cache_dtype: False}
        for word in self.budget:
            if word == OWN:
                name, policy = OWN, conversion_of(model).eviction
            else:
                policy = policy_named(self.eviction, model, int(word), seed=self.seed)
                name = f"{spelled(type(policy).__name__)} {word}"
            policies[name if dtype is None else f"{name}, {self.cache_dtype}"] = policy
        convert_if_needed(model, False, *policies.values())
        for policy in (*([False] if has_cache(model) else []), *policies.values()):
            try:
                new_cache(model, policy, dtype=dtype)
            except ValueError as error:
                raise UserError(f"model {plan.name!r}: {error}") from None
        caches = {WHOLE: LanguageModel(model, plan.tokenizer)}
        for name, policy in policies.items():
            caches[name] = LanguageModel(model, plan.tokenizer, policy, dtype=dtype)
        return caches


class EvaluationResult(NamedTuple):
    """The requested answers, in the order of models, caches and tasks.

    samples: one for each model, cache and sample.
    harness: the results of lm-evaluation-harness, by model, task and measure.
    about: configuration and environment, as in evaluation.json.
    """

    samples: list[Sample]
    harness: dict[str, dict[str, dict[str, float]]]
    about: dict


def evaluate(
    options: Evaluation, announce: Callable[[str], None] = lambda text: None
) -> EvaluationResult:
    """Ask models as `heedful eval` does, and go on where it was stopped.

    Everything that can be checked is checked before the first model is opened.

    Arguments:
        options: models, tasks and caches.
        announce: is told in one sentence how many answers there will be, and in another, after a
            few of each kind, how long they take.

    Raises:
        ValueError: an option cannot be read, or does not fit a model; or the folder holds
            another evaluation, or is damaged.
    """
    place, plans = device_in_words(options.device), prepare(options)
    names = harness_names(options.tasks, options.lm_eval_tasks)
    harness = Harness(names, options.lm_eval_tasks, options.samples, options.seed, options.batch)
    kinds = Caches(options.budget, options.eviction, options.cache_dtype, options.seed)
    out = Path(options.out)
    with only_writer(out):
        store = AnswerStore(out, vars(options), restart=options.restart)
        announce(f"{_amount(plans, kinds.count, harness)}\ndevice: {place}")
        samples = _answers(plans, kinds, harness, options.batch, store, announce)
    results = {
        plan.name: {
            k: v for name in names for k, v in store.harness(plan.name, name).results.items()
        }
        for plan in plans
        if names
    }
    return EvaluationResult(samples, results, store.about)


def _answers(
    plans: list[EvaluationPlan],
    kinds: Caches,
    harness: Harness,
    batch: int,
    store: AnswerStore,
    announce: Callable[[str], None],
) -> list[Sample]:
    """All answers, a model at a time."""
    samples: list[Sample] = []
    total = sum(len(plan.items) for plan in plans) * kinds.count
    with tqdm(total=total, unit=" samples", disable=None) as bar:
        for plan in plans:
            model = plan.source.open(budgets=OWN in kinds.budget, convert=False)
            caches = kinds.of(model, plan)
            store.register(plan.source, model, caches)
            if plan is plans[0] and (seconds := _seconds(caches, plan, store, batch)):
                announce(_duration(seconds, len(plans), bool(harness.names)))
            for cache, answers in caches.items():
                bar.set_description_str(f"{Path(plan.name).name} {cache}".strip())
                samples += ask(answers, plan, cache, store, batch, bar)
            samples += ask_harness(harness, plan, caches, store)
            del model, caches, answers  # before the next one takes its memory
    return samples


def _amount(plans: list[EvaluationPlan], caches: int, harness: Harness) -> str:
    tasks = Counter(item.task for item in plans[0].items)
    total = sum(len(plan.items) for plan in plans) * caches
    parts = [f"{total:,} samples"] if total else []
    if total:
        parts[0] += ": " + ", ".join(f"{count:,} of {task}" for task, count in tasks.items())
    if harness.names:
        words = ", ".join(harness.names)
        parts.append(f"at most {harness.samples:,} of lm-evaluation-harness's {words}")
    models = len(plans)
    return (
        f"{' and '.join(parts)}, for {models} model{'s' * (models > 1)} with "
        f"{caches} cache{'s' * (caches > 1)}; --samples N changes how many"
    )


def _seconds(
    caches: dict[str, Answers], plan: EvaluationPlan, store: AnswerStore, batch: int
) -> float:
    """Estimate a model's remaining seconds from the shortest batches, in proportion to tokens."""
    seconds = 0.0
    for cache, answers in caches.items():
        for task in dict.fromkeys(item.task for item in plan.items):
            waiting = [item for item in plan.items if item.task == task]
            waiting = [x for x in waiting if store.sample_of(plan.name, cache, _name(x)) is None]
            first = sorted(waiting, key=_tokens)[:batch]
            start = time.perf_counter()
            ask(answers, plan._replace(items=first), cache, store, batch)
            duration = time.perf_counter() - start
            if first:
                seconds += duration * (sum(map(_tokens, waiting)) / sum(map(_tokens, first)) - 1)
    return seconds


def _duration(seconds: float, models: int, harness: bool) -> str:
    seconds *= models
    length = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    what = "Those that are not lm-evaluation-harness's" if harness else "They"
    like = " if all models are as fast as the first" if models > 1 else ""
    return f"{what} take about {length} from now on{like}"


def _tokens(item: Item) -> int:
    return len(item.ids) + item.room


def prepare(options: Evaluation) -> list[EvaluationPlan]:
    """Tokenizers and questions of all models, checked against what the models can read.

    Raises:
        ValueError: a model cannot be opened, is not a causal language model, or cannot read an
            item.
    """
    plans: list[EvaluationPlan] = []
    questions, texts_by_task = options.questions(), None
    harness_names(options.tasks, options.lm_eval_tasks)  # raises
    for name in options.models:
        config, _ = configuration_of(name)
        if not _is_causal(config):
            raise UserError(
                f"model {name!r} is a {type(config).__name__.removesuffix('Config')}, which is not "
                "a causal language model; only those can be evaluated"
            )
        if OWN in options.budget and not (Path(options.adapter or name) / NAME).is_file():
            raise UserError(
                f"budget 'own': no {NAME} stands beside {name!r}; search one with `heedful budget "
                f"{name} --data FILE`, or give a number"
            )
        part = config.get_text_config(decoder=True)
        reads = any(task not in ROWS for task in options.tasks)
        tokenizer = tokenizer_named(options.tokenizer, name, part.vocab_size) if reads else None
        if texts_by_task is None:
            texts_by_task = texts(questions, lambda text, by=tokenizer: len(by.encode(text)))
        model_items = items(questions, texts_by_task, tokenizer, part.vocab_size, name)
        check_fits(model_items, getattr(part, "max_position_embeddings", None), name)
        source = ModelSource(
            name, options.device, options.dtype, options.adapter, options.tokenizer
        )
        plans.append(EvaluationPlan(source, tokenizer, model_items))
    return plans


def _is_causal(config: PreTrainedConfig) -> bool:
    """Encoders such as BERT can be built as decoders, and say so then."""
    encoder = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    decoder = not encoder or getattr(config, "is_decoder", False)
    return decoder and stock_class(config) is AutoModelForCausalLM


def ask(
    answers: Answers,
    plan: EvaluationPlan,
    cache: str,
    store: AnswerStore,
    batch: int,
    bar: tqdm | None = None,
) -> list[Sample]:
    """The answers to all items, in their order; those that are kept are not computed again.

    Arguments:
        answers: the model.
        plan: the model's name and its items.
        cache: what its cache may hold, as samples call it.
        store: where answers are kept.
        batch: how many items are in a batch, at most.
        bar: moved by each answer.
    """
    by_item = {item: store.sample_of(plan.name, cache, item) for item in map(_name, plan.items)}
    identity = store.identity(plan.name, cache)
    for item in plan.items:
        if (sample := by_item[_name(item)]) is None:
            continue
        if sample.identity != identity:
            raise UserError(
                f"{store.path} holds answers of {plan.name!r} {cache or 'with its full cache'} "
                "with other weights, another adapter, other budgets or another dtype; choose "
                "another --out, or add --restart"
            )
        if sample.digest != item.digest:
            raise UserError(
                f"{store.path} holds an answer of {plan.name!r} to another {item.task} "
                f"{item.key!r}: text, seed or tokenizer of the first model has changed; choose "
                "another --out, or add --restart"
            )
    waiting = [item for item in plan.items if by_item[_name(item)] is None]
    if bar is not None:
        bar.update(len(plan.items) - len(waiting))
    # Alike in length, the longest first: if memory does not suffice, it shows at once.
    waiting.sort(key=lambda item: (item.task, item.room, -len(item.ids)))
    for several in _batches(waiting, batch):
        rows = [item.ids for item in several]
        replies = answers.write(rows, several[0].room) if several[0].room else answers.read(rows)
        samples = []
        for item, answer in zip(several, replies, strict=True):
            values, reply, expected, curve = item.grade(answer)
            sample = Sample(
                plan.name, cache, item.task, item.key, item.digest, item.cell, finite(values),
                reply, expected, curve, identity,
            )  # fmt: skip
            samples.append(sample)
            by_item[_name(item)] = sample
        store.add(samples)
        if bar is not None:
            bar.update(len(samples))
    return [by_item[_name(item)] for item in plan.items]


def _name(item: Item) -> tuple[str, str]:
    return item.task, item.key


def _batches(waiting: Sequence[Item], batch: int) -> Iterator[list[Item]]:
    """Runs of neighbours with one task and one length of reply, at most this many each."""
    several: list[Item] = []
    for item in waiting:
        if several and (
            len(several) == batch or (several[0].task, several[0].room) != (item.task, item.room)
        ):
            yield several
            several = []
        several.append(item)
    if several:
        yield several


def ask_harness(
    harness: Harness,
    plan: EvaluationPlan,
    caches: dict[str, LanguageModel],
    store: AnswerStore,
) -> list[Sample]:
    """Tasks of lm-evaluation-harness, those that are kept included.

    Under a budget whole sequences are read as they would come out token by token.
    """
    samples = []
    for cache, answers in caches.items():
        if isinstance(answers.model, ConvertedModel):  # the harness makes caches of its own
            conversion_of(answers.model).eviction = None
        for name in harness.names:
            if store.harness(plan.name, name, cache) is None:
                with answers.reading():
                    task = HarnessTask(name, plan.name, cache)
                    result = run_task(harness, task, answers.model, plan.tokenizer)
                store.keep_harness(plan.name, name, result, cache)
            samples += store.harness(plan.name, name, cache).samples
    return samples
