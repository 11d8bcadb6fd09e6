"""Language models side by side as `heedful train` trains them: equal steps, and equal time.

Every mechanism is trained from scratch on the same sequences with the learning rate that served it
best of three, tried on a seed of its own for a quarter of the steps; then with several seeds for
equally many steps, and those whose step takes longer once more for as many steps as they take in
the time of standard attention, with sequences of the same text. How much longer comes from a file
of `benchmarks/training/overhead.py`, so that a noisy machine changes no run. `--long` trains one
seed of a few mechanisms for longer; `--continual` goes on from its standard model, converted and
not. `--ablation` trains forms of multi-token attention with parts left out, all with its learning
rate.

    python -m benchmarks.training.run --data books-read --held-out books-held-out \\
        --speeds benchmarks/training/results/training-overhead-cpu.jsonl --out runs/training.jsonl
    python -m benchmarks.training.run --data books-read --held-out books-held-out --long 2000 \\
        --only standard mta selective --out runs/training.jsonl
    python -m benchmarks.training.run --data books-read --held-out books-held-out --long 2000 \\
        --continual 400 --only standard mta selective --out runs/training.jsonl
    python -m benchmarks.training.run --data books-read --held-out books-held-out --ablation \\
        --out runs/training.jsonl

What is in the file already is not trained again, and a run that was killed goes on where it was.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.parts import command_line, read_partial
from heedful.files import append_line
from heedful_lab.commands.train.options import Training
from heedful_lab.commands.train.run import train_text
from heedful_lab.records.environment import environment

CONFIG = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
MECHANISMS = {
    "standard": ("standard",),
    "talking-heads": ("talking-heads",),
    "mta": ("mta",),
    "mta-v1": ("mta-v1",),
    "mta-published": ("mta-published",),
    "selective": ("selective",),
    "selective + mta": ("selective@0,1,3", "mta:conv_every=1@2"),
    "differential": ("differential",),
    "differential-v2": ("differential-v2",),
    "knocking-heads": ("knocking-heads",),
    "canon": ("canon",),
    "differential-v2, narrower": ("differential-v2",),
}
# Twice the query heads of Differential V2 cost 7 % more parameters, which a narrower MLP evens out.
NARROWER = {"differential-v2, narrower": {"intermediate_size": 447}}
# Of `heedful.nn.ablations()`, those that distinguish the rows of the paper's table; the last
# one is what its worst row has beside attention.
FORMS = {
    "pre+post conv, pre+post mix, scalar gate": ("mta:norm=plain,gate=scalar",),
    "pre conv, pre+post mix, scalar gate": ("mta:post_conv=null,norm=plain,gate=scalar",),
    "pre conv, pre+post mix, no norm": ("mta:post_conv=null",),
    "pre conv, post mix, no norm": ("mta:post_conv=null,mix=null",),
    "post conv, post mix, no norm": ("mta:conv=null,mix=null",),
    "pre conv, pre mix, no norm": ("mta:post_conv=null,post_mix=null",),
    "6x11 pre conv only, depth scaling": ("mta:post_conv=null,mix=null,post_mix=null,norm=depth",),
    "pre conv, post mix, layer-norm scaling": ("mta:post_conv=null,mix=null,input_scaling=depth",),
    "layer-norm scaling alone": (
        "mta:conv=null,post_conv=null,mix=null,post_mix=null,input_scaling=depth",
    ),
}
RATES = (1e-3, 2e-3, 4e-3)
TRIED_WITH = 100  # the seed of the learning rates
ADAPTED_WITH = 3e-4  # the rate with which a trained model goes on
SLOWER = 1.05  # a step that takes less is as fast as one of standard attention, by what speeds vary
CURVES = ("long", "continual")  # what is shown in its course; the rest is compared at the end
EVALUATIONS = 6  # of a run whose curve is shown


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", nargs="+", required=True)
    # What is set apart of the data would depend on the steps.
    parser.add_argument("--held-out", nargs="+", required=True)
    parser.add_argument("--speeds", type=Path, help="results of overhead.py")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--continual", type=int, help="steps from the standard model of --long")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--long", type=int, help="one seed each, for so many steps")
    kinds.add_argument("--ablation", action="store_true", help="multi-token attention in parts")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--only", nargs="+", help="names of mechanisms; default all")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    compare(args, slowness(args.speeds))


def compare(args: argparse.Namespace, slower: dict[str, float]) -> None:
    """Train what is planned and not in the file yet."""
    for spec in plan(args, slower):
        if spec.rate is None:
            spec = spec._replace(rate=best_rate(args, spec.tried))
        if not any(is_of(line, spec, args) for line in read_partial(args.out)):
            result = run_of(args, spec)
            line = spec._asdict() | {"batch": args.batch, "length": args.length}
            line |= {"config": spec.config, "mechanism": spec.mechanism} | result
            append_line(args.out, json.dumps(line | {"environment": environment()}))
            print(*spec[:5], f"{result['bits_per_byte']:.4f}", flush=True)


class RunSpec(NamedTuple):
    """One run; a rate of `None` is the best of those that were tried."""

    kind: str
    name: str
    seed: int
    steps: int
    rate: float | None = None
    base: int = 0  # steps of the model that it goes on from

    @property
    def mechanism(self) -> tuple[str, ...]:
        """As `heedful train` takes it."""
        return (FORMS if self.kind == "ablation" else MECHANISMS)[self.name]

    @property
    def config(self) -> dict:
        """The model's configuration."""
        return CONFIG | NARROWER.get(self.name, {})

    @property
    def tried(self) -> str:
        """Whose learning rate it has: forms of multi-token attention that of the whole."""
        return "mta" if self.kind == "ablation" else self.name.removesuffix(", narrower")


