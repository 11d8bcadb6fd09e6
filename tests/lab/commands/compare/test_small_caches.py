"""`heedful compare --budgets`: trained models under small caches, and what the page says of it."""

import inspect
import math
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

import heedful
import heedful_lab.commands.compare.run as room
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.look import cached_over_time
from heedful.nn import HeadShape, Selective, Standard
from heedful_lab.commands.compare import figures
from heedful_lab.commands.compare import options as comparison
from heedful_lab.commands.compare.findings import budget_tables
from heedful_lab.commands.compare.options import LEAST_TOKENS, Comparison
from heedful_lab.commands.compare.page import write_report
from heedful_lab.commands.compare.scratch import Hyperparameters, Size, from_scratch, local_global
from heedful_lab.commands.compare.setups import check_evictable
from heedful_lab.commands.compare.small_caches import bf16_bytes, plans, scored_as, under_budget
from heedful_lab.records import WHOLE, UnderBudget, read, read_records
from heedful_lab.tasks import Recall, Text
from helpers.command_line import setups_of

compare = partial(room.compare, show=write_report)  # as the command does
TEXT = Comparison(
    tasks=("text",), mechanisms=("standard", "selective", "local-global", "mta"), steps=2, batch=2,
    length=64, hidden=16, layers=4, heads=2, memory_loss=0.1, budgets=(0.5, 14), device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "text.txt"
    data.write_text("".join(f"line {i} says {i * i % 97}. " for i in range(4000)))
    out = tmp_path_factory.mktemp("compare") / "out"
    comparison = replace(TEXT, data=(str(data),))
    with pytest.warns(
        UserWarning, match="budgets: tokens cannot be evicted from the caches of mta"
    ):
        compare(comparison, out)
    return comparison, out


@torch.no_grad()
def peak_token_by_token(model, ids: torch.Tensor, eviction) -> int:
    """The most bytes that a real cache of one sequence takes."""
    cache = heedful.new_cache(model, eviction)
    for piece in ids.split(1, dim=1):
        model(input_ids=piece, cache=cache)
    return cache.peak_nbytes


@pytest.mark.slow
def test_every_policy_is_scored_at_every_budget(finished):
    _, out = finished
    scored = read(out / "budgets.jsonl", UnderBudget)
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


@pytest.mark.slow
def test_the_whole_cache_scores_what_the_run_did(finished):
    _, out = finished
    final = {r.mechanism: r.final["held-out"] for r in read_records(out / "results.jsonl")}
    for x in read(out / "budgets.jsonl", UnderBudget):
        if x.policy == WHOLE:
            assert x.value == pytest.approx(final[x.mechanism], rel=1e-5)


@pytest.mark.slow
def test_bytes_are_those_of_a_real_cache(finished):
    _, out = finished
    scored = {
        (x.mechanism, x.policy, x.tokens): x for x in read(out / "budgets.jsonl", UnderBudget)
    }
    for name, policy, tokens in (("standard", StreamingLLM, 14), ("selective", MostHidden, 32)):
        folder = "text-standard-0" if name == "standard" else "text-selective-0"
        model = heedful.load(out / "models" / folder)
        peak = peak_token_by_token(model, torch.full((1, 64), 3), policy(tokens=tokens))
        # Every layer's own peak is added, and while one has its newest token the layers before
        # have evicted one. Positions, 8 bytes each, get room for the budget before it is used.
        scores = scored[name, policy.__name__, tokens]
        assert abs(scores.peak_bytes - peak) <= 8 * tokens
    # One of four layers sees everything, the others 13 tokens; all of it with some room.
    ratio = scored["local-global", WHOLE, 64].peak_bytes / scored["standard", WHOLE, 64].peak_bytes
    assert 0.3 < ratio < 0.6


def test_compression_is_counted_against_a_full_cache_in_bf16():
    task = Text(length=40)
    expected = 2 * 2 * (2 * 16) * 40  # bytes, layers, keys and values of 16 numbers, tokens
    for mechanism in (Standard(), Standard(window=13), Selective(selector="extra")):
        model = from_scratch(task, mechanism, Size(16, 2, 2), 0).eval()
        assert bf16_bytes(model, task.length) == expected
    policy = StreamingLLM(tokens=14)
    line = scored_as(model, ("text", "standard", 0), task, policy, ({"held-out": 9.0}, 500.0, 3))
    assert line.bf16_bytes == expected
    whole = replace(line, policy=WHOLE, tokens=40, peak_bytes=2.0 * expected)
    (table,) = budget_tables([whole, line])
    assert table.title == "text, held-out: perplexity, and × smaller than bf16"
    evicted = f"9.00 ({expected / 500:.1f} ×)"
    assert table.body == [["standard", "StreamingLLM", "9.00 (0.5 ×)", evicted]]
    scored = [whole, line, replace(line, policy="TOVA", peak_bytes=1000.0)]
    (axes,) = figures.under_budgets(scored, "standard", "held-out").axes
    drawn = {round(x, 6) for curve in axes.lines for x in curve.get_xdata()}
    assert {0.5, expected / 500, expected / 1000} <= drawn
    assert "× smaller than bf16" in axes.get_xlabel()


@pytest.mark.slow
def test_a_model_of_text_has_its_tokenizer_beside_it(finished):
    _, out = finished
    tokenizer = AutoTokenizer.from_pretrained(out / "models" / "text-selective-memory-loss-0")
    assert tokenizer.encode("né") == [256, *"né".encode()]


@pytest.mark.slow
def test_the_same_command_adds_what_is_missing_and_nothing_else(finished):
    comparison, out = finished
    path = out / "budgets.jsonl"
    before = path.read_text()
    with pytest.warns(UserWarning, match="cannot be evicted from the caches of mta"):
        compare(comparison, out)
    assert path.read_text() == before
    path.write_text(before[: len(before) // 2])  # as a crash leaves it
    with (
        pytest.warns(UserWarning, match="cannot be evicted from the caches of mta"),
        pytest.warns(UserWarning, match="left out a last line that was cut off"),
        pytest.warns(UserWarning, match="removed a last line that was cut off"),
    ):
        compare(replace(comparison, budgets=(0.5, 14, 20)), out)
    assert all(UnderBudget.from_json(line) for line in path.read_text().splitlines())
    values = {x.key: x.value for x in read(path, UnderBudget)}
    old = {x.key: x.value for x in map(UnderBudget.from_json, before.splitlines())}
    assert old.items() <= values.items()
    assert {key[-1] for key in values.keys() - old.keys()} == {20}


@pytest.mark.slow
def test_the_page_shows_it(finished):
    _, out = finished
    page = (out / "report.html").read_text()
    assert "Under small KV caches" in page
    assert "text, held-out: perplexity, and × smaller than bf16" in page
    assert page.count("against the compression of its KV cache") >= 4 * 2
    assert "what each layer&#x27;s cache holds in the course of a sequence" in page
    (table,) = budget_tables(read(out / "budgets.jsonl", UnderBudget))
    assert "32 tokens" in table.head
    assert ["selective", "MostHidden"] in [row[:2] for row in table.body]


def test_a_hybrids_layers_are_local_but_for_every_fourth():
    def windows(layers: int, length: int) -> list[int | None]:
        config = local_global(layers, length)
        return [config.build(HeadShape(4, 2, 8, 32, i)).window for i in range(layers)]

    assert windows(8, 512) == [32, 32, 32, None, 32, 32, 32, None]
    assert windows(2, 100) == [13, None]
    assert windows(1, 100) == [None]


@pytest.mark.slow
def test_recall_is_scored_by_kind_of_question():
    task = Recall()
    model = from_scratch(task, Selective(), Size(16, 2, 2), 0).eval()
    policies = list(plans(model, task, (0.25, 20)))
    assert [type(x).__name__ for x in policies][:3] == [
        "StreamingLLM",
        "MostHidden",
        "StreamingLLM",
    ]
    assert {x.tokens for x in policies} == {256, 64, 20}
    final, peak, rows = under_budget(model, task, policies[1], Hyperparameters(held_out=2))
    assert list(final) == ["in-distribution", "dormant", "recent"] and rows == 2
    assert all(0 <= x <= 1 for x in final.values())
    alone = peak_token_by_token(model, task.held_out(1).input_ids, policies[1])
    assert 0 <= peak - alone <= 8  # the position that the first of two layers has evicted
    row = 2 * 16 * 4 + 4 + 8  # K and V, F, position: 64 tokens with keys, one less of the others
    assert alone <= 2 * 64 * row + 2 * 16 * 4


def test_cached_tokens_are_drawn_over_time():
    model = from_scratch(Text(length=64), Selective(), Size(16, 2, 2), 0)
    maps = cached_over_time(model, torch.randint(0, 256, (1, 40)), MostHidden(tokens=14))
    assert list(maps) == [0, 1]
    for map_ in maps.values():
        assert not map_.triu(1).any()
        assert map_.sum(1).tolist() == [*range(1, 14), *[13] * 27]
        assert map_[:, :4].tril().sum(0).tolist() == [40, 39, 38, 37]  # the sinks
    titles = [axes.get_title() for axes in figures.cached(maps).axes]
    assert titles == ["layer 0: 13 of 40 at the end", "layer 1: 13 of 40 at the end"]


def test_budgets_that_nothing_can_be_scored_under_are_refused():
    def check(*mechanisms):
        comparison = Comparison(tasks=("recall",), mechanisms=mechanisms, layers=4)
        check_evictable(setups_of(comparison))

    with pytest.raises(ValueError, match="budgets need a mechanism whose cache can evict tokens, "
                                         "and mta cannot"):  # fmt: skip
        check("mta")
    with pytest.raises(ValueError, match="and mta, grouped cannot"):
        check("mta", "grouped")
    with pytest.warns(
        UserWarning, match="budgets: tokens cannot be evicted from the caches of mta"
    ):
        check("mta", "standard")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check("talking-heads", "selective")


def test_the_least_budget_is_that_of_the_policies():
    assert StreamingLLM(tokens=LEAST_TOKENS)
    with pytest.raises(ValueError, match=r"at least sinks . recent . 1 = 13"):
        StreamingLLM(tokens=LEAST_TOKENS - 1)
    model = from_scratch(Recall(), Standard(), Size(16, 2, 2), 0)
    assert min(x.tokens for x in plans(model, Recall(), (0.001,))) == LEAST_TOKENS
    assert "layer holds at least 13" in inspect.getsource(comparison)


def test_rows_of_other_tasks_have_their_own_length(tmp_path):
    with pytest.raises(
        ValueError, match="length: sequences of Blocks are as long as what they hold"
    ):
        compare(Comparison(tasks=("blocks",), length=64), tmp_path / "out")
    assert not (tmp_path / "out").exists()
