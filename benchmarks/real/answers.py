"""Conversations under small caches: what a model answers, judged by the base with its full cache.

Each question comes before or behind a passage of a book that no adapter was trained on. Answers are
greedy. The base then reads each of them behind its conversation: a perplexity near that of its own
answers says that it could have written them too.

    python -m benchmarks.real.answers smollm2 adapters/smollm2-135m-hide --books books-test \
        --tokens 120 --policies by-layer --out runs/answers.jsonl

Every model also answers with its full cache. Settings that the file has already are skipped; a
file of other conversations is refused.
"""

import argparse
import json
from itertools import product
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.parts import check_same, command_line, positive, read_partial
from benchmarks.real.chats import prompts
from benchmarks.real.run import HIDING, POLICIES, eviction_of
from heedful.files import append_line
from heedful_lab.commands.evaluate.answers import LanguageModel
from heedful_lab.commands.models import open_model, open_tokenizer
from heedful_lab.commands.policies import cache_dtype_of
from heedful_lab.records.environment import environment

CHUNK = 32  # tokens that are read at a time
CHOICES = sorted({*POLICIES, *HIDING} - {"triattention"})  # which needs a calibration


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("base", help="MODEL that judges, with a chat template")
    parser.add_argument("models", nargs="*", help="MODEL or an adapter's folder; default: the base")
    parser.add_argument("--books", type=Path, required=True, help="folder of books, one per file")
    parser.add_argument("--conversations", type=positive, default=10)
    parser.add_argument("--words", type=positive, nargs=2, default=(300, 560), help="of a passage")
    parser.add_argument("--reply-tokens", type=positive, default=96)
    parser.add_argument("--policies", nargs="+", choices=CHOICES, default=[])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[128])
    parser.add_argument("--cache-dtype", choices=("auto", "int8"), default="auto")
    options = parser.parse_args()
    if not any(options.books.glob("*.txt")):
        raise SystemExit(f"--books {options.books}: there is no .txt file in this folder")
    if options.words[0] > options.words[1]:
        parser.error(f"--words must be in ascending order, got {options.words}")
    try:
        base = open_model(options.base, budgets=False)
        vocabulary = open_tokenizer(None, options.base, base).get_vocab()
        for name in options.models or [options.base]:
            model = open_model(name, budgets=False)
            tokenizer = open_tokenizer(None, name, model)
            if tokenizer.get_vocab() != vocabulary:
                raise ValueError(
                    f"model {name!r} has other tokens than {options.base!r}, its judge"
                )
            record(name, model, tokenizer, base, options)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def record(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: PreTrainedModel,
    options: argparse.Namespace,
) -> None:
    """Write down a model's answers in all settings that the file does not have."""
    about = {
        "conversations": options.conversations,
        "words": list(options.words),
        "reply_tokens": options.reply_tokens,
    }
    check_same(options.out, about)
    settings = [("whole", None), *product(options.policies, options.tokens)]
    evictions = [eviction_of(policy, model, name, tokens) for policy, tokens in settings]
    questions = prompts(options.books, options.conversations, tuple(options.words))
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": x}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for x in questions
    ]
    judge, dtype = LanguageModel(base, tokenizer), cache_dtype_of(options.cache_dtype)
    fields = ("model", "policy", "tokens", "cache_dtype")
    done = {tuple(x[field] for field in fields) for x in read_partial(options.out)}
    for (policy, tokens), eviction in zip(settings, evictions, strict=True):
        setting = (name, policy, tokens, options.cache_dtype)
        if setting in done:
            continue
        writer = LanguageModel(model, tokenizer, eviction or False, CHUNK, dtype)
        line = dict(zip(fields, setting, strict=True)) | about | {"answers": []}
        for question, chat in zip(questions, tqdm(chats, desc=f"{name}, {policy}"), strict=True):
            reply = writer.write([chat], options.reply_tokens)[0]
            ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
            (likelihood,) = judge.read([[*chat, *ids]])
            nats = likelihood.nats[len(chat) - 1 :].tolist()
            line["answers"].append({"question": question, "reply": reply, "nats": nats})
        append_line(options.out, json.dumps(line | {"environment": environment()}))


if __name__ == "__main__":
    main()
