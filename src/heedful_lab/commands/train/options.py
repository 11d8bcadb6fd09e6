"""The options of `heedful train` and `heedful convert`; imports nothing heavy."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro

from heedful.checks import UserError, check_choice, check_literals, check_whole, is_whole
from heedful_lab.commands.options import RECALL, Device, RoleName, check_memory_loss

Schedule = Literal["cosine", "linear", "constant"]
RecipeName = Literal["auto", "scratch", "adapt", "hide", "evict", "mta", "mta-long", "selective"]
Trained = Literal["all", "lora", "mechanism"]
Targets = Literal["text", "base", "maps"]


class TrainingRecipe(NamedTuple):
    """The defaults of a training run; fields are those of `Training`."""

    steps: int
    batch: int
    length: int
    learning_rate: float
    warmup: int
    schedule: Schedule = "cosine"
    mechanism_rate: float = 1.0
    weight_decay: float = 0.0
    beta2: float = 0.95
    train: Trained = "all"
    targets: Targets = "text"
    memory_loss: float = 0.0
    tau: float = 1.0
    soft_budgets: tuple[int, int] | None = None


RECIPES = {
    "scratch": TrainingRecipe(
        steps=500, batch=8, length=512, learning_rate=1e-3, warmup=50, weight_decay=0.1
    ),
    "adapt": TrainingRecipe(
        steps=250, batch=8, length=1024, learning_rate=2e-5, warmup=25, mechanism_rate=50.0
    ),
    "hide": TrainingRecipe(
        steps=200, batch=1, length=1024, learning_rate=2e-3, warmup=10, schedule="linear",
        train="mechanism", targets="maps", soft_budgets=(64, 256),
    ),
    "evict": TrainingRecipe(
        steps=180, batch=1, length=1024, learning_rate=5e-4, warmup=10, train="lora",
        targets="base",
    ),
    # Golovneva et al., arXiv 2504.00927, table 7 and section 4.3, and their published code: batches
    # of 262,144 tokens.
    "mta": TrainingRecipe(
        steps=400_000, batch=128, length=2048, learning_rate=1.5e-4, warmup=375,
        schedule="linear", weight_decay=0.05, beta2=0.98,
    ),
    "mta-long": TrainingRecipe(
        steps=40_000, batch=64, length=4096, learning_rate=1.5e-4, warmup=50, schedule="linear",
        beta2=0.98,
    ),
    # Leviathan et al., arXiv 2410.02703, appendix; the rate is that of a public implementation.
    "selective": TrainingRecipe(
        steps=524_288, batch=256, length=512, learning_rate=5e-3, warmup=1000, beta2=0.999
    ),
}  # fmt: skip
"""Of the two papers, and four for everyday: a model from scratch, one that has weights, one that
learns which tokens its cache can do without, and an adapter that learns to do without them."""

HIDE, EVICT = "hide", "evict"
HIDING = "selective:selector=extra,dim=16,masks=false"
"""The mechanism of that last one, unless another is named."""


class Part(NamedTuple):
    """Part of a mixture: some of `data`, and its number of sequences in a row."""

    data: tuple[str, ...]
    weight: int


class Origin(NamedTuple):
    """Model, mechanism and tokenizer that a run begins with; fields as in `Training`.

    default_mechanism: of the recipe, where none is named and the model has none.
    texts: that a new vocabulary is learned from.
    under_budgets: the model is an adapter whose budgets it is trained under.
    """

    model: str
    mechanism: tuple[str, ...]
    default_mechanism: tuple[str, ...]
    where: tuple[RoleName, ...]
    tokenizer: str | None
    vocabulary: int | None
    texts: tuple[str, ...]
    rank: int
    seed: int
    under_budgets: bool

    @property
    def has_weights(self) -> bool:
        """Test whether the model is a trained one, and not a size or a configuration."""
        return self.model not in SIZES and not self.model.endswith(".json")


class Shape(NamedTuple):
    """A Llama of a size that one of the papers trains."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    tied: bool
    theta: float


