"""Scores of trained models under small KV caches: every policy at every budget."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from heedful.eviction import H2O, TOVA, Eviction, MostHidden, Random, SnapKV, StreamingLLM
from heedful.hf.cache.new import attention_modules, new_cache
from heedful.hf.cache.rows_under_budget import evicting
from heedful_lab.commands.compare.options import LEAST_TOKENS
from heedful_lab.commands.compare.scoring import score
from heedful_lab.commands.compare.scratch import Hyperparameters
from heedful_lab.records import WHOLE, UnderBudget
from heedful_lab.records.environment import environment
from heedful_lab.tasks import Task

POLICIES = (MostHidden, StreamingLLM, TOVA, H2O, SnapKV, Random)
"""Under the same protection `Window` is `StreamingLLM`, so it is not here."""
ROWS = 64  # sequences that are scored at once, and at most 4 times as many in all


def plans(model: PreTrainedModel, task: Task, budgets: tuple[float, ...]) -> Iterator[Eviction]:
    """Every policy that supports the model at every budget; first one that keeps everything.

    A budget of at most 1 is a share of a sequence, raised to `LEAST_TOKENS` if it is less. The same
    tokens are protected by every policy. No policy supports a convolution over keys.
    """
    if not evictable(model):
        return
    yield StreamingLLM(tokens=max(task.length, LEAST_TOKENS))
    masks = all(module.heedful.running == "F" for module in attention_modules(model))
    sizes = {round(x * task.length) if x <= 1 else int(x) for x in budgets}
    for tokens in sorted({max(n, LEAST_TOKENS) for n in sizes if n < task.length}, reverse=True):
        for policy in POLICIES:
            if masks or "F" not in policy.needs:
                yield policy(tokens=tokens)


def evictable(model: PreTrainedModel) -> bool:
    """Test whether tokens can be evicted from the model's caches.

    A convolution over keys would see others, summaries stand for evicted tokens, and some baselines
    have no cache.
    """
    layers = [module.heedful for module in attention_modules(model)]
    kernels = (x.tails.get("queries") and not x.tails.get("keys") for x in layers)
    bound = (*kernels, *(x.summarises or not x.caches for x in layers))
    return not any(bound)


def under_budget(
    model: PreTrainedModel, task: Task, eviction: Eviction, hyperparameters: Hyperparameters
) -> tuple[dict[str, float], float, int]:
    """Scores by split, peak bytes of one sequence, and how many were scored."""
    evaluation = replace(
        hyperparameters, batch=ROWS, held_out=min(hyperparameters.held_out, 4 * ROWS)
    )
    final, rows = {}, 0
    with torch.no_grad(), evicting(model, eviction) as peaks:
        for name, other in task.under_budgets().items():
            final[name] = score(model, other, evaluation)[task.metric]
            rows = len(other.held_out(evaluation.held_out).input_ids)
    return final, peaks.nbytes, rows


@torch.no_grad()
def bf16_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of a full bfloat16 cache of so many tokens, windows and reserve left out."""
    cache = new_cache(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, cache=cache)
    return cache.bf16_nbytes * length


def policy_name(eviction: Eviction, length: int) -> str:
    """Name of a policy in a record."""
    return WHOLE if eviction.tokens >= length else type(eviction).__name__


def scored_as(
    model: PreTrainedModel,
    key: tuple[str, str, int],
    task: Task,
    eviction: Eviction,
    scored: tuple[dict, float, int],
) -> UnderBudget:
    """The record of one score."""
    final, peak, rows = scored
    return UnderBudget(
        *key,
        policy=policy_name(eviction, task.length),
        tokens=min(eviction.tokens, task.length),
        length=task.length,
        metric=task.metric,
        final=final,
        peak_bytes=peak,
        bf16_bytes=bf16_bytes(model, task.length),
        rows=rows,
        environment=environment(),
    )
