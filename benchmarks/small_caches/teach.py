"""Fine-tune a trained model with another attention for some steps, in a plain loop.

A standard model gets an extra selector, which changes nothing at first, and learns to hide tokens
under the memory loss; a selective one keeps its own and learns to hide more. The other way round,
standard attention and the hybrid can start with the weights of a model that has learnt a task. What
the models are worth under small caches is scored by `run.py`.

    python -m benchmarks.small_caches.teach runs/study-text/models/text-standard-0 --task text \
        --data books --tokenizer bpe --length 768 --steps 200 --rate 5e-5 --mechanism-rate 20 \
        --to runs/taught
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import heedful
from heedful.commands.compare.scoring import score
from heedful.commands.compare.scratch import Hyperparameters, local_global
from heedful.nn import Selective, Standard
from heedful.records.environment import environment
from heedful.tasks import TASKS, Task
from heedful.training.trainer import parameter_groups

MECHANISMS = ("selective", "standard", "local-global")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a trained model")
    parser.add_argument("--task", choices=("text", "recall"), default="text")
    parser.add_argument("--data", nargs="+", default=())
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--length", type=int)
    parser.add_argument("--mechanism", choices=MECHANISMS, default="selective")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--mechanism-rate", type=float, default=1.0, help="factor on --rate")
    parser.add_argument("--memory-loss", type=float, default=0.1, help="of selective attention")
    parser.add_argument(
        "--to", type=Path, required=True, help="folder of the fine-tuned model, new"
    )
    args = parser.parse_args()
    if args.to.exists():
        raise SystemExit(f"--to must be a new folder, but {args.to} is there")
    task = TASKS[args.task].default(tuple(args.data)).cut(args.length, args.tokenizer)
    hyperparameters = Hyperparameters(args.steps, args.batch, held_out=task.recipe.held_out)
    model = changed(heedful.load(args.model, budgets=False), args.mechanism, task)
    split, judged = next(iter(task.evaluations().items()))
    before = score(model, judged, hyperparameters)
    kinds = {type(m.heedful).__name__ for m in model.modules() if hasattr(m, "heedful")}
    print(f"becomes {', '.join(sorted(kinds))}; before: {split} {before}", flush=True)
    seconds = teach(model, task, args)
    after = score(model, judged, hyperparameters)
    print(f"after {seconds:.0f} s: {split} {after}", flush=True)
    model.save_pretrained(args.to)
    about = {
        "from": str(args.model), "task": args.task, "length": task.length,
        "mechanism": args.mechanism, "steps": args.steps, "batch": args.batch, "rate": args.rate,
        "mechanism_rate": args.mechanism_rate, "memory_loss": args.memory_loss,
        "before": before, "after": after, "seconds": seconds, "environment": environment(),
    }  # fmt: skip
    (args.to / "taught.json").write_text(json.dumps(about) + "\n")


def changed(model: PreTrainedModel, mechanism: str, task: Task) -> PreTrainedModel:
    """The model with another attention and the same weights; selective attention stays itself."""
    config = model.config
    config.max_position_embeddings = max(config.max_position_embeddings, task.length)
    if mechanism == "selective" and hides(model):
        return model
    heedful.revert(model)
    torch.manual_seed(0)  # of an extra selector's start
    kinds = {"selective": Selective(selector="extra"), "standard": Standard()}
    kinds["local-global"] = local_global(config.num_hidden_layers, task.length)
    return heedful.convert(model, kinds[mechanism]).model


def hides(model: PreTrainedModel) -> bool:
    return any(m.heedful.hides for m in model.modules() if hasattr(m, "heedful"))


def teach(model: PreTrainedModel, task: Task, args: argparse.Namespace) -> float:
    """The plain loop: the task's own loss, and the memory loss beside it where tokens hide."""
    start = time.perf_counter()
    groups = parameter_groups(model, args.rate, mechanism_rate=args.mechanism_rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=args.steps, pct_start=0.1,
        cycle_momentum=False,
    )  # fmt: skip
    memory = heedful.MemoryLoss(model) if args.memory_loss and hides(model) else None
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
    model.eval()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