SIZES = {
    # Leviathan et al.: width 64 d, d heads and d layers, 8,000 tokens; d = 8 and 12.
    "30m": Shape(512, 8, 8, 1360, 8000, True, 1e4),
    "100m": Shape(768, 12, 12, 2048, 8000, True, 1e4),
    # Golovneva et al., table 7; feed-forward widths and the vocabulary of Llama 3, tied, follow
    # from the parameter counts.
    "300m": Shape(1024, 20, 16, 2816, 128_256, True, 1e5),
    "550m": Shape(1280, 24, 10, 3584, 128_256, True, 1e5),
    "880m": Shape(1536, 24, 16, 4096, 128_256, True, 1e5),
    "1b": Shape(2048, 24, 16, 5632, 128_256, True, 1e5),
}


HARMLESS = ("save_minutes", "report_to", "device", "fsdp", "accumulate", "checkpointing", "compile")
"""Fields that another call of the same run may change, as it trains the same model without them."""


@dataclass(frozen=True)
class Training:
    """Train a language model on text, from scratch or from its weights, with any mechanism.

    The text is encoded once into the output folder, as much of it as the run needs; sequences are
    packed with documents kept apart. Killed at any moment, the same command goes on from the newest
    checkpoint. Started by torchrun or accelerate launch it runs on several devices.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model or an adapter, a name on the Hugging Face hub, a GGUF file, a configuration
    (FILE.json), or a size: 30m 100m (selective attention's paper), 300m 550m 880m 1b (multi-token
    attention's)."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text files, .jsonl files with "text", either with .gz, folders, hf:NAME[:CONFIG][:SPLIT].
    Default: the Python standard library's sources. A mixture says how many sequences of each come
    in a row, as in books:3 chat.jsonl:1 recall:1, where recall is generated questions after a text,
    and a .jsonl with "messages" holds conversations."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs/train"
    """Folder for the model, with its tokenizer, training.json and log.jsonl."""
    mechanism: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME[:OPTIONS][@LAYERS] ...")] = ()
    """Such as mta, or mta:conv_every=1,norm=true, or several: selective@0-2 mta@3,4. A converted
    model keeps its own; others have standard attention by default."""
    where: tuple[RoleName, ...] = ()
    """In which attention; by default wherever the mechanism is defined."""
    held_out: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """The evaluation set; by default about 5 % of the data."""
    read_tokens: int | None = None
    """Tokens of the data to draw sequences from; default: what the steps need, so that a shorter
    run sees less of the text."""
    tokenizer: str | None = None
    """bpe (byte pairs, trained here on the data), bytes, or a tokenizer's folder or name. Default:
    the model's own; for a model from scratch bpe."""
    vocabulary: int | None = None
    """Tokens of a vocabulary that is trained here; default: what the model has room for."""
    recipe: RecipeName = "auto"
    """Where the following are left out: scratch, adapt (a model with weights), hide (a model with
    weights learns which tokens its cache can do without), evict (an adapter of hide, with budgets,
    learns to do without them), or a paper's: mta, mta-long, selective. auto is scratch or adapt."""
    train: Trained | None = None
    """Parameters to train: all; the mechanism alone; or lora, the mechanism and LoRA beside the
    frozen linear layers. The last two write an adapter in place of a model."""
    rank: int = 16
    """Of the matrices of lora."""
    targets: Targets | None = None
    """What is learned: the text's next token; what the base, which must be frozen, predicts
    without the mechanism, for a second forward pass; or, by selectors of their own, which tokens a
    cache can evict, from the attention maps of the base, without a pass back through it."""
    steps: int | None = None
    """Optimiser steps."""
    batch: int | None = None
    """Sequences per step, over all devices."""
    length: int | None = None
    """Tokens of a sequence."""
    learning_rate: float | None = None
    """At its peak."""
    warmup: int | None = None
    """Steps of linear warm-up."""
    schedule: Schedule | None = None
    """What follows it; cosine and linear fall to zero."""
    mechanism_rate: float | None = None
    """Factor on the learning rate of the mechanism's own parameters."""
    weight_decay: float | None = None
    """Of matrices; vectors and the mechanism's parameters have none."""
    beta2: float | None = None
    """Of AdamW; beta1 is 0.9. Gradients are clipped at a norm of 1."""
    memory_loss: float | None = None
    """Factor of the memory loss of selective attention; the paper has 0.1."""
    tau: float | None = None
    """From which F on a token counts as hidden in that loss; the paper has 1."""
    soft_budgets: tuple[int, int] | None = None
    """Smallest and largest cache in tokens for --targets maps, one is drawn in each step. Those of
    a recipe grow with the length."""
    accumulate: int = 1
    """Take each step in so many parts, for batches that do not fit."""
    checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile: bool = False
    """torch.compile the model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the computation; weights and optimiser stay float32. auto is bfloat16 on a GPU that has
    it."""
    fsdp: bool = False
    """Share parameters and optimiser among the processes of torchrun or accelerate (FSDP2),
    instead of a copy in each (DDP)."""
    evaluations: int = 10
    """How often the evaluation set is scored, in bits per byte, the last time at the end."""
    save_minutes: float = 10.0
    """A checkpoint is written this often."""
    report_to: tuple[str, ...] = ()
    """Where losses are also sent, as Trainer's report_to: tensorboard, wandb, mlflow, ..."""
    seed: int = 0
    """Of new weights and of the order of sequences."""
    device: Device = "auto"
    """auto is the GPU where there is one."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name in ("steps", "batch", "accumulate", "evaluations", "rank"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        for name, least in (
            ("length", 2),
            ("warmup", 0),
            ("seed", 0),
            ("vocabulary", 258),
            ("read_tokens", 1),
        ):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        for name, most in (
            ("learning_rate", math.inf),
            ("mechanism_rate", math.inf),
            ("save_minutes", math.inf),
            ("tau", math.inf),
            ("beta2", 1.0),
        ):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < most):
                limit = "" if most == math.inf else f" below {most:g}"
                raise UserError(f"{name} must be a number above 0{limit}, got {value!r}")
        if self.weight_decay is not None and not (
            _is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf
        ):
            raise UserError(f"weight_decay must be at least 0, got {self.weight_decay!r}")
        if self.memory_loss is not None:
            check_memory_loss(self.memory_loss)
        if self.soft_budgets is not None:
            least, most = self.soft_budgets
            check_whole("soft_budgets", least, 1)
            if not is_whole(most, least):
                raise UserError(
                    f"soft_budgets must be two numbers of tokens, the smaller first, got {least} "
                    f"{most}"
                )
        paths = [path for part in self.parts() for path in part.data]
        if paths == [RECALL]:
            raise UserError("data must name a text beside recall, such as books:3 recall:1")
        for evaluation, training in product(self.held_out, paths):
            first, second = Path(evaluation).resolve(), Path(training).resolve()
            if first == second or second in first.parents or first in second.parents:
                raise UserError(
                    f"held_out names {evaluation!r}, and data {training!r}: what is trained on "
                    "tells nothing when it is scored; keep them apart"
                )
        if self.schedule is not None:
            check_choice("schedule", self.schedule, ("cosine", "linear", "constant"))
        if self.where and not self.mechanism:
            raise UserError("where says where a mechanism stands: add --mechanism")
        self.filled()  # raises

    def parts(self) -> list[Part]:
        """The mixture that `data` names; without weights, all of it is one part.

        Raises:
            ValueError: some have a weight and others none, or one is not a whole number above 0.
        """
        words = [re.fullmatch(r"(.+):(\d+)", word) for word in self.data]
        if not any(words):
            return [Part(self.data, 1)]
        if not all(words):
            without = next(w for w, match in zip(self.data, words, strict=True) if not match)
            raise UserError(
                f"data: {without!r} has no weight, and others have one; write {without}:1"
            )
        parts = [Part((match[1],), int(match[2])) for match in words]
        if empty := [part.data[0] for part in parts if part.weight == 0]:
            raise UserError(f"data: {empty[0]!r} has the weight 0; leave it out, or give it 1")
        return parts

    def origin(self) -> Origin:
        """Model, mechanism and tokenizer that the run begins with."""
        return Origin(
            self.model,
            self.mechanism,
            (HIDING,) if self.recipe == HIDE else (),
            self.where,
            self.tokenizer,
            self.vocabulary,
            self.texts(),
            self.rank,
            self.seed,
            under_budgets=self.recipe == EVICT,
        )

    def texts(self) -> tuple[str, ...]:
        """Names of the texts, without the weights of parts."""
        return tuple(x for part in self.parts() for x in part.data if x != RECALL)

    def filled(self) -> TrainingRecipe:
        """The recipe, with the given options in its place."""
        name, has_weights = self.recipe, self.origin().has_weights
        if name == "auto":
            name = "adapt" if has_weights else "scratch"
        own = {field: getattr(self, field) for field in TrainingRecipe._fields}
        recipe = RECIPES[name]._replace(**{k: v for k, v in own.items() if v is not None})
        if recipe.train != "all" and not has_weights:
            raise UserError(
                f"train={recipe.train!r} freezes the weights of MODEL, and {self.model!r} has "
                "none; name a trained model, or --train all"
            )
        if recipe.train != "all" and self.fsdp:
            raise UserError(
                f"fsdp shares what is trained, and train={recipe.train!r} trains little: leave it "
                "out, and each process holds the frozen base"
            )
        if recipe.targets == "base" and recipe.train == "all":
            raise UserError(
                "targets='base' needs a frozen base: add --train mechanism or --train lora"
            )
        if (recipe.targets == "maps") != (recipe.soft_budgets is not None):
            raise UserError(
                "targets='maps' and soft_budgets go together: the loss is what caches of that size "
                "evict of the base's attention; give both, or neither"
            )
        if recipe.targets == "maps" and (recipe.train != "mechanism" or recipe.memory_loss):
            raise UserError(
                "targets='maps' trains the mechanism alone, without a memory loss: add --train "
                "mechanism --memory-loss 0"
            )
        if self.recipe == EVICT and recipe.train != "lora":
            raise UserError(
                f"recipe='evict' trains LoRA, got train={recipe.train!r}; leave out --train"
            )
        if recipe.batch % self.accumulate:
            raise UserError(
                f"accumulate must divide the batch of {recipe.batch} sequences, got "
                f"{self.accumulate}"
            )
        if recipe.soft_budgets is not None:
            recipe = recipe._replace(soft_budgets=self._soft_budgets(RECIPES[name], recipe.length))
        if self.warmup is None:
            recipe = recipe._replace(warmup=min(recipe.warmup, recipe.steps // 2))
        return recipe

    def _soft_budgets(self, default: TrainingRecipe, length: int) -> tuple[int, int]:
        """Those that are given, or the recipe's in proportion to the length."""
        if self.soft_budgets is None:
            least, most = (max(1, n * length // default.length) for n in default.soft_budgets)
            return least, most
        if self.soft_budgets[0] >= length:
            raise UserError(
                f"soft_budgets must begin below the length of {length} tokens, got "
                f"{self.soft_budgets[0]}: such a cache would evict nothing"
            )
        return self.soft_budgets

    def identity(self) -> dict:
        """The options that make a run this run, as JSON: all but what is harmless to change."""
        names = (x.name for x in fields(self) if x.name not in ("out", *HARMLESS))
        return self._as_json(names)

    def harmless(self) -> dict:
        """The others, as JSON."""
        return self._as_json(HARMLESS)

    def _as_json(self, names: Iterable[str]) -> dict:
        values = {name: getattr(self, name) for name in names}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
