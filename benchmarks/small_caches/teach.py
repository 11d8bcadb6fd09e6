"""Fine-tune a trained model with another attention for some steps, in a plain loop.

A standard model gets an extra selector, which changes nothing at first, and learns to mask tokens
under the memory loss; a selective one keeps its own and learns to mask more. `self-pruned` gives a
standard model retention gates that act on keys beyond `--window`, and trains both under the same
loss. The other way round, standard attention, the hybrid and forgetting attention can start with
the weights of a model that has learnt a task. `selectors` and `retention-gate` are trained beside a
standard model that stays what it is, to say what a cache of 16 tokens up to half of the sequence
can do without (the loss of `heedful train --recipe hide`). What the models are worth under small
caches is scored by `run.py` and `equal_bytes.py`.

    python -m benchmarks.small_caches.teach runs/study-text/models/text-standard-0 --task text \
        --data books --tokenizer bpe --length 768 --steps 200 --rate 5e-5 --mechanism-rate 20 \
        --to runs/taught
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import heedful
from benchmarks.parts import add_task_options, task_of
from heedful.hf import conversion_of
from heedful.nn import Forgetting, Selective, SelectiveMultiToken, Standard
from heedful.training.eviction_order import EvictionOrderLoss
from heedful.training.trainer import parameter_groups
from heedful_lab.commands.compare.scoring import score
from heedful_lab.commands.compare.scratch import Hyperparameters, local_global
from heedful_lab.records.environment import environment
from heedful_lab.rivals.models import convert, load
from heedful_lab.rivals.retention import RetentionGate
from heedful_lab.tasks import Task

BESIDE = {
    "selectors": Selective(selector="extra", dim=16),
    "retention-gate": RetentionGate(),
}
MECHANISMS = (
    "selective", "mta-selective", "self-pruned", "standard", "local-global", "forgetting", *BESIDE,
)  # fmt: skip
WITH_MEMORY_LOSS = ("selective", "mta-selective", "self-pruned")
LEAST_CACHE = 16  # tokens of the smallest cache that an order of eviction is learnt for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a trained model")
    add_task_options(parser, "text")
    parser.add_argument("--mechanism", choices=MECHANISMS, default="selective")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--mechanism-rate", type=float, default=1.0, help="factor on --rate")
    parser.add_argument(
        "--memory-loss", type=float, default=0.1, help=f"of {' and '.join(WITH_MEMORY_LOSS)}"
    )
    parser.add_argument("--window", type=int, default=8, help="of self-pruned, in tokens")
    parser.add_argument(
        "--to", type=Path, required=True, help="folder of the fine-tuned model, new"
    )
    args = parser.parse_args()
    if args.to.exists():
        raise SystemExit(f"--to must be a new folder, but {args.to} is there")
    task = task_of(args)
    hyperparameters = Hyperparameters(args.steps, args.batch, held_out=task.recipe.held_out)
    model = changed(
        load(args.model, budgets=False, convert=True), args.mechanism, task, args.window
    )
    split, judged = next(iter(task.evaluations().items()))
    before = score(model, judged, hyperparameters)
    kinds = {type(m.heedful).__name__ for m in model.modules() if hasattr(m, "heedful")}
    print(f"becomes {', '.join(sorted(kinds))}; before: {split} {before}", flush=True)
    objective = ordering if args.mechanism in BESIDE else predicting
    with objective(model, task, args) as loss_of:
        seconds = teach(model, loss_of, args)
    after = score(model, judged, hyperparameters)
    print(f"after {seconds:.0f} s: {split} {after}", flush=True)
    model.save_pretrained(args.to)
    about = {
        "from": str(args.model), "task": args.task, "length": task.length,
        "mechanism": args.mechanism, "steps": args.steps, "batch": args.batch, "rate": args.rate,
        "mechanism_rate": args.mechanism_rate, "memory_loss": args.memory_loss,
        "window": args.window if args.mechanism == "self-pruned" else None,
        "before": before, "after": after, "seconds": seconds, "environment": environment(),
    }  # fmt: skip
    (args.to / "taught.json").write_text(json.dumps(about) + "\n")


def changed(model: PreTrainedModel, mechanism: str, task: Task, window: int) -> PreTrainedModel:
    """The model with another attention and the same weights; what selects stays itself."""
    config = model.config
    config.max_position_embeddings = max(config.max_position_embeddings, task.length)
    itself = {"selective": Selective, "mta-selective": SelectiveMultiToken}.get(mechanism)
    if itself and isinstance(conversion_of(model).mechanism, itself):
        return model
    heedful.revert(model)
    torch.manual_seed(0)  # of an extra selector's start
    kinds = {"selective": Selective(selector="extra"), "standard": Standard(), **BESIDE}
    kinds["mta-selective"] = SelectiveMultiToken()
    kinds["self-pruned"] = RetentionGate(window)
    kinds["forgetting"] = Forgetting(start="identity")
    kinds["local-global"] = local_global(config.num_hidden_layers, task.length)
    return convert(model, kinds[mechanism]).model


@contextmanager
def predicting(
    model: PreTrainedModel, task: Task, args: argparse.Namespace
) -> Iterator[Callable[[int], Tensor]]:
    """A context with the loss of a step: the task's own, and the memory loss of what has one."""
    has_memory = args.memory_loss and args.mechanism in WITH_MEMORY_LOSS
    memory = heedful.MemoryLoss(model) if has_memory else None

    def loss_of(step: int) -> Tensor:
        rows = task.batch(args.batch, 1, step)
        loss = model(input_ids=rows.input_ids, labels=rows.labels, use_cache=False).loss
        return loss if memory is None else loss + args.memory_loss * memory()

    yield loss_of
    if memory is not None:
        memory.remove()


@contextmanager
def ordering(
    model: PreTrainedModel, task: Task, args: argparse.Namespace
) -> Iterator[Callable[[int], Tensor]]:
    """A context with the loss of a step: that of an order of eviction, beside a frozen model."""
    model.requires_grad_(False)
    for parameter in conversion_of(model).parameters().values():
        parameter.requires_grad_()
    spread = task.length / 2 / LEAST_CACHE
    with EvictionOrderLoss(model).observing() as order:

        def loss_of(step: int) -> Tensor:
            rows = task.batch(args.batch, 1, step)
            order.draw(rows.labels, step)
            model(input_ids=rows.input_ids, use_cache=False)
            return order(round(LEAST_CACHE * spread ** random.Random(step).random()))

        yield loss_of
        rows = task.batch(args.batch, 1, args.steps)
        order.rescale(order.levels(model, {"input_ids": rows.input_ids, "labels": rows.labels}))


def teach(
    model: PreTrainedModel, loss_of: Callable[[int], Tensor], args: argparse.Namespace
) -> float:
    """The plain loop; returns its seconds."""
    start = time.perf_counter()
    groups = parameter_groups(model, args.rate, mechanism_rate=args.mechanism_rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=args.steps, pct_start=0.1,
        cycle_momentum=False,
    )  # fmt: skip
    model.train()
    for step in tqdm(range(args.steps)):
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
