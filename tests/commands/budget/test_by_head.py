"""`heedful budget --by-head`: the tokens of layers shared out among key heads."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import heedful
from heedful.commands.budget.by_head import LOG, search_by_head
from heedful.commands.budget.options import BudgetSearch
from heedful.commands.budget.rows import Rows, perplexity, read_rows
from heedful.commands.budget.search import format_result, search
from heedful.data import ByteTokenizer
from heedful.eviction import MostHidden
from heedful.hf.budgets import write_budgets
from heedful.nn import Selective
from helpers.command_line import refusal
from helpers.small_models import small

TEXT = 2 * "".join(f"{a} has a {b} {c}. the {c} of {a} is {b}. " for a in ("ann", "bob", "eve")
               for b in ("red", "blue", "old") for c in ("bus", "car", "hat", "dog"))  # fmt: skip
LENGTH, ROWS = 96, 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A model with selectors of its own that has seen the text, and layers' budgets."""
    root = tmp_path_factory.mktemp("by-head")
    (root / "text.txt").write_text(TEXT)
    model = small(layers=2, vocabulary=256)
    heedful.convert(model, Selective(selector="extra", dim=4))
    rows = read_rows((str(root / "text.txt"),), ByteTokenizer(), 64, 32).ids
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    for step in range(80):
        batch = rows[step * 8 % 32 :][:8]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(root / "model")
    search(options_for(root, tokens=20, trials=6, sinks=1, recent=4))
    return root


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A copy that may be written to."""
    return shutil.copytree(trained, tmp_path / "here")


def options_for(folder: Path, **options) -> BudgetSearch:
    return BudgetSearch(
        str(folder / "model"), data=(str(folder / "text.txt"),), length=LENGTH, rows=ROWS,
        tokenizer="bytes", **options,
    )  # fmt: skip


def test_the_sum_stays_and_perplexity_falls(folder):
    model = heedful.load(folder / "model")
    layers = model._heedful.eviction
    ids = read_rows((str(folder / "text.txt"),), ByteTokenizer(), LENGTH, ROWS).ids
    rows = Rows(ids, ids)
    result = search_by_head(options_for(folder, by_head=True))
    heads = result.eviction.tokens
    assert [len(x) for x in heads] == [2, 2]
    assert sum(map(sum, heads)) <= 2 * sum(layers.tokens)
    assert min(map(min, heads)) >= 6
    assert len({n for layer in heads for n in layer}) > 2
    assert result.perplexity == pytest.approx(perplexity(model, rows, result.eviction), rel=1e-4)
    assert result.perplexity < perplexity(model, rows, layers)
    assert result.whole == pytest.approx(perplexity(model, rows), rel=1e-4)
    again = heedful.load(folder / "model")
    assert again._heedful.eviction == result.eviction
    lines = format_result(result).splitlines()
    assert lines[1].split()[1:3] == [str(n) for n in heads[0]]
    assert str(round(sum(map(sum, heads)) / 2)) in lines[3]


def test_a_search_goes_on(folder, monkeypatch):
    """With a higher number of trials, and not again once it has ended."""
    once = search_by_head(options_for(folder, by_head=True, trials=2))
    whole = search_by_head(options_for(folder, by_head=True))
    assert not once.ended and whole.ended
    assert 1 <= whole.measured == whole.trials - once.trials
    lines = [json.loads(x) for x in (folder / "model" / LOG).read_text().splitlines()]
    measured = [str(x["of"]) for x in lines if "savings" in x]
    assert len(measured) == len(set(measured)) >= 1
    monkeypatch.setattr("heedful.commands.budget.by_head.head_savings", None)
    again = search_by_head(options_for(folder, by_head=True))
    assert again.measured == 0 and again.eviction == whole.eviction
    about = json.loads((folder / "model" / "budgets.json").read_text())["about"]
    assert about["limit"] == "as many tokens as the budgets before it"
    assert all(isinstance(n, int) for n in about["tokens before"])


def test_a_second_search_begins_where_the_first_has_ended(folder):
    first = search_by_head(options_for(folder, by_head=True))
    second = search_by_head(options_for(folder, by_head=True, restart=True))
    assert second.perplexity <= first.perplexity


def test_bad_input_is_refused(folder, capsys):
    (folder / "model" / "budgets.json").unlink()
    with pytest.raises(ValueError, match=r"budgets\.json is not there; search budgets of layers"):
        search_by_head(options_for(folder, by_head=True))
    with pytest.raises(ValueError, match="leave tokens and eviction and recent out"):
        options_for(folder, by_head=True, tokens=20, recent=4, eviction="random")
    data = "--data", folder / "text.txt", "--tokenizer", "bytes", "--length", "96"
    message = refusal(capsys, "budget", folder / "model", "--by-head", *data)
    assert "is not there; search budgets of layers first" in message
    assert not (folder / "model" / LOG).exists()


def test_budgets_of_longer_sequences_are_refused(folder):
    """Within shorter ones the sum could not stay."""
    model = heedful.load(folder / "model", budgets=False)
    write_budgets(folder / "model" / "budgets.json", MostHidden(tokens=(97, 20)), model, {})
    with pytest.raises(ValueError, match="length must be at least the 97 tokens"):
        search_by_head(options_for(folder, by_head=True))
    assert not (folder / "model" / LOG).exists()


def test_other_policies_are_refused(folder):
    (folder / "model" / "budgets.json").unlink()
    layers = {"eviction": "streaming-llm", "sinks": 1, "recent": 4}
    search(options_for(folder, tokens=20, trials=2, restart=True, **layers))
    with pytest.raises(ValueError, match="eviction must be MostHidden or LowestGate"):
        search_by_head(options_for(folder, by_head=True))
    assert not (folder / "model" / LOG).exists()
