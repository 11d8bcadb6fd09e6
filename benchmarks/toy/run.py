"""The toy table of Multi-Token Attention (arXiv 2504.00927, table 1) at a size for two cores.

Which of several blocks holds all letters of the question: blocks of five and of eight letters, and
the whole block, its first or its last letter as the answer. Models are trained with attention
dropout, as in the paper, and scored with it left on, as the released code scores standard
attention, and off.

    python -m benchmarks.toy.run --seeds 3 --out runs/toy.jsonl

What is in the file already is not trained again, and a run that was killed goes on where it was.
"""

import argparse
import json
import shutil
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.parts import command_line, read_partial
from heedful.files import append_line
from heedful.nn import MechanismConfig, MultiToken, to_json
from heedful_lab.commands.compare.one_model import train
from heedful_lab.commands.compare.scratch import Hyperparameters, Size, from_scratch
from heedful_lab.records.environment import environment
from heedful_lab.rivals.table import mechanism
from heedful_lab.tasks import Blocks

LETTERS, ANSWERS = (5, 8), ("all", "first", "last")
MECHANISMS = ("standard", "mta")
DROPOUT = 0.1
SIZE = Size(hidden=128, layers=3, heads=2)  # the paper: 256, 4 and 2
QUERIES = 6  # of a kernel, as in the paper's language models; the two of its toy task learn later
RATES = {"all": 1e-3, "first": 2e-3, "last": 2e-3}  # of both mechanisms
STEPS = dict.fromkeys(product(LETTERS, ANSWERS), 2000) | {(8, "all"): 4000}  # of both, likewise
HELD_OUT = 1024


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of every column (default: the column's own)")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=MECHANISMS, default=MECHANISMS)
    parser.add_argument("--letters", nargs="+", type=int, choices=LETTERS, default=LETTERS)
    parser.add_argument("--answers", nargs="+", choices=ANSWERS, default=ANSWERS)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs = [
        (letters, answer, name, seed)
        for seed in range(args.seeds)
        for letters in args.letters
        for answer in args.answers
        for name in args.only
    ]
    recorded = {
        (x["letters"], x["answer"], x["name"], x["seed"], x["steps"], x["blocks"],
         x["budget"]["learning_rate"])
        for x in read_partial(args.out)
    }  # fmt: skip
    for key in tqdm(runs):
        steps = args.steps or STEPS[key[:2]]
        if (*key, steps, args.blocks, RATES[key[1]]) not in recorded:
            record = run_of(*key, steps, args) | {"environment": environment()}
            append_line(args.out, json.dumps(record))


def run_of(
    letters: int, answer: str, name: str, seed: int, steps: int, args: argparse.Namespace
) -> dict:
    """Train one model, and score it with dropout off and on."""
    task = Blocks(blocks=args.blocks, letters=letters, answer=answer)
    config = mechanism(name)
    if isinstance(config, MultiToken):  # in every layer, and as wide as in the paper
        kernel = (QUERIES, 2 * letters - 1)
        config = replace(config, conv=kernel, post_conv=kernel, conv_every=1)
    recipe = task.recipe
    hyperparameters = Hyperparameters(
        steps, recipe.batch, RATES[answer], mechanism_rate=recipe.mechanism_rate,
        evaluations=4, held_out=HELD_OUT,
    )  # fmt: skip
    folder = args.out.parent / f".{args.out.stem}-{name}-{letters}-{answer}-{seed}"
    start = begun(task, config, SIZE, seed, folder.with_suffix(".start"))
    run = train(task, config, SIZE, hyperparameters, seed, folder, start=start)
    shutil.rmtree(start)
    return {
        "letters": letters, "answer": answer, "name": name, "seed": seed, "steps": steps,
        "blocks": args.blocks, "mechanism": to_json(config), "dropout": DROPOUT,
        "size": asdict(SIZE), "budget": asdict(hyperparameters),
        "final": run.final, "with_dropout": left_on(run.model, task, hyperparameters),
        "parameters": run.parameters, "seconds": run.seconds, "curve": run.curve,
    }  # fmt: skip


def begun(task: Blocks, config: MechanismConfig, size: Size, seed: int, folder: Path) -> Path:
    """A new model whose family drops attention weights in training, in a folder."""
    model = from_scratch(task, config, size, seed)
    model.config.attention_dropout = DROPOUT
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def left_on(model: PreTrainedModel, task: Blocks, hyperparameters: Hyperparameters) -> float:
    """The error with what is meant for training left on."""
    rows = task.held_out(hyperparameters.held_out)
    torch.manual_seed(0)
    model.train()
    logits = [model(input_ids=ids, use_cache=False).logits for ids in rows.input_ids.split(64)]
    model.eval()
    return task.score(torch.cat(logits).argmax(-1), rows.labels)[task.metric]


if __name__ == "__main__":
    main()
