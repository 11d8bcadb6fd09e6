"""A pretrained model under small caches: perplexity, needles and bytes of every policy.

Books that no adapter was trained on are read from a place within each, and scored against the same
model with its full cache. Needles are numbers in such a book (`heedful eval`'s). Text comes in
chunks of `--chunk` tokens, for every policy alike, so that a question is not known while the text
before it is read; after each chunk a layer evicts down to its budget. Peak bytes hold the chunk.

    python -m benchmarks.real.run smollm2 adapters/smollm2-135m-hide --books books-test \
        --tokens 512 256 128 64 --out benchmarks/real/results/cache-1024-cpu.jsonl

`by-layer` takes the `budgets.json` beside an adapter, scaled to so many tokens on average, and
`tova-by-layer` its budgets with another policy. Under `lowest-gate-recent` half of the tokens are
the newest, as gates cannot tell a token's age; `whole` is every token cached. What is in the file
already is not scored again.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.parts import command_line, read_partial
from heedful.eviction import Eviction
from heedful.files import append_line
from heedful.hf.adapter_folders import is_adapter
from heedful.hf.budgets import NAME as BUDGETS
from heedful.hf.budgets import read_budgets
from heedful.hf.cache.new import new_cache
from heedful.hf.identity import json_digest, model_identity
from heedful.hf.versions import cache_argument
from heedful_lab.commands.evaluate.answers import LanguageModel
from heedful_lab.commands.models import open_model, open_tokenizer
from heedful_lab.commands.policies import cache_dtype_of, policy_named
from heedful_lab.records.environment import environment
from heedful_lab.rivals.calibration import read_calibration
from heedful_lab.rivals.triattention import Calibration, TriAttention
from heedful_lab.tasks.background import Background, background_sentences
from heedful_lab.tasks.needles import UNWANTED, Needles, all_found

POLICIES = ("whole", "streaming-llm", "tova", "snap-kv", "h2o", "random", "window", "triattention")
HIDING = ("whole", "by-layer", "most-hidden", "tova", "streaming-llm")
DEPTHS = (0.1, 0.5, 0.9)
ROOM = 12  # tokens of an answer
SKIPPED = 4000  # characters at the beginning of a book: title, licence, contents


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+", help="MODEL or an adapter's folder")
    parser.add_argument("--books", type=Path, required=True, help="folder of books, one per file")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 256, 128, 64])
    parser.add_argument("--chunk", type=int, default=32, help="tokens that are read at a time")
    parser.add_argument("--cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--policies", nargs="+", help="default: those that the model has use for")
    parser.add_argument(
        "--calibration", type=Path, help="for triattention; benchmarks.real.calibrate"
    )
    parser.add_argument("--rows", type=int, default=10, help="books for perplexity, at most")
    parser.add_argument("--needles", type=int, default=8, help="questions per depth; 0 is none")
    parser.add_argument("--numbers", type=int, default=1, help="in a book; one of them is queried")
    options = parser.parse_args()
    if not any(options.books.glob("*.txt")):
        raise SystemExit(f"--books {options.books}: there is no .txt file in this folder")
    for name in options.models:
        measure(name, options)


def measure(name: str, options: argparse.Namespace) -> None:
    """All settings of a model that the file does not have."""
    policies = options.policies or (HIDING if is_adapter(name) else POLICIES)
    calibrated = any(policy.startswith("triattention") for policy in policies)
    model = open_model(name, budgets=False, convert=calibrated)  # which reads positions
    tokenizer = open_tokenizer(None, name, model)
    calibration = None
    if calibrated:
        if options.calibration is None:
            raise SystemExit(
                "triattention needs --calibration FILE (python -m benchmarks.real.calibrate "
                f"{name}), or leave it out of --policies"
            )
        calibration = read_calibration(options.calibration, model)
    small = product([policy for policy in policies if policy != "whole"], options.tokens)
    settings = [*([("whole", options.length)] if "whole" in policies else []), *small]
    identity = model_identity(model)
    fields = ("model", "policy", "tokens", "length", "chunk", "cache_dtype", "numbers")
    former = {"cache_dtype": "auto", "numbers": 1}  # of records without these fields
    records = read_partial(options.out)
    done = {tuple((former | x)[field] for field in fields): x for x in records}
    for policy, tokens in tqdm(settings, desc=name):
        common = (options.length, options.chunk, options.cache_dtype, options.numbers)
        setting = (name, policy, tokens, *common)
        eviction = eviction_of(policy, model, name, tokens, calibration)
        own = json_digest([identity, repr(eviction)])
        if setting in done:
            check_size(done[setting], options)
            if done[setting].get("identity", own) != own:  # earlier records have none
                raise SystemExit(
                    f"{options.out} has {name} under {policy} with other weights, another adapter "
                    "or other budgets: choose another --out"
                )
            continue
        line = dict(zip(fields, setting, strict=True)) | {"identity": own}
        line |= perplexity(model, eviction, rows(tokenizer, options), options)
        if options.needles:
            line["hits"] = needles(model, tokenizer, eviction, options)
            line["needles"] = {x: sum(hits) / len(hits) for x, hits in line["hits"].items()}
        line |= {"peak_nbytes": peak_nbytes(model, eviction, options)}
        append_line(options.out, json.dumps(line | {"environment": environment()}))


def check_size(record: dict, options: argparse.Namespace) -> None:
    """Raise where a setting that is in the file was scored on more or less than is requested."""
    questions = len(next(iter(record.get("hits", {"": []}).values())))
    sizes = {"books": (len(record["nats"]), min(options.rows, len(book_paths(options))))}
    if "hits" in record or "needles" not in record:  # earlier records do not tell
        sizes["--needles"] = (questions, options.needles)
    for name, (before, now) in sizes.items():
        if before != now:
            raise SystemExit(
                f"{options.out} has {record['model']} under {record['policy']} with {before} for "
                f"{name}, and this is {now}: choose another --out"
            )


def eviction_of(
    policy: str,
    model: PreTrainedModel,
    name: str,
    tokens: int,
    calibration: Calibration | None = None,
) -> Eviction | None:
    """A policy with so many tokens per layer, of all of them or on average."""
    if policy == "whole":
        return None
    if policy == "triattention":
        return TriAttention(tokens, calibration=calibration)
    if policy.endswith("-recent"):
        return policy_named(policy.removesuffix("-recent"), model, tokens, recent=tokens // 2)
    if not policy.endswith("by-layer"):
        return policy_named(policy, model, tokens)
    eviction = read_budgets(Path(name) / BUDGETS, model)
    scale = tokens * len(eviction.tokens) / sum(eviction.tokens)
    least = eviction.sinks + eviction.recent + 1
    budgets = tuple(max(least, int(scale * n)) for n in eviction.tokens)
    if policy != "by-layer":
        other = policy.removesuffix("-by-layer")
        eviction = eviction_of(other, model, name, tokens, calibration)
    return replace(eviction, tokens=budgets)


def book_paths(options: argparse.Namespace) -> list[Path]:
    """The files of the folder, by name."""
    return sorted(options.books.glob("*.txt"))


def rows(tokenizer, options: argparse.Namespace) -> Iterator[Tensor]:
    """The tokens of each book, `[1, T]`, from behind its beginning."""
    for path in book_paths(options)[: options.rows]:
        text = path.read_text()[SKIPPED : SKIPPED + 16 * options.length]
        yield torch.tensor([tokenizer(text, verbose=False)["input_ids"][: options.length]])


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    eviction: Eviction | None,
    sequences: Iterator[Tensor],
    options: argparse.Namespace,
) -> dict:
    """Of all books together, and the nats of each."""
    nats, dtype = [], cache_dtype_of(options.cache_dtype)
    for ids in sequences:
        cache = new_cache(model, eviction or False, dtype=dtype)
        calls = ids.split(options.chunk, dim=1)
        logits = [model(x, **cache_argument(model, cache)).logits[0].float() for x in calls]
        nats.append(cross_entropy(torch.cat(logits)[:-1], ids[0, 1:]).item())
    return {"perplexity": math.exp(sum(nats) / len(nats)), "nats": nats}


def needles(
    model: PreTrainedModel, tokenizer, eviction: Eviction | None, options: argparse.Namespace
) -> dict[str, list[bool]]:
    """Test which numbers are found, by depth."""

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    paths = [str(path) for path in book_paths(options)]
    background = Background(background_sentences(paths, 8 * options.length, UNWANTED), count)
    dtype = cache_dtype_of(options.cache_dtype)
    writer = LanguageModel(model, tokenizer, eviction or False, options.chunk, dtype)
    hits = {}
    for depth in DEPTHS:
        questions = Needles(options.length, options.numbers, depth).sample(
            options.needles, 0, background, count
        )
        prompts = [tokenizer(x.prompt)["input_ids"] for x in questions]
        replies = [writer.write([prompt], ROOM)[0] for prompt in prompts]
        pairs = zip(replies, questions, strict=True)
        hits[f"{depth:g}"] = [all_found(reply, x.answers) for reply, x in pairs]
    return hits


@torch.no_grad()
def peak_nbytes(
    model: PreTrainedModel, eviction: Eviction | None, options: argparse.Namespace
) -> int:
    """The most bytes of the cache, of a text that is read in chunks and one token more."""
    cache = new_cache(model, eviction or False, dtype=cache_dtype_of(options.cache_dtype))
    ids = torch.arange(options.length)[None] % 997 + 3
    for part in (*ids[:, :-1].split(options.chunk, 1), ids[:, -1:]):
        model(input_ids=part, **cache_argument(model, cache))
    return cache.peak_nbytes


if __name__ == "__main__":
    main()
