"""Cost of grouping in quality: every grouping with every refinement beside its controls.

Small models are trained, all with the same sequences and the same number of summaries: one for
every eight tokens, measured. Beside them stand full attention, a window of as many tokens as a
grouped query sees one by one, and groups that are plain means and weigh as much as one token. Tasks
with a source and a target have encoder-decoders and fewer mechanisms. What is not learnt from
scratch at this size can begin with the weights of a model that has learnt it (`--start`).

    python -m benchmarks.grouped.run text --seeds 3 --out runs/grouped-text.jsonl
    python -m benchmarks.grouped.run recall --start runs/recall-standard --steps 400 --seeds 3 \
        --out runs/grouped-recall.jsonl
    python -m benchmarks.grouped.run translate --seeds 3 --out runs/grouped-pairs.jsonl

A run that ended early goes on with the next model that is not in the file.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

import heedful
from benchmarks.parts import command_line, read_partial
from heedful import Grouped
from heedful.files import append_line
from heedful.nn import MechanismConfig, Selective, Standard, to_json
from heedful.ops import Visibility
from heedful.ops.grouped.neighbourhood import score_pairs
from heedful_lab.commands.compare.one_model import train
from heedful_lab.commands.compare.scratch import Hyperparameters, Size
from heedful_lab.records.environment import environment
from heedful_lab.tasks import TASKS, Task, token_losses
from heedful_lab.tasks.samples import IGNORE

SIZE, WINDOW = 8, 16
ROWS = ("text", "copy", "selective-copy", "recall")
PAIRS = ("translate", "summarise", "spans")
REFINES = ("mean", "weighted", "attention")


def mechanisms(task: Task) -> dict[str, MechanismConfig]:
    """By name, for a task of sequences; sentences have four to sixteen tokens."""
    sentence = {"closing": closing_of(task), "shortest": 5, "longest": 2 * SIZE}
    shapes = {
        "fixed": {},
        "sliding": {"size": 2 * SIZE, "stride": SIZE},
        "sentence": sentence,
    }
    by_name: dict[str, MechanismConfig] = {
        "full attention": Standard(),
        # As many tokens as the mean query of fixed groups sees one by one.
        "window alone": Standard(window=WINDOW + SIZE // 2),
        "fixed, mean, no size": Grouped(size=SIZE, window=WINDOW, refine="mean", size_bias="none"),
        "fixed, weighted, groups ask": Grouped(size=SIZE, window=WINDOW, queries="groups"),
        "cif, weighted": Grouped("cif", size=SIZE, window=WINDOW, share=4),
    }
    for name, options in shapes.items():
        for refine in REFINES:
            options = {"size": SIZE, "window": WINDOW} | options
            by_name[f"{name}, {refine}"] = Grouped(name, refine=refine, **options)
    return by_name


def paired_mechanisms(task: Task, kind: str) -> dict[str, MechanismConfig]:
    """By name, for a source and a target; groups in every role, windows in self-attention."""
    if kind == "spans":
        return {"full attention": Standard(), "selective in the decoder": Selective()}
    recipe = task.recipe.changes["grouped"]
    return {
        "full attention": Standard(),
        "window alone": Standard(window=recipe["window"] + recipe["size"] // 2),
        "fixed, mean, no size": Grouped(**recipe, refine="mean", size_bias="none"),
        "cif, weighted": Grouped("cif", **recipe, share=task.recipe.layers),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("task", choices=(*ROWS, *PAIRS))
    parser.add_argument("--data", nargs="+", default=())
    parser.add_argument("--start", type=Path, help="folder of a trained model to begin with")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="+", help="names of mechanisms; default all")
    args = parser.parse_args()
    task = TASKS[args.task].default(tuple(args.data))
    hyperparameters = replace(hyperparameters_of(task), steps=args.steps or task.recipe.steps)
    by_name = mechanisms(task) if args.task in ROWS else paired_mechanisms(task, args.task)
    by_name = {name: by_name[name] for name in args.only or by_name}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    start = args.start and args.start.name
    recorded = {
        (x["task"], x["name"], x["seed"], x["steps"], x.get("start"))
        for x in read_partial(args.out)
    }
    for seed in range(args.seeds):
        for name, mechanism in tqdm(by_name.items(), desc=f"seed {seed}"):
            if (args.task, name, seed, hyperparameters.steps, start) not in recorded:
                print(name, flush=True)
                line = {"task": args.task, "name": name, "seed": seed, "start": start}
                line |= run_of(task, mechanism, hyperparameters, line, args)
                append_line(args.out, json.dumps(line))


def hyperparameters_of(task: Task) -> Hyperparameters:
    recipe = task.recipe
    return Hyperparameters(
        recipe.steps, recipe.batch, recipe.learning_rate, evaluations=2, held_out=recipe.held_out
    )


def run_of(
    task: Task, mechanism: MechanismConfig, hyperparameters: Hyperparameters, key: dict, args
) -> dict:
    """Train one model; what it scored, and what its attention took."""
    name, seed = key["name"].replace(", ", "-").replace(" ", "-"), key["seed"]
    folder = args.out.parent / f".{args.out.stem}-{args.task}-{name}-{seed}"
    size = Size(task.recipe.hidden, task.recipe.layers, task.recipe.heads)
    run = train(task, mechanism, size, hyperparameters, seed, folder, start=args.start)
    line = {
        "steps": hyperparameters.steps, "mechanism": to_json(mechanism), "metric": run.metric,
        "final": run.final, "parameters": run.parameters, "seconds": run.seconds,
        "peak_memory_mib": run.peak_memory_mib,
    }  # fmt: skip
    return line | measurements(run.model.eval(), task) | {"environment": environment()}


@torch.no_grad()
def measurements(model: torch.nn.Module, task: Task) -> dict:
    """Groups, score pairs per head and sequence by role, bytes of a cache, and loss by position.

    Numbers of groups and pairs are those of each layer, means over the sequences.
    """
    samples = task.held_out(16)
    inputs = samples.inputs() if task.paired else {"input_ids": samples.input_ids}
    layers = [m.heedful for m in model.modules() if hasattr(m, "heedful")]
    calls = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: calls.append((layer, args, kwargs)), with_kwargs=True
        )
        for layer in layers
    ]
    logits = model(**inputs, use_cache=False).logits.float()
    for hook in hooks:
        hook.remove()
    rows = len(samples.input_ids)
    groups, pairs = {}, {}
    for layer, (q, k, *_), options in calls:
        role, visibility = layer.shape.role, options.get("visibility")
        if isinstance(layer.config, Grouped):
            grouping, _, _ = layer._grouped(q, k, visibility, options["inputs"])
            groups.setdefault(role, []).append(grouping.there.expand(rows, -1).sum().item() / rows)
            scored = score_pairs(
                grouping, window=layer.config.window, visibility=layer._for_role(visibility),
                queries=q.shape[2], asking=layer.config.queries == "groups",
            )  # fmt: skip
        else:
            visibility = visibility or Visibility()
            if window := getattr(layer.config, "window", None):
                visibility = replace(visibility, window=window)
            scored = visibility.dense(q.shape[2], k.shape[2], q.device).flatten(1).sum(1)
        pairs.setdefault(role, []).append(scored.expand(rows).sum().item() / rows)
    cache = heedful.new_cache(model)
    model(**inputs, cache=cache, use_cache=True)
    if not task.paired:
        model(input_ids=samples.input_ids[:, :1], cache=cache, use_cache=True)
    return {
        "groups": groups, "pairs": pairs, "cache_nbytes": cache.nbytes / rows,
        "whole_nbytes": cache.whole_nbytes / rows,
        "loss_by_position": [] if task.paired else by_position(logits, samples.labels),
    }  # fmt: skip


def by_position(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The mean loss in each eighth of a sequence, in nats; nan where there is no target."""
    losses, mask = token_losses(logits, labels)[:, :-1], labels[:, 1:] != IGNORE
    return [
        (losses[:, at].sum() / mask[:, at].sum()).item()
        for at in torch.arange(losses.shape[1]).chunk(8)
    ]


def closing_of(task: Task) -> tuple[int, ...]:
    """The tokens after which a group may end: of text a space and a line's end."""
    closing = []
    for token in range(task.vocab_size):
        text = task.decode([token])
        if (text and not text.strip()) or text in (".", ",", ";", "!", "?"):
            closing.append(token)
    return tuple(closing) or (0,)


if __name__ == "__main__":
    main()
