"""Train, share out and measure a small cache, step by step; each step resumes by itself."""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.data import Document, corpus
from heedful.eviction import Eviction, StreamingLLM
from heedful.files import only_writer, write_lines, write_whole
from heedful.hf import conversion_of
from heedful.hf.adapter_folders import is_adapter, save_adapter
from heedful.hf.cache.new import new_cache
from heedful.hf.convert import replace_attention
from heedful.hf.stock import stock_model
from heedful.hf.versions import cache_argument
from heedful_lab.commands.budget.options import BudgetSearch
from heedful_lab.commands.budget.rows import Rows, read_rows
from heedful_lab.commands.budget.search import search
from heedful_lab.commands.models import (
    ModelSource,
    device_of,
    dtype_option,
    is_converted,
    longest,
    size_in_words,
)
from heedful_lab.commands.options import RECALL
from heedful_lab.commands.shrink.options import Shrink, ShrinkTraining
from heedful_lab.commands.train.inputs import RunInputs
from heedful_lab.commands.train.options import EVICT, HIDE, RECIPES, Training
from heedful_lab.commands.train.run import train_text
from heedful_lab.records.environment import environment
from heedful_lab.records.folder import UNFINISHED, resumed

ABOUT = "shrink.json"
_SELECTOR = 16  # numbers of a selector's key, as the recipe trains them
_POSITION, _F = 8, 4  # bytes per token
_CHUNK = 32  # tokens of a call, in training and in what is measured
_READ = 64 * 2**20  # bytes of text that are read at most
_HELD_OUT = 0.05  # of the text
_LEAST_RECALL = 512  # tokens of a sequence that has room for facts and questions
# Forward passes of one sequence that a unit of each step takes about as long as.
_SELECTOR_STEP, _LORA_STEP, _TRIAL_ROW, _MEASURED_ROW = 2.5, 5.0, 1.6, 4.0


class Size(NamedTuple):
    """Bytes of a small and of a full cache.

    tokens: of each layer on average, so that the bytes are those of the ratio.
    nbytes: of the small cache.
    bf16_nbytes: of the full one in bfloat16.
    """

    tokens: int
    nbytes: int
    bf16_nbytes: int


class ShrinkResult(NamedTuple):
    """Bytes, loss and time of the cache that came out.

    tokens: of each layer on average.
    nbytes, bf16_nbytes: of the small cache after `length` tokens, and of the full one in bf16.
    whole, perplexity: with all tokens cached and under the budgets, on `rows` held-out sequences.
    ms_per_token: of a token after these, under the budgets; `whole_ms_per_token` with the full one.
    """

    folder: str
    tokens: int
    length: int
    rows: int
    nbytes: int
    bf16_nbytes: int
    whole: float
    perplexity: float
    ms_per_token: float
    whole_ms_per_token: float

    def __str__(self) -> str:
        rise = 100 * (self.perplexity / self.whole - 1)
        return (
            f"after {self.length:,} tokens the cache takes {size_in_words(self.nbytes)}, "
            f"{self.bf16_nbytes / self.nbytes:.1f} × less than a full one in bf16 "
            f"({self.tokens:,} tokens per layer on average)\n"
            f"perplexity {self.perplexity:.2f}, with all tokens cached {self.whole:.2f}: "
            f"{rise:+.1f} % ({self.rows} held-out sequences in chunks of {_CHUNK})\n"
            f"a token takes {self.ms_per_token:.0f} ms, with all tokens cached "
            f"{self.whole_ms_per_token:.0f} ms\n"
            f"heedful generate {self.folder} --file FILE uses it, heedful.load({self.folder!r}) too"
        )