def plan(args: argparse.Namespace, slower: dict[str, float]) -> Iterator[RunSpec]:
    """Plan of the runs, in an order in which whatever is done is a comparison."""
    names_of = FORMS if args.ablation else MECHANISMS
    names = [name for name in names_of if not args.only or name in args.only]
    kind = "ablation" if args.ablation else "steps"
    tried = dict.fromkeys(RunSpec(kind, name, 0, args.steps).tried for name in names)
    for name in ("standard",) if args.continual else tried:
        for rate in RATES:
            yield RunSpec("rate", name, TRIED_WITH, args.steps // 4, rate)
    if args.continual:
        for name in names:
            yield RunSpec("continual", name, 0, args.continual, ADAPTED_WITH, args.long)
    elif args.long:
        for name in names:
            yield RunSpec("long", name, 0, args.long)
    elif args.ablation:
        for seed in range(args.seeds):
            for name in names:
                yield RunSpec("ablation", name, seed, args.steps)
    else:
        for seed in range(args.seeds):
            for name in names:
                yield RunSpec("steps", name, seed, args.steps)
            for name in names:
                if slower.get(name, 1.0) > SLOWER:
                    yield RunSpec("time", name, seed, round(args.steps / slower[name]))


def slowness(path: Path | None) -> dict[str, float]:
    """Step time of each mechanism, relative to standard attention."""
    if path is None:
        return {}
    times = {line["kind"]: line["times_plain"] for line in read_partial(path)}
    return {kind: x / times["standard"] for kind, x in times.items() if kind != "plain"}


def best_rate(args: argparse.Namespace, name: str) -> float:
    tried = [
        line for line in read_partial(args.out) for rate in RATES
        if is_of(line, RunSpec("rate", name, TRIED_WITH, args.steps // 4, rate), args)
    ]  # fmt: skip
    return min(tried, key=lambda line: line["bits_per_byte"])["rate"]


def is_of(line: dict, spec: RunSpec, args: argparse.Namespace) -> bool:
    fields = spec._asdict() | {"batch": args.batch, "length": args.length}
    return all(line.get(name, 0) == value for name, value in fields.items())


def run_of(args: argparse.Namespace, spec: RunSpec) -> dict:
    """Train one model; its scores on the way, and what it ended with.

    Models of long runs are kept beside the file of results.
    """
    folder = args.out.parent / args.out.stem
    folder.mkdir(exist_ok=True)
    options = training(args, spec, folder)
    trained = train_text(options)
    run = Path(options.out)
    scored = [line for line in read_partial(run / "log.jsonl") if "eval_bits_per_byte" in line]
    curve = [(line["step"], line["eval_bits_per_byte"]) for line in scored]
    if spec.kind != "long":
        shutil.rmtree(run)
    about = trained._asdict()
    del about["folder"], about["steps"]
    return about | {"curve": curve}


def training(args: argparse.Namespace, spec: RunSpec, folder: Path) -> Training:
    """The run as `heedful train` takes it; the model that it goes on from is there then."""
    config = folder / ("narrower.json" if spec.name in NARROWER else "config.json")
    config.write_text(json.dumps(spec.config))
    model, more = str(config), {}
    if spec.kind == "continual":
        rate = best_rate(args, "standard")
        base = RunSpec("long", "standard", 0, spec.base, rate)
        model = str(train_text(training(args, base, folder)).folder)
        more = {"mechanism_rate": 20.0, "read_tokens": tokens(args, spec.base + spec.steps)}
    if spec.kind == "time":
        more = {"read_tokens": tokens(args, args.steps)}
    run = f"{spec.kind}-{spec.name.replace(' ', '')}-{spec.seed}-{spec.steps}"
    return Training(
        model, tuple(args.data), str(folder / f"{run}-{spec.rate:g}"), spec.mechanism,
        held_out=tuple(args.held_out), steps=spec.steps, batch=args.batch,
        length=args.length, learning_rate=spec.rate, seed=spec.seed, save_minutes=1.0,
        evaluations=EVALUATIONS if spec.kind in CURVES else 1, warmup=spec.steps // 10, **more,
    )  # fmt: skip


def tokens(args: argparse.Namespace, steps: int) -> int:
    """Number of tokens that so many steps learn from."""
    return steps * args.batch * (args.length - 1) + 1


if __name__ == "__main__":
    main()
