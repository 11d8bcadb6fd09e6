"""Train, share out and measure a small cache, step by step; each step resumes by itself."""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
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
    device_of,
    dtype_option,
    is_converted,
    longest,
    open_model,
    open_tokenizer,
    size_in_words,
)
from heedful_lab.commands.options import RECALL
from heedful_lab.commands.shrink.options import Shrink
from heedful_lab.commands.train.inputs import digests
from heedful_lab.commands.train.options import EVICT, HIDE, RECIPES, Training
from heedful_lab.commands.train.run import train_text
from heedful_lab.records.environment import environment

ABOUT, _UNFINISHED = "shrink.json", "unfinished"
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
    out = Path(options.out)
    with only_writer(out):
        if (result := _finished(out, options)) is not None:
            return result
        model = _stock(options)
        tokenizer = open_tokenizer(options.tokenizer, options.model, model)
        size = size_for(model, options)
        work = out / _UNFINISHED
        recalls = getattr(tokenizer, "is_fast", False) and options.length >= _LEAST_RECALL
        texts = _write_texts(options, work, recalls)
        held_out = read_rows((texts.held_out,), tokenizer, options.length, options.rows)
        announce(_plan(options, model, size, held_out))
        write_whole(work / ABOUT, _to_text(options, {}))
        if options.train == "none":
            adapter = work / "base"
            replace_attention(model, "standard", attends=False)
            conversion_of(model).eviction = StreamingLLM(tokens=size.tokens)
            save_adapter(model, adapter, base=options.model)
        else:
            del model
            adapter = work / "selectors"
            _train(options, HIDE, options.model, texts, adapter, should_stop)
        _search(options, size.tokens, texts, adapter)
        if options.train == "lora":
            trained, adapter = adapter, work / "lora"
            _train(options, EVICT, str(trained), texts, adapter, should_stop)
        result = _measured(options, adapter, held_out)._replace(folder=str(out))
        for path in adapter.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy2(path, out / path.name)
        write_whole(out / ABOUT, _to_text(options, {"result": result._asdict()}))
        shutil.rmtree(work)
    return result


def _finished(out: Path, options: Shrink) -> ShrinkResult | None:
    """The result in the folder, if it has ended; raises if something else is in it."""
    for path in (out / ABOUT, out / _UNFINISHED / ABOUT):
        if not path.is_file():
            continue
        try:
            about = json.loads(path.read_text())
            same_options = about["options"] == _identity(options)
            inputs, result = about["inputs"], about.get("result")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged; choose another folder, or delete it") from None
        if not same_options or inputs != _inputs(options):
            other = "another model or text" if same_options else "other options"
            raise UserError(
                f"out={str(out)!r} holds what heedful shrink made with {other}; choose another "
                "folder, or delete this one"
            )
        return None if result is None else ShrinkResult(**result)
    others = sorted(x.name for x in out.glob("*") if not x.name.startswith("."))
    if others and others != [_UNFINISHED]:
        raise UserError(
            f"out={str(out)!r} holds {', '.join(others[:3])} and no {ABOUT}; choose another folder"
        )
    return None


def _identity(options: Shrink) -> dict:
    """Options that decide the result, as JSON has them."""
    fields = dataclasses.asdict(options)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if k != "out"}


def _inputs(options: Shrink) -> dict[str, object]:
    """Digests of all that is read."""
    return digests(options.model, options.data, options.held_out, options.tokenizer)


def _to_text(options: Shrink, more: dict) -> str:
    about = {
        "options": _identity(options), "inputs": _inputs(options), "environment": environment()
    }  # fmt: skip
    return json.dumps(about | more, indent=2) + "\n"


def _stock(options: Shrink) -> PreTrainedModel:
    """The model as it is."""
    if is_adapter(options.model) or is_converted(Path(options.model)):
        raise UserError(
            f"model {options.model!r} has a mechanism already; name the model that it stands beside"
        )
    model = stock_model(options.model, **dtype_option(options.dtype)).eval()
    room = longest(model)
    if room is not None and options.length > room:
        raise UserError(
            f"length must be at most {room}, the model's positions, got {options.length}"
        )
    return model.to(device_of(options.device))


