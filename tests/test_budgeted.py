"""`heedful compare --budgets`: trained models under small caches, and what the page says of it."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

import heedful
import heedful.experiments.compare as room
from heedful.cli import write_page
from heedful.eviction import MostHidden, StreamingLLM
from heedful.experiments.budgeted import plans, under_budget
from heedful.experiments.comparison import Comparison
from heedful.experiments.train import Budget, Size, from_scratch, local_global
from heedful.hf.look import held
from heedful.nn import Selective, Standard
from heedful.records import read_records
from heedful.records.budgeted import WHOLE, UnderBudget, read_budgeted
from heedful.report.budgets import HeldExhibit, pictures, tables
from heedful.report.budgets import held as draw_held
from heedful.tasks import Recall, Text

compare = partial(room.compare, show=write_page)  # as the command does
TEXT = Comparison(
    tasks=("text",), mechanisms=("standard", "selective", "local-global", "mta"), steps=2, batch=2,
    length=64, hidden=16, layers=4, heads=2, memory_loss=0.1, budgets=(0.5, 14), device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "text.txt"
    data.write_text("".join(f"line {i} says {i * i % 97}. " for i in range(4000)))
    out = tmp_path_factory.mktemp("compare") / "out"
    asked = replace(TEXT, data=(str(data),))
    compare(asked, out)
    return asked, out


def test_every_policy_is_scored_at_every_budget(finished):
    _, out = finished
    scored = read_budgeted(out / "budgets.jsonl")
    keys = {(x.mechanism, x.policy, x.tokens) for x in scored}
    assert len(keys) == len(scored)
    general = {"StreamingLLM", "TOVA", "H2O", "SnapKV", "Random"}
    for name in ("standard", "local-global"):
        expected = {(name, WHOLE, 64)} | {(name, p, n) for p in general for n in (32, 14)}
        assert {key for key in keys if key[0] == name} == expected
    for name in ("selective", "selective + memory loss"):
        assert {key[1] for key in keys if key[0] == name} == general | {WHOLE, "MostHidden"}
    assert not any(name == "mta" for name, *_ in keys)  # neighbours of evicted keys
    for x in scored:
        assert x.length == 64 and x.metric == "perplexity" and x.rows == 64
        assert math.isfinite(x.value) and x.environment["versions"]


def test_the_whole_cache_scores_what_the_run_did(finished):
    _, out = finished
    final = {r.mechanism: r.final["held-out"] for r in read_records(out / "results.jsonl")}
    for x in read_budgeted(out / "budgets.jsonl"):
        if x.policy == WHOLE:
            assert x.value == pytest.approx(final[x.mechanism], rel=1e-5)


def test_bytes_are_those_of_a_real_cache(finished):
    _, out = finished
    scored = {(x.mechanism, x.policy, x.tokens): x for x in read_budgeted(out / "budgets.jsonl")}
    for name, policy, tokens in (("standard", StreamingLLM, 14), ("selective", MostHidden, 32)):
        folder = "text-standard-0" if name == "standard" else "text-selective-0"
        model = heedful.load(out / "models" / folder)
        cache = heedful.new_cache(model, policy(tokens=tokens))
        with torch.no_grad():
            for _ in range(64):
                model(input_ids=torch.tensor([[3]]), past_key_values=cache)
        assert scored[name, policy.__name__, tokens].peak_bytes == pytest.approx(
            cache.peak_nbytes, rel=0.05
        )
    # One of four layers sees everything, the others 13 tokens; all of it with some room.
    ratio = scored["local-global", WHOLE, 64].peak_bytes / scored["standard", WHOLE, 64].peak_bytes
    assert 0.3 < ratio < 0.6


def test_a_model_of_text_has_its_tokenizer_beside_it(finished):
    _, out = finished
    tokenizer = AutoTokenizer.from_pretrained(out / "models" / "text-selective-memory-loss-0")
    assert tokenizer.encode("né") == [256, *"né".encode()]


def test_the_same_command_adds_what_is_missing_and_nothing_else(finished):
    asked, out = finished
    path = out / "budgets.jsonl"
    before = path.read_text()
    compare(asked, out)
    assert path.read_text() == before
    path.write_text(before[: len(before) // 2])  # as a crash leaves it
    compare(replace(asked, budgets=(0.5, 14, 20)), out)
    found = {x.key: x.value for x in read_budgeted(path)}
    old = {x.key: x.value for x in map(UnderBudget.from_json, before.splitlines())}
    assert old.items() <= found.items()
    assert {key[-1] for key in found.keys() - old.keys()} == {20}


def test_the_page_shows_it(finished):
    _, out = finished
    page = (out / "report.html").read_text()
    assert "Under small KV caches" in page
    assert "text, held-out: perplexity, and × less peak memory" in page
    assert page.count("against the peak bytes of its KV cache for one row") >= 4 * 2
    assert "what each layer&#x27;s cache holds in the course of a row" in page
    scored = read_budgeted(out / "budgets.jsonl")
    made = tables(scored, markdown=True)
    assert "| selective | MostHidden | " in made and "| 32 tokens | " in made
    assert len(pictures(scored)) == 4


def test_a_hybrids_layers_are_local_but_for_every_fourth():
    assert local_global(8, 512) == {Standard(window=32): (0, 1, 2, 4, 5, 6), Standard(): (3, 7)}
    assert local_global(2, 100) == {Standard(window=13): (0,), Standard(): (1,)}
    assert local_global(1, 100) == {Standard(): (0,)}


def test_recall_is_scored_by_kind_of_question():
    task = Recall()
    model = from_scratch(task, Selective(), Size(16, 2, 2), 0).eval()
    made = list(plans(model, task, (0.25, 20)))
    assert [type(x).__name__ for x in made][:3] == ["StreamingLLM", "MostHidden", "StreamingLLM"]
    assert {x.tokens for x in made} == {256, 64, 20}
    final, peak, rows = under_budget(model, task, made[1], Budget(held_out=2))
    assert list(final) == ["in-distribution", "dormant", "recent"] and rows == 2
    assert all(0 <= x <= 1 for x in final.values())
    assert peak == pytest.approx(2 * 64 * (2 * 16 * 4 + 4 + 8), rel=0.15)


def test_what_is_held_is_drawn_over_time():
    model = from_scratch(Text(length=64), Selective(), Size(16, 2, 2), 0)
    maps = held(model, torch.randint(0, 256, (1, 40)), MostHidden(tokens=14))
    assert list(maps) == [0, 1]
    for shown in maps.values():
        assert not shown.triu(1).any()
        assert shown.sum(1).tolist() == [*range(1, 14), *[13] * 27]
        assert shown[:, :4].tril().sum(0).tolist() == [40, 39, 38, 37]  # the sinks
    figure, text = draw_held(HeldExhibit("text", "selective", "MostHidden", 14, maps))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["layer 0: 13 of 40 at the end", "layer 1: 13 of 40 at the end"]
    assert "under MostHidden with 14 tokens" in text


WRONG = {
    "budgets must be shares of a row such as 0.25, or numbers of tokens above 1, got -1": {
        "tasks": ("text",), "budgets": (-1,)},
    "budgets are for the tasks text and recall": {"tasks": ("parity",), "budgets": (0.5,)},
    "tokenizer is for the task 'text'": {"tasks": ("recall",), "tokenizer": "bpe"},
    "length must be a whole number of at least 1, got 0": {"length": 0},
    "tokenizer must be one of 'byte', 'bpe', got 'bp'; did you mean 'bpe'": {"tokenizer": "bp"},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_refused(message):
    with pytest.raises(ValueError, match=message):
        Comparison(**WRONG[message])


def test_rows_of_other_tasks_have_their_own_length(tmp_path):
    with pytest.raises(ValueError, match="length: rows of Blocks are as long as what they hold"):
        compare(Comparison(tasks=("blocks",), length=64), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_records_of_a_file_that_was_cut_off_are_read(tmp_path):
    path = tmp_path / "budgets.jsonl"
    line = UnderBudget("text", "m", 0, WHOLE, 64, 64, "perplexity", {"x": 2.0}, 9.0, 3, {})
    path.write_text(line.to_json() + "\n" + line.to_json()[:40])
    assert read_budgeted(path) == [line]
    assert json.loads(line.to_json())["final"] == {"x": 2.0}
    assert read_budgeted(tmp_path / "none") == []
