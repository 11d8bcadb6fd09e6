"""Teach a trained model to hide tokens, and see how small its KV cache may be afterwards.

A model of `heedful compare` goes on training for some steps with the memory loss in a plain loop: a
standard one gets an extra selector, which changes nothing at first; a selective one keeps its own.
Scores under every policy and budget follow, as in `heedful compare --budgets`.

    python benchmarks/retrofit.py runs/study-text/models/text-standard-0 --task text --data books \
        --tokenizer bpe --length 768 --steps 45 --out benchmarks/results/retrofit-cpu.jsonl
"""

import argparse
import time
from pathlib import Path

import torch
from tqdm import tqdm

import heedful
from heedful.experiments.budgeted import plans, scored_as, under_budget
from heedful.experiments.scoring import score
from heedful.experiments.scratch import Budget
from heedful.nn import Selective
from heedful.records.budgeted import append_budgeted
from heedful.tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a model that heedful compare trained")
    parser.add_argument("--task", choices=("text", "recall"), default="text")
    parser.add_argument("--data", nargs="*", default=())
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--memory-loss", type=float, default=0.1)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.125, 0.0625, 0.03125])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not args.model.is_dir():
        raise SystemExit(f"model must be a folder of heedful compare, got {args.model}")
    task = TASKS[args.task].default(tuple(args.data)).cut(args.length, args.tokenizer)
    budget = Budget(args.steps, args.batch, held_out=task.recipe.held_out)
    torch.manual_seed(0)  # of an extra selector's start
    model = heedful.load(args.model)
    name = "selective"
    if not any(layer.keeps for layer in layers(model)):
        heedful.revert(model)
        heedful.convert(model, Selective(selector="extra"))
        name = "standard"
    name += (
        f" + {args.steps} steps with memory loss" if args.memory_loss else f" + {args.steps} steps"
    )
    split, judged = next(iter(task.evaluations().items()))
    print(f"before: {split} {score(model, judged, budget)}", flush=True)
    seconds = teach(model, task, args)
    print(f"after {seconds:.0f} s: {split} {score(model, judged, budget)}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    model.eval()
    for eviction in tqdm(list(plans(model, task, tuple(args.budgets)))):
        scored = under_budget(model, task, eviction, budget)
        line = scored_as((args.task, name, 0), task, eviction, scored)
        append_budgeted(args.out, line)
        print(
            f"{line.policy} {line.tokens}: {line.final}, {line.peak_bytes:,.0f} bytes", flush=True
        )


def layers(model: torch.nn.Module) -> list:
    return [m.heedful for m in model.modules() if hasattr(m, "heedful")]


def teach(model: torch.nn.Module, task, args: argparse.Namespace) -> float:
    """The plain loop: language modelling, and the memory loss beside it."""
    start = time.perf_counter()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.rate, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    memory = heedful.MemoryLoss(model) if args.memory_loss else None
    model.train()
    for step in tqdm(range(args.steps)):
        rows = task.batch(args.batch, 1, step)
        loss = model(input_ids=rows.input_ids, labels=rows.labels, use_cache=False).loss
        if memory is not None:
            loss = loss + args.memory_loss * memory()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if memory is not None:
        memory.remove()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
