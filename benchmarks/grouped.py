"""What grouping costs in quality: every grouping with every refinement beside its controls.

Small models are trained from scratch, all with the same rows and the same number of summaries: one
for every eight tokens, measured. Beside them stand full attention, a window of as many tokens as a
grouped query sees one by one, and groups that are plain means and weigh as much as one token.

    python benchmarks/grouped.py text --data books --seeds 3 --out runs/grouped.jsonl

A run that ended early goes on with the next model that is not in the file.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

import heedful
from heedful import Grouped
from heedful.experiments.scratch import Budget, Size
from heedful.experiments.train import train
from heedful.nn import Mechanism, Standard, to_json
from heedful.ops import Visibility
from heedful.ops.grouped.neighbourhood import score_pairs
from heedful.records.environment import environment
from heedful.tasks import TASKS, Task

SIZE, WINDOW = 8, 16
REFINES = ("mean", "weighted", "channel", "attention")


def mechanisms(closing: tuple[int, ...]) -> dict[str, Mechanism]:
    """By name. A sentence ends at a space or a line's end, between four and sixteen tokens."""
    sentence = {"closing": closing, "shortest": 5, "longest": 2 * SIZE}
    shapes = {
        "fixed": {},
        "sliding": {"size": 2 * SIZE, "stride": SIZE},
        "sentence": sentence,
        "slots": {"stride": 4},
    }
    found: dict[str, Mechanism] = {
        "full attention": Standard(),
        # As many tokens as the mean query of fixed groups sees one by one.
        "window alone": Standard(window=WINDOW + SIZE // 2),
        "fixed, mean, no size": Grouped(size=SIZE, window=WINDOW, refine="mean", size_bias="none"),
        "fixed, weighted, groups ask": Grouped(size=SIZE, window=WINDOW, queries="groups"),
        "fixed, weighted, zoom 2": Grouped(size=SIZE, window=WINDOW, zoom=2),
        "cif, weighted": Grouped("cif", size=SIZE, window=WINDOW, share=4),
        "boundary, weighted": Grouped("boundary", size=SIZE, window=WINDOW, share=4),
    }
    for name, options in shapes.items():
        for refine in REFINES:
            options = {"size": SIZE, "window": WINDOW} | options
            found[f"{name}, {refine}"] = Grouped(name, refine=refine, **options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("text", "copy", "selective-copy", "recall"))
    parser.add_argument("--data", nargs="*", default=())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="*", help="names of mechanisms; default all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    task = TASKS[args.task].default(tuple(args.data))
    recipe = task.recipe
    size = Size(recipe.hidden, recipe.layers, recipe.heads)
    budget = Budget(
        args.steps or recipe.steps,
        recipe.batch,
        recipe.learning_rate,
        evaluations=2,
        held_out=recipe.held_out,
    )
    found = mechanisms(closing_of(task))
    if unknown := set(args.only or ()) - set(found):
        raise SystemExit(f"--only must be of {', '.join(found)}, got {', '.join(sorted(unknown))}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = {(x["task"], x["name"], x["seed"], x["steps"]) for x in lines(args.out)}
    for seed in range(args.seeds):
        for name, mechanism in tqdm(found.items(), desc=f"seed {seed}"):
            if args.only and name not in args.only:
                continue
            if (args.task, name, seed, budget.steps) in known:
                continue
            print(name, flush=True)
            append(args.out, one(args.task, task, name, mechanism, size, budget, seed, args.out))


def one(
    kind: str, task: Task, name: str, mechanism: Mechanism, size: Size, budget: Budget, seed: int,
    out: Path,
) -> dict:  # fmt: skip
    """Train one model; what it scored, and what its attention took."""
    folder = out.parent / f".{out.stem}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    run = train(task, mechanism, size, budget, seed, folder)
    line = {
        "task": kind, "name": name, "seed": seed, "steps": budget.steps,
        "mechanism": to_json(mechanism), "metric": run.metric, "final": run.final,
        "parameters": run.parameters, "seconds": run.seconds,
        "peak_memory_mib": run.peak_memory_mib,
    }  # fmt: skip
    line |= taken(run.model, task, mechanism, budget)
    return line | {"environment": environment()}


@torch.no_grad()
def taken(model: torch.nn.Module, task: Task, mechanism: Mechanism, budget: Budget) -> dict:
    """Groups, score pairs per head and row, bytes of a cache, and the loss by position."""
    samples = task.held_out(16)
    model.eval()
    made = []
    layers = [m.heedful for m in model.modules() if hasattr(m, "heedful")]
    hooks = []
    if isinstance(mechanism, Grouped):
        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, args, kwargs: made.append((layer, args, kwargs)), with_kwargs=True
            )
            for layer in layers
        ]
    out = model(input_ids=samples.input_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    rows, tokens = samples.input_ids.shape
    logits = out.logits[:, :-1].flatten(0, 1).float()
    labels = samples.labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        logits, labels.flatten(), ignore_index=-100, reduction="none"
    ).view(labels.shape)
    counted = (labels != -100).sum(0)
    by_position = [
        (loss[:, at].sum() / counted[at].sum().clamp(min=1)).item()
        for at in torch.arange(tokens - 1).chunk(8)
    ]
    pairs, groups = [], []
    for layer, given, options in made:
        groups_made, _, _ = layer._made(*given[:2], options.get("visibility"), options["given"])
        groups.append(groups_made.there.expand(rows, -1).sum().item() / rows)
        pairs.append(
            score_pairs(
                groups_made, window=mechanism.window, zoom=mechanism.zoom,
                asking=mechanism.queries == "groups",
            ) / len(groups_made.start)
        )  # fmt: skip
    if not made:
        window = mechanism.window or tokens
        seen = Visibility(window=window).dense(tokens, tokens, torch.device("cpu"))
        pairs = [float(seen.sum())]
    cache = heedful.new_cache(model)
    model(input_ids=samples.input_ids, past_key_values=cache, use_cache=True)
    model(input_ids=samples.input_ids[:, :1], past_key_values=cache, use_cache=True)
    return {
        "groups": groups, "pairs": pairs, "cache_nbytes": cache.nbytes / rows,
        "whole_nbytes": cache.whole_nbytes / rows, "loss_by_position": by_position,
    }  # fmt: skip


def closing_of(task: Task) -> tuple[int, ...]:
    """The tokens after which a group may end: of text a space and a line's end."""
    found = []
    for token in range(task.vocab_size):
        shown = task.decode([token])
        if (shown and not shown.strip()) or shown in (".", ",", ";", "!", "?"):
            found.append(token)
    return tuple(found) or (0,)


def lines(path: Path) -> Iterator[dict]:
    """The lines of a results file, if it is there."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def append(path: Path, line: dict) -> None:
    """One line more, whole or not at all."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