def shrink(
    options: Shrink,
    announce: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ShrinkResult:
    """Train, share out and measure a small cache; goes on where it was stopped.

    Arguments:
        options: the model, the ratio and what is trained.
        announce: is told what will be done, and about how long it takes.
        should_stop: as for `train_text`.

    Raises:
        Stopped: `should_stop` returned true.
        ValueError: the model is not supported, the ratio cannot be reached, or the folder holds
            something else.
    """
    plan = ShrinkPlan(
        Path(options.out),
        ModelSource(options.model, options.device, options.dtype, tokenizer=options.tokenizer),
        options.ratio,
        options.length,
        options.train,
        RunInputs(options.model, options.data, options.held_out, options.tokenizer),
        options.steps,
        options.trials,
        options.rows,
        options.seed,
        options.identity(),
    )
    return _run(plan, announce, should_stop)


class ShrinkPlan(NamedTuple):
    """A small cache to make, in plain values; fields are those of `Shrink`.

    inputs: all that is read.
    options: those that decide the result, as JSON.
    """

    out: Path
    source: ModelSource
    ratio: float
    length: int
    train: ShrinkTraining
    inputs: RunInputs
    steps: int | None
    trials: int
    rows: int
    seed: int
    options: dict

    def identity(self) -> dict:
        """Options that decide the result, with digests of all that is read, as JSON."""
        return {"options": self.options, "inputs": self.inputs.digests()}

    def training(self, recipe: Literal["hide", "evict"], model: str, texts: "_Texts") -> Training:
        """The training of selectors beside a model, or of LoRA under an adapter's budgets."""
        place = device_of(self.source.device).type
        return Training(
            model=model,
            recipe=recipe,
            data=(f"{texts.data}:2", f"{RECALL}:3") if texts.recalls else (texts.data,),
            held_out=(texts.held_out,),
            out=str(self.out / UNFINISHED / ("selectors" if recipe == HIDE else "lora")),
            steps=self.steps,
            length=self.length,
            evaluations=1,
            dtype="bfloat16" if self.source.dtype == "bfloat16" or place == "cuda" else "auto",
            device=place,
            tokenizer=self.source.tokenizer,
            seed=self.seed,
            **({"rank": 6} if recipe == EVICT else {}),
        )

    def search(self, adapter: str, tokens: int, texts: "_Texts") -> BudgetSearch:
        """The search for the budgets of an adapter, of so many tokens per layer on average."""
        return BudgetSearch(
            adapter,
            data=(texts.data, RECALL) if texts.recalls else (texts.data,),
            tokens=tokens,
            length=self.length,
            rows=self.rows,
            trials=self.trials,
            dtype=self.source.dtype,
            device=self.source.device,
            tokenizer=self.source.tokenizer,
        )


def _run(
    plan: ShrinkPlan, announce: Callable[[str], None], should_stop: Callable[[], bool]
) -> ShrinkResult:
    out, work, name = plan.out, plan.out / UNFINISHED, plan.source.name
    with only_writer(out):
        about = resumed(out, ABOUT, plan.identity)
        if about is not None and about["result"] is not None:
            return ShrinkResult(**about["result"])
        model = _stock(plan.source, plan.length)
        tokenizer = plan.source.open_tokenizer(model)
        size = size_for(model, plan.length, plan.ratio, plan.train != "none")
        paths = work / "text.jsonl", work / "held-out.jsonl"
        if about is None:
            _write_texts(plan.inputs.data, plan.inputs.held_out, paths)
        recalls = getattr(tokenizer, "is_fast", False) and plan.length >= _LEAST_RECALL
        texts = _Texts(*map(str, paths), recalls)
        held_out = read_rows((texts.held_out,), tokenizer, plan.length, plan.rows)
        seconds = _seconds_per_sequence(model, held_out)
        announce(_estimate(plan, size, seconds))
        about = plan.identity() | {"environment": environment(), "result": None}
        write_whole(out / ABOUT, json.dumps(about, indent=2) + "\n")
        if plan.train == "none":
            adapter = work / "base"
            replace_attention(model, "standard", attends=False)
            conversion_of(model).eviction = StreamingLLM(tokens=size.tokens)
            save_adapter(model, adapter, base=name)
        else:
            del model
            adapter = train_text(plan.training(HIDE, name, texts), should_stop).folder
        search(plan.search(str(adapter), size.tokens, texts))
        if plan.train == "lora":
            adapter = train_text(plan.training(EVICT, str(adapter), texts), should_stop).folder
        model = replace(plan.source, name=str(adapter)).open(convert=False)
        result = _measured(model, held_out, str(out))
        for path in adapter.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy2(path, out / path.name)
        about |= {"result": result._asdict()}
        write_whole(out / ABOUT, json.dumps(about, indent=2) + "\n")
        shutil.rmtree(work)
    return result


def _stock(source: ModelSource, length: int) -> PreTrainedModel:
    """The model as it is."""
    if is_adapter(source.name) or is_converted(Path(source.name)):
        raise UserError(
            f"model {source.name!r} has a mechanism already; name the model that it stands beside"
        )
    model = stock_model(source.name, **dtype_option(source.dtype)).eval()
    room = longest(model)
    if room is not None and length > room:
        raise UserError(f"length must be at most {room}, the model's positions, got {length}")
    return model.to(device_of(source.device))


@torch.no_grad()
def size_for(model: PreTrainedModel, length: int, ratio: float, selects: bool) -> Size:
    """The number of tokens per layer that takes the bytes of the ratio after `length` tokens.

    Arguments:
        model: as it is.
        length, ratio: fields of `Shrink`.
        selects: selectors rank the tokens, and cost bytes.

    Raises:
        ValueError: fewer than a policy protects, or all of them.
    """
    cache = new_cache(model, False)
    model(torch.ones(1, 1, dtype=torch.long, device=model.device), **cache_argument(model, cache))
    layers, policy = cache.layers, StreamingLLM(tokens=13)
    windows = [length if x.map.window is None else x.map.window - 1 for x in layers]
    full = sum(min(length, seen) * x.bf16_nbytes for x, seen in zip(layers, windows, strict=True))
    streams = _POSITION + (_F + _SELECTOR * model.dtype.itemsize if selects else 0)

    def nbytes(tokens: int) -> int:
        each = zip(layers, windows, strict=True)
        return sum(min(tokens, seen) * (x.whole_nbytes + streams) for x, seen in each)

    least, most = policy.sinks + policy.recent + 1, length
    if nbytes(least) * ratio > full:
        raise UserError(
            f"ratio={ratio:g} leaves no room for the {least} tokens that every layer keeps "
            f"of {length}: at most {full / nbytes(least):.1f} here; give a smaller ratio, "
            "or a larger --length"
        )
    fits = [n for n in range(least, most) if nbytes(n) * ratio <= full]
    if nbytes(most) * ratio <= full:
        raise UserError(f"ratio={ratio:g} needs no eviction at {length} tokens; give a larger one")
    return Size(fits[-1], nbytes(fits[-1]), full)


class _Texts(NamedTuple):
    """Files of text, and whether questions about facts are made of them for training and search."""

    data: str
    held_out: str
    recalls: bool


def _write_texts(
    data: tuple[str, ...], held_out: tuple[str, ...], paths: tuple[Path, Path]
) -> None:
    """Write the text to train and search on, and the held-out text, as files."""
    documents = corpus(data, limit_bytes=_READ)
    if held_out:
        apart = corpus(held_out, limit_bytes=_READ)
    else:
        documents, apart = _parted(documents)
    for path, those in zip(paths, (documents, apart), strict=True):
        write_lines(path, [{"text": x.text} for x in those])


def _parted(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """All but the end of the text, and the end, which may begin within a document."""
    left = round(sum(len(x.text) for x in documents) * (1 - _HELD_OUT))
    first, last = [], []
    for x in documents:
        cut, left = min(len(x.text), left), max(0, left - len(x.text))
        first += [x._replace(text=x.text[:cut])] if cut else []
        last += [x._replace(text=x.text[cut:])] if cut < len(x.text) else []
    return first, last


@torch.no_grad()
def _seconds_per_sequence(model: PreTrainedModel, rows: Rows) -> float:
    ids = rows.ids[:1].to(model.device)
    model(input_ids=ids, use_cache=False)
    begun = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    return time.perf_counter() - begun


def _estimate(plan: ShrinkPlan, size: Size, seconds: float) -> str:
    """The steps, and an estimate of their minutes, by the time of one sequence."""
    passes = plan.trials * 2 * plan.rows * _TRIAL_ROW + 2 * plan.rows * _MEASURED_ROW
    steps = []
    if plan.train != "none":
        passes += (count := plan.steps or RECIPES[HIDE].steps) * _SELECTOR_STEP
        steps.append(f"{count} steps of selectors")
    steps.append(f"{plan.trials} trials of budgets")
    if plan.train == "lora":
        passes += (count := plan.steps or RECIPES[EVICT].steps) * _LORA_STEP
        steps.append(f"{count} steps of LoRA")
    return (
        f"{plan.ratio:g} × fewer bytes than {size_in_words(size.bf16_nbytes)} in bf16: "
        f"{size.tokens} of {plan.length} tokens per layer\n"
        f"{', '.join(steps)}: about {max(1, round(passes * seconds / 60))} minutes on this "
        "machine; stopped, the same command goes on"
    )


@torch.no_grad()
def _measured(model: PreTrainedModel, held_out: Rows, folder: str) -> ShrinkResult:
    """Bytes, loss and time of an adapter's cache, on held-out sequences."""
    (rows, length), eviction = held_out.ids.shape, conversion_of(model).eviction
    whole, small = (_perplexity(model, held_out, x) for x in (False, eviction))
    cache, full = new_cache(model), new_cache(model, False)
    times = [_seconds_per_token(model, x, held_out) for x in (full, cache)]
    counts = eviction.budgets(len(cache.layers))
    mean = sum(length if n is None else n for n in counts) / len(counts)
    return ShrinkResult(
        folder=folder, tokens=round(mean), length=length, rows=rows,
        nbytes=cache.nbytes, bf16_nbytes=cache.bf16_nbytes, whole=whole, perplexity=small,
        ms_per_token=1000 * times[1], whole_ms_per_token=1000 * times[0],
    )  # fmt: skip


def _perplexity(model: PreTrainedModel, rows: Rows, eviction: Eviction | Literal[False]) -> float:
    """Perplexity of sequences that are read in chunks with a cache."""
    total = 0.0
    for ids in rows.ids.to(model.device).split(1):
        cache = new_cache(model, eviction)
        calls = (model(x, **cache_argument(model, cache)).logits for x in ids.split(_CHUNK, 1))
        logits = torch.cat([x.float() for x in calls], dim=1)[0, :-1]
        total += cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return math.exp(total / rows.ids[:, 1:].numel())


def _seconds_per_token(model: PreTrainedModel, cache, rows: Rows) -> float:
    """Median seconds of the last tokens of a sequence, one by one, after the others in chunks."""
    ids, seconds = rows.ids[:1].to(model.device), []
    steps = min(16, ids.shape[1] // 2)
    for piece in ids[:, :-steps].split(_CHUNK, dim=1):
        model(piece, **cache_argument(model, cache))
    for token in ids[:, -steps:].split(1, dim=1):
        begun = time.perf_counter()
        model(token, **cache_argument(model, cache)).logits.sum().item()
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[len(seconds) // 2]
