"""Score trained models under small KV caches: every policy, uniform budgets and searched ones.

The evaluation set is that of `heedful compare --budgets`, of `--rows` sequences. With
`--by-layer` budgets per layer are searched greedily under MostHidden, as `heedful budget` does for
text: on other sequences than those that are scored, until no layer can give up a token without
losing more than that.

    python -m benchmarks.small_caches.run selective=runs/recall-selective --task recall \
        --budgets 0.5 0.25 --by-layer 0.01 --out runs/small-caches.jsonl

What is in the file already is not scored again.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.parts import add_task_options, command_line, task_of
from heedful.eviction import Eviction, MostHidden
from heedful.hf.cache.new import attention_modules
from heedful.hf.cache.rows_under_budget import evicting
from heedful_lab.commands.budget.shrink import greedy
from heedful_lab.commands.compare.options import LEAST_TOKENS
from heedful_lab.commands.compare.scoring import score, score_rows
from heedful_lab.commands.compare.scratch import Hyperparameters
from heedful_lab.commands.compare.small_caches import bf16_bytes, plans, policy_name, scored_as
from heedful_lab.records import UnderBudget, append
from heedful_lab.records.environment import environment
from heedful_lab.rivals.models import load
from heedful_lab.tasks import Task

SEARCHED_ON = 2**20  # a training step that no run comes to: sequences for the search


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+", help="NAME=FOLDER of trained models")
    add_task_options(parser, "recall")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--policies", nargs="+", help="names of policies; default all")
    parser.add_argument("--rows", type=int, default=256, help="evaluation sequences")
    parser.add_argument("--batch", type=int, default=32, help="sequences that are scored at once")
    parser.add_argument("--by-layer", type=float, help="search: answers or perplexity to lose")
    args = parser.parse_args()
    task = task_of(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for word in args.models:
        name, _, folder = word.partition("=")
        model = load(folder, budgets=False, convert=True).eval()
        for eviction in tqdm(list(plans(model, task, tuple(args.budgets))), desc=name):
            policy = policy_name(eviction, task.length)
            if policy not in ("whole", *(args.policies or (policy,))):
                continue
            key = (args.task, name, 0, policy, min(eviction.tokens, task.length), task.length)
            if key in recorded_keys(args.out):
                continue
            result = scored(model, task, eviction, args)
            note(args.out, scored_as(model, key[:3], task, eviction, result))
        results = {(x[1], x[5]) for x in recorded_keys(args.out) if x[3].startswith("searched")}
        masks = all(m.heedful.running == "F" for m in attention_modules(model))
        if args.by_layer is not None and masks and (name, task.length) not in results:
            searched(model, task, name, args)


def recorded_keys(path: Path) -> set[tuple]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(*line.key, line.length) for line in map(UnderBudget.from_json, lines)}


def note(path: Path, line: UnderBudget) -> None:
    append(path, line)
    print(f"{line.mechanism}, {line.policy} {line.tokens}: {line.final}, {line.peak_bytes:,.0f}")


def scored(
    model: PreTrainedModel, task: Task, eviction: Eviction, args: argparse.Namespace
) -> tuple[dict[str, float], float, int]:
    """Scores by split, peak bytes of one sequence, and how many were scored."""
    hyperparameters, final, rows = Hyperparameters(batch=args.batch, held_out=args.rows), {}, 0
    with torch.no_grad(), evicting(model, eviction) as peaks:
        for split, other in task.under_budgets().items():
            final[split] = score(model, other, hyperparameters)[task.metric]
            rows = len(other.held_out(args.rows).input_ids)
    return final, peaks.nbytes, rows


def searched(model: PreTrainedModel, task: Task, name: str, args: argparse.Namespace) -> None:
    """Budgets per layer under MostHidden on sequences of their own, and what they are worth."""
    start = (task.length,) * model.config.num_hidden_layers
    splits, begun, tried = task.under_budgets(), time.perf_counter(), {}
    rows = {split: other.batch(args.batch, 1, SEARCHED_ON) for split, other in splits.items()}

    def loss(budgets: tuple[int, ...]) -> float:
        """The worst split's, above that of the full cache; of perplexity a share of it."""
        if budgets not in tried:
            with torch.no_grad(), evicting(model, MostHidden(tokens=budgets)):
                tried[budgets] = {
                    split: score_rows(model, other, rows[split], args.batch)[task.metric]
                    for split, other in splits.items()
                }
        whole = tried[start] if start in tried else tried[budgets]
        losses = tried[budgets]
        if task.metric == "perplexity":
            return max(losses[split] / whole[split] - 1 for split in losses)
        return max(losses[split] - whole[split] for split in losses)

    loss(start)
    budgets = greedy(start, LEAST_TOKENS, task.length // 8, args.by_layer, loss)
    eviction = replace(MostHidden(tokens=task.length), tokens=budgets)
    final, peak, count = scored(model, task, eviction, args)
    note(
        args.out,
        UnderBudget(
            args.task, name, 0, f"searched {'/'.join(map(str, budgets))}",
            round(sum(budgets) / len(budgets)), task.length, task.metric, final, peak,
            bf16_bytes(model, task.length), count, environment(),
        ),
    )  # fmt: skip
    print(f"{len(tried)} trials in {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
