"""Saved folders and pickled caches go from one version of transformers to another.

Run by two interpreters with different versions, in both directions:

    PYTHONPATH=tests .venv-oldest/bin/python -m helpers.exchange write FOLDER
    PYTHONPATH=tests .venv/bin/python -m helpers.exchange read FOLDER
"""

import sys
from pathlib import Path

import torch
import transformers

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.budgets import write_budgets
from heedful.hf.versions import cache_argument
from helpers.encoder_families import tiny as tiny_pair
from helpers.families import tiny

IDS = torch.arange(3, 23)[None]
FAMILIES = ("llama", "gemma2", "gpt_neox", "gpt_oss", "mistral")
MECHANISMS = ("mta", "selective", "differential")
POLICIES = {"selective": MostHidden(tokens=15), "differential": StreamingLLM(tokens=15)}


def cases() -> list[tuple[str, str]]:
    return [(family, name) for family in FAMILIES for name in MECHANISMS]


@torch.no_grad()
def write(folder: Path) -> None:
    """Models with their logits, and a cache in the middle of its text."""
    for family, name in cases():
        torch.manual_seed(0)
        model, place = tiny(family, dtype=torch.float32), folder / f"{family}-{name}"
        try:
            heedful.convert(model, name)
        except ValueError:
            continue  # a family that caps logits or has sinks, and a mechanism that does not
        model.save_pretrained(place)
        policy = POLICIES.get(name)
        if policy is not None:
            write_budgets(place / "budgets.json", policy, model, {})
        cache = heedful.new_cache(model, policy)
        torch.save({"out": run(model, cache), "cache": cache}, place / "state.pt")
    torch.manual_seed(0)
    pair = tiny_pair("t5").float()
    heedful.convert(pair, "mta")
    pair.save_pretrained(folder / "t5")
    torch.save({"out": pair(input_ids=IDS, decoder_input_ids=IDS).logits}, folder / "t5/state.pt")


@torch.no_grad()
def run(model, cache) -> dict:
    """Logits without a cache, and with one that evicts."""
    whole = model(input_ids=IDS, use_cache=False).logits
    return {"whole": whole, "steps": model(input_ids=IDS, **cache_argument(model, cache)).logits}


@torch.no_grad()
def read(folder: Path) -> None:
    """What was written gives the same here, or is refused by name."""
    places = sorted(path.parent for path in folder.rglob("state.pt"))
    assert len(places) > 12, places
    for place in places:
        model = heedful.load(place)
        state = torch.load(place / "state.pt", weights_only=False)
        if place.name == "t5":
            actual = model(input_ids=IDS, decoder_input_ids=IDS).logits
            torch.testing.assert_close(actual, state["out"], rtol=0, atol=1e-5)
            continue
        own, inputs = heedful.new_cache(model), state["cache"]
        for key, x in run(model, own).items():
            torch.testing.assert_close(x, state["out"][key], rtol=0, atol=1e-5)
        assert own.nbytes == inputs.nbytes and own.tokens == inputs.tokens
        options = {"input_ids": IDS[:, :1]}
        actual = model(**options, **cache_argument(model, inputs)).logits
        expected = model(**options, **cache_argument(model, own)).logits
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    print(f"{len(places)} folders and caches read with transformers {transformers.__version__}")


if __name__ == "__main__":
    _, direction, folder = sys.argv
    {"write": write, "read": read}[direction](Path(folder))
