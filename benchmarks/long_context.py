"""Last words, and needles after a lesson: what small language models find far back in their rows.

Last words of passages of held-out books are asked as the models are. Needles are not: a model of
this size that has only read books does not answer questions, so each is first taught on texts of
books that it may read, with needles, a question and its answer, and then asked in held-out books.

    python benchmarks/long_context.py standard=runs/training/long-standard-0-2000-0.002 \
        mta=runs/training/long-mta-0-2000-0.002 --data books-read --held-out books-held-out \
        --out runs/long-context.jsonl

A lesson that was given is not given again, and what was answered is not asked again.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from command_line import command, count
from transformers import AutoTokenizer

from heedful.experiments.evaluate import evaluate
from heedful.experiments.evaluation import Evaluation
from heedful.experiments.train_text import train_text
from heedful.experiments.training import Training
from heedful.records.environment import environment
from heedful.records.files import write_whole
from heedful.report.evaluated import summed_up
from heedful.tasks.background import Background, background_sentences
from heedful.tasks.needles import UNWANTED, Needles

ROW = 512
LENGTHS = (192, 320, 448)  # tokens of a text of the lesson; the longest is asked for
NEEDLES = (1, 2, 4)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PASSAGES = 500
TAUGHT_WITH = 1  # the seed of the lesson's needles; those that are asked for have 0


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="NAME=FOLDER of trained models")
    parser.add_argument("--data", nargs="+", required=True, help="around needles of the lesson")
    parser.add_argument("--held-out", nargs="+", required=True, help="around those asked for")
    parser.add_argument("--seeds", type=count, default=3, help="of the order of a lesson")
    parser.add_argument("--steps", type=count, default=400, help="of a lesson")
    parser.add_argument("--batch", type=count, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--samples", type=count, default=40, help="of each depth and number")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    models = {}
    for given in args.models:
        name, _, folder = given.partition("=")
        if not folder or not Path(folder).is_dir():
            raise SystemExit(f"models must be NAME=FOLDER, got {given!r}")
        models[folder] = name
    measure(models, args)


def measure(models: dict[str, str], args: argparse.Namespace) -> None:
    """Ask for last words; teach, and ask for needles; then write what was found."""
    work, held_out = args.out.parent / args.out.stem, tuple(args.held_out)
    asked = Evaluation(
        tuple(models), ("lambada",), str(work / "last-words"), data=held_out, samples=PASSAGES
    )
    found = told(asked, {folder: {"name": name} for folder, name in models.items()})
    taught = {}
    for seed in range(args.seeds):
        for folder, name in models.items():
            about = {"name": name, "seed": seed, "steps": args.steps, "rate": args.rate}
            taught[teach(folder, work / f"taught-{name}-{seed}", seed, args)] = about
    asked = Evaluation(
        tuple(taught), ("needles",), str(work / "needles"), haystack=held_out,
        lengths=LENGTHS[-1:], needles=NEEDLES, depths=DEPTHS, samples=args.samples,
    )  # fmt: skip
    found += told(asked, taught)
    write_whole(args.out, "".join(json.dumps(line) + "\n" for line in found))


def told(asked: Evaluation, models: dict[str, dict]) -> list[dict]:
    """What models scored in a task and its parts, with what is said about each model."""
    where = environment()
    return [
        {"task": line.task, **models[line.entry[0]], "measure": line.measure.name}
        | line.found._asdict()
        | {"samples": line.samples, "environment": where}
        for line in summed_up(evaluate(asked).samples)
    ]


def teach(model: str, folder: Path, seed: int, args: argparse.Namespace) -> str:
    """A model that goes on with texts in which numbers of cities are told and asked for."""
    if not (folder / "training.json").exists():
        texts = folder.parent / "lesson.jsonl"
        if not texts.exists():
            lines = [json.dumps({"text": text}) + "\n" for text in lesson(model, args)]
            write_whole(texts, "".join(lines))
        train_text(
            Training(
                model, (str(texts),), str(folder), steps=args.steps, batch=args.batch, length=ROW,
                learning_rate=args.rate, warmup=args.steps // 10, mechanism_rate=1.0,
                evaluations=1, save_minutes=1.0, seed=seed,
            )
        )  # fmt: skip
    return str(folder)


def lesson(model: str, args: argparse.Namespace) -> Iterator[str]:
    """Texts for all steps, in any order: of every length, number of needles and depth alike."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    kinds = [(length, n, depth) for length in LENGTHS for n in NEEDLES for depth in DEPTHS]
    tokens = sum(length for length, _, _ in kinds)
    each = math.ceil(1.2 * args.steps * args.batch * ROW / tokens)  # some are set apart

    def size(text: str) -> int:
        return len(tokenizer.encode(text))

    background = Background(background_sentences(args.data, max(LENGTHS), UNWANTED), size)
    texts = []
    for length, n, depth in kinds:
        task = Needles(length, n, depth)
        for question in task.sample(each, TAUGHT_WITH, background, size):
            texts.append(f"{question.prompt} {question.answers[0]}.")
    order = np.random.default_rng(TAUGHT_WITH).permutation(len(texts))
    yield from (texts[i] for i in order)


if __name__ == "__main__":
    main()
