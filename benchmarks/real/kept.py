"""Tokens that an adapter keeps: by kind of word, age and surprise, per layer.

Books are read under a budget, and after their last token the tokens that each layer has cached are
compared with all that it has read. A share above 1 says that a kind is kept more often than
others.

    python -m benchmarks.real.kept adapters/smollm2-135m-hide --books books-test --tokens 128 \
        --out benchmarks/real/results/kept-cpu.jsonl
"""

import json
import re
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from benchmarks.parts import command_line
from benchmarks.real.run import rows
from heedful.eviction import MostHidden
from heedful.files import append_line
from heedful.hf.look import cached_over_time
from heedful_lab.commands.models import open_model, open_tokenizer
from heedful_lab.records.environment import environment

WORDS = (
    "a about after all an and any are as at be been but by can could did do for from had has have "
    "he her him his i if in into is it its may me more my no nor not of on or our out she should "
    "so some than that the their them then there these they this those to up upon was we were what "
    "when which who will with would you your"
)
FUNCTION = frozenset(WORDS.split())
AGES = (32, 128, 512)
NEWEST, FIRST = 8, 4  # kept by every policy, and not counted


def main() -> None:
    parser = command_line(__doc__, new=True)
    parser.add_argument("model", help="an adapter's folder")
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=3, help="books")
    options = parser.parse_args()
    model = open_model(options.model, budgets=False)
    tokenizer = open_tokenizer(None, options.model, model)
    counts: dict[tuple[int, str, str], list[int]] = {}
    for ids in tqdm(list(rows(tokenizer, options)), desc="books"):
        spelled = [tokenizer.decode([token]) for token in ids[0].tolist()]
        labels = labels_of(spelled, surprise(model, ids))
        cached = cached_over_time(model, ids, MostHidden(tokens=options.tokens))
        for layer, states in cached.items():
            kept = states[-1].tolist()
            for token in range(FIRST, len(labels) - NEWEST):
                for group, label in labels[token].items():
                    pair = counts.setdefault((layer, group, label), [0, 0])
                    pair[0] += kept[token]
                    pair[1] += 1
    for (layer, group, label), (kept, total) in sorted(counts.items()):
        line = {"layer": layer, "group": group, "label": label, "kept": kept, "total": total}
        line |= {"model": options.model, "tokens": options.tokens, "length": options.length}
        append_line(options.out, json.dumps(line | {"environment": environment()}))


@torch.no_grad()
def surprise(model, ids: torch.Tensor) -> list[float]:
    """The nats of each token under the model with its full cache; 0 for the first."""
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return [0.0, *cross_entropy(logits, ids[0, 1:], reduction="none").tolist()]


def labels_of(spelled: list[str], nats: list[float]) -> list[dict[str, str]]:
    """Of each token its kind, its age at the end of the text, and how surprising it was."""
    limits = torch.tensor(nats).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    labels = []
    for token, (word, nat) in enumerate(zip(spelled, nats, strict=True)):
        age = len(spelled) - 1 - token
        bucket = next((f"below {most}" for most in AGES if age < most), f"{AGES[-1]} and more")
        quarter = ("least", "less", "more", "most")[sum(nat > limit for limit in limits)]
        labels.append({"kind": kind_of(word), "age": bucket, "surprise": quarter})
    return labels


def kind_of(word: str) -> str:
    """By its spelling alone: of a tokenizer whose words begin with a space."""
    bare = word.strip()
    if not bare:
        return "line break"
    if re.fullmatch(r"[^\w\s]+", bare):
        return "punctuation"
    if any(c.isdigit() for c in bare):
        return "number"
    if not word[0].isspace() and bare[0].islower():
        return "word's end"
    if bare.lower() in FUNCTION:
        return "function word"
    return "name" if bare[0].isupper() else "other word"


if __name__ == "__main__":
    main()
