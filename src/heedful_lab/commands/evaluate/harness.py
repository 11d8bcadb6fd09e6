"""Tasks of lm-evaluation-harness on our models."""

import logging
import math
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.data import ByteTokenizer
from heedful_lab.commands.evaluate.numbers import SHARES
from heedful_lab.commands.evaluate.on_disk import ON_DISK, task_files
from heedful_lab.commands.evaluate.options import LM_EVAL
from heedful_lab.commands.models import longest
from heedful_lab.records import Sample


class Harness(NamedTuple):
    """Tasks of lm-evaluation-harness; fields are those of `Evaluation`."""

    names: list[str]
    folders: tuple[str, ...]
    samples: int
    seed: int
    batch: int


def harness_names(tasks: Sequence[str], folders: tuple[str, ...]) -> list[str]:
    """The names behind `lm-eval:`, in order.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError: it has no task of a name.
    """
    words = [x.removeprefix(LM_EVAL) for x in tasks if x.startswith(LM_EVAL)]
    names = [name for word in words for name in word.split(",") if name]
    if not names:
        return []
    known = _manager(folders, tuple(names)).all_tasks
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UserError(
                f"tasks: lm-evaluation-harness has no task {name!r}{hint} (`lm_eval ls tasks` "
                "lists them; --lm-eval-tasks names a folder with more)"
            )
    return names


@lru_cache(maxsize=1)
def _manager(folders: tuple[str, ...], names: tuple[str, ...]):
    """Of the given folders alone if they hold all tasks: to list the harness's own takes long."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ImportError(
            f"tasks that begin with {LM_EVAL!r} need lm-evaluation-harness: pip install lm-eval"
        ) from None
    folders = tuple(task_files() if x == ON_DISK else x for x in folders)
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"lm_eval_tasks names {folder!r}, which is not a folder")
    if folders:
        own = TaskManager(include_path=list(folders), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=list(folders) or None)


def whole_inputs(model: PreTrainedModel, tokenizer, batch: int, cache: str = ""):
    """The harness's own `HFLM` of a model, but one that refuses what does not fit.

    It would cut the left of it, and score what is left.

    Arguments:
        model, tokenizer: of transformers.
        batch: requests per call, at most.
        cache: the name of a small cache, under which nothing is generated.

    Raises:
        ValueError: the tokenizer is not one of transformers.
    """
    from lm_eval.models.huggingface import HFLM

    if isinstance(tokenizer, ByteTokenizer):
        raise UserError(
            "lm-evaluation-harness needs a tokenizer of transformers, and 'bytes' is not one; "
            "save one with the model"
        )

    class WholeInputs(HFLM):
        def _loglikelihood_tokens(self, requests, *args, **options):
            for (context, _), before, after in requests:
                # The last token is only predicted.
                _check_fits(len(before) + len(after) - 1, 0, self.max_length, context)
            return super()._loglikelihood_tokens(requests, *args, **options)

        def generate_until(self, requests, *args, **options):
            if cache:
                raise UserError(
                    "tasks of lm-evaluation-harness that generate text run with the full cache "
                    f"alone, not with {cache!r}; leave --budget and --cache-dtype out, or take "
                    "needles"
                )
            for request in requests:
                context, arguments = request.args
                room = arguments.get("max_gen_toks", self.max_gen_toks)
                _check_fits(len(self.tok_encode(context)), room, self.max_length, context)
            return super().generate_until(requests, *args, **options)

    return WholeInputs(
        pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=longest(model)
    )


def _check_fits(tokens: int, room: int, most: int, context: str | None) -> None:
    if tokens + room > most:
        more = f" and {room} to write" if room else ""
        begin = " ".join((context or "").split())[:60]
        raise UserError(
            f"a request of lm-evaluation-harness has {tokens} tokens{more}, and the model has "
            f"positions for {most} ({begin!r}...); it would be cut on the left, so leave the task "
            "out, or take fewer examples or a model with more"
        )


class HarnessTask(NamedTuple):
    """A task or a group of the harness for one model and cache, as samples call them."""

    name: str
    model: str
    cache: str = ""


class HarnessResult(NamedTuple):
    """The harness's results for a task or a group.

    results: by task and measure, `_stderr` beside each.
    samples: what it graded, sample by sample.
    """

    results: dict[str, dict[str, float]]
    samples: list[Sample]


def run_task(
    harness: Harness, harness_task: HarnessTask, model: PreTrainedModel, tokenizer
) -> HarnessResult:
    """Ask a task or a group of the harness.

    Raises:
        ValueError: a request is longer than the model's positions, or the data cannot be loaded;
            or text is generated with a small cache.
    """
    import lm_eval

    logging.getLogger("lm_eval").setLevel(logging.WARNING)  # without its notes about itself
    output = lm_eval.simple_evaluate(
        whole_inputs(model, tokenizer, harness.batch, harness_task.cache),
        tasks=[harness_task.name],
        task_manager=_manager(harness.folders, tuple(harness.names)),
        limit=harness.samples,
        random_seed=harness.seed,
        numpy_random_seed=harness.seed,
        torch_random_seed=harness.seed,
        fewshot_random_seed=harness.seed,
    )
    results = {}
    for task, measures in output["results"].items():
        numbers = {
            key.removesuffix(",none"): float(value)
            for key, value in measures.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        numbers["samples"] = output["n-samples"].get(task, {}).get("effective", 0)
        results[task] = numbers
    samples = [
        _sample(harness_task, task, about)
        for task, several in output["samples"].items()
        for about in several
    ]
    return HarnessResult(results, [sample for sample in samples if sample.values])


def _sample(harness_task: HarnessTask, task: str, about: dict) -> Sample:
    """A graded sample: shares as they are, the likelihood behind a perplexity as nats."""
    values = {
        name: float(about[name])
        for name in SHARES
        if isinstance(about.get(name), int | float) and math.isfinite(about[name])
    }
    if isinstance(likelihood := about.get("perplexity"), float):
        values["nats"] = -likelihood
    digest = about["doc_hash"] + about["prompt_hash"]
    model, cache = harness_task.model, harness_task.cache
    return Sample(model, cache, f"{LM_EVAL}{task}", str(about["doc_id"]), digest, {}, values)