@torch.no_grad()
def size_for(model: PreTrainedModel, options: Shrink) -> Size:
    """The number of tokens per layer that takes the bytes of the ratio.

    Raises:
        ValueError: fewer than a policy protects, or all of them.
    """
    cache = new_cache(model, False)
    model(torch.ones(1, 1, dtype=torch.long, device=model.device), **cache_argument(model, cache))
    layers, policy = cache.layers, StreamingLLM(tokens=13)
    windows = [options.length if x.map.window is None else x.map.window - 1 for x in layers]
    full = sum(
        min(options.length, seen) * x.bf16_nbytes for x, seen in zip(layers, windows, strict=True)
    )
    selects = options.train != "none"
    streams = _POSITION + (_F + _SELECTOR * model.dtype.itemsize if selects else 0)

    def nbytes(tokens: int) -> int:
        each = zip(layers, windows, strict=True)
        return sum(min(tokens, seen) * (x.whole_nbytes + streams) for x, seen in each)

    least, most = policy.sinks + policy.recent + 1, options.length
    if nbytes(least) * options.ratio > full:
        raise UserError(
            f"ratio={options.ratio:g} leaves no room for the {least} tokens that every layer keeps "
            f"of {options.length}: at most {full / nbytes(least):.1f} here; give a smaller ratio, "
            "or a larger --length"
        )
    fits = [n for n in range(least, most) if nbytes(n) * options.ratio <= full]
    if nbytes(most) * options.ratio <= full:
        raise UserError(
            f"ratio={options.ratio:g} needs no eviction at {options.length} tokens; give a larger "
            "one"
        )
    return Size(fits[-1], nbytes(fits[-1]), full)


class _Texts(NamedTuple):
    """Files of text, and whether questions about facts are made of them for training and search."""

    data: str
    held_out: str
    recalls: bool


def _write_texts(options: Shrink, work: Path, recalls: bool) -> _Texts:
    """The text to train and search on, and the held-out text, as files."""
    paths = work / "text.jsonl", work / "held-out.jsonl"
    if not (work / ABOUT).is_file():  # texts without it may be others
        documents = corpus(options.data, limit_bytes=_READ)
        if options.held_out:
            apart = corpus(options.held_out, limit_bytes=_READ)
        else:
            documents, apart = _parted(documents)
        for path, those in zip(paths, (documents, apart), strict=True):
            write_lines(path, [{"text": x.text} for x in those])
    return _Texts(*map(str, paths), recalls)


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
def _plan(options: Shrink, model: PreTrainedModel, size: Size, rows: Rows) -> str:
    """The steps, and an estimate of their minutes, by the time of one sequence."""
    ids = rows.ids[:1].to(model.device)
    model(input_ids=ids, use_cache=False)
    begun = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    passes = options.trials * 2 * options.rows * _TRIAL_ROW + 2 * options.rows * _MEASURED_ROW
    steps = []
    if options.train != "none":
        passes += (count := options.steps or RECIPES[HIDE].steps) * _SELECTOR_STEP
        steps.append(f"{count} steps of selectors")
    steps.append(f"{options.trials} trials of budgets")
    if options.train == "lora":
        passes += (count := options.steps or RECIPES[EVICT].steps) * _LORA_STEP
        steps.append(f"{count} steps of LoRA")
    minutes = passes * (time.perf_counter() - begun) / 60
    return (
        f"{options.ratio:g} × fewer bytes than {size_in_words(size.bf16_nbytes)} in bf16: "
        f"{size.tokens} of {options.length} tokens per layer\n"
        f"{', '.join(steps)}: about {max(1, round(minutes))} minutes on this machine; stopped, the "
        "same command goes on"
    )


def _train(
    options: Shrink,
    recipe: str,
    model: str,
    texts: _Texts,
    out: Path,
    should_stop: Callable[[], bool],
) -> None:
    bfloat16 = device_of(options.device).type == "cuda" or options.dtype == "bfloat16"
    train_text(
        Training(
            model=model,
            recipe=recipe,
            data=(f"{texts.data}:2", f"{RECALL}:3") if texts.recalls else (texts.data,),
            held_out=(texts.held_out,),
            out=str(out),
            steps=options.steps,
            length=options.length,
            evaluations=1,
            dtype="bfloat16" if bfloat16 else "auto",
            device=device_of(options.device).type,
            tokenizer=options.tokenizer,
            seed=options.seed,
            **({"rank": 6} if recipe == EVICT else {}),
        ),
        should_stop,
    )


def _search(options: Shrink, tokens: int, texts: _Texts, adapter: Path) -> None:
    search(
        BudgetSearch(
            str(adapter),
            data=(texts.data, RECALL) if texts.recalls else (texts.data,),
            tokens=tokens,
            length=options.length,
            rows=options.rows,
            trials=options.trials,
            dtype=options.dtype,
            device=options.device,
            tokenizer=options.tokenizer,
        )
    )


@torch.no_grad()
def _measured(options: Shrink, adapter: Path, held_out: Rows) -> ShrinkResult:
    """Bytes, loss and time of the folder's cache, on held-out sequences."""
    model = open_model(str(adapter), options.device, dtype=options.dtype, convert=False)
    eviction = conversion_of(model).eviction
    whole, small = (_perplexity(model, held_out, x) for x in (False, eviction))
    cache, full = new_cache(model), new_cache(model, False)
    times = [_seconds_per_token(model, x, held_out) for x in (full, cache)]
    counts = eviction.budgets(len(cache.layers))
    mean = sum(options.length if n is None else n for n in counts) / len(counts)
    return ShrinkResult(
        folder=str(adapter), tokens=round(mean), length=options.length, rows=options.rows,
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
