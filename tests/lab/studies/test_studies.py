"""The scripts in `benchmarks/` that train and score models, on sequences that take them seconds."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful
from heedful.nn import MultiToken, ablations
from heedful_lab.commands.models import mechanisms_named
from heedful_lab.records import UnderBudget, read
from heedful_lab.rivals.models import convert, load
from heedful_lab.tasks import TASKS, Recall, Text
from heedful_lab.tasks.samples import Recipe


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Call a script's `main` as its command would, in an empty folder and with short sequences."""
    monkeypatch.chdir(tmp_path)
    small = Recall(length=96, names=4, pool=4, references=2, instructions=1, questions=2)
    monkeypatch.setattr(Recall, "recipe", Recipe(16, 2, 2, 3, 2, 2e-3, (), held_out=4))
    monkeypatch.setitem(TASKS, "recall", type("Short", (), {"default": lambda data=(): small}))

    def call(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", *map(str, arguments)])
        importlib.import_module(f"benchmarks.{name}").main()

    return call


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_grid_of_groupings_goes_on_where_it_was(run):
    names = ["full attention", "window alone", "cif, weighted", "fixed, mean"]
    run("grouped.run", "recall", "--seeds", 1, "--only", *names[:2], "--out", "grid.jsonl")
    before = lines("grid.jsonl")
    run("grouped.run", "recall", "--seeds", 1, "--only", *names, "--out", "grid.jsonl")
    by_name = {line["name"]: line for line in lines("grid.jsonl")}
    assert lines("grid.jsonl")[:2] == before and list(by_name) == names
    full, window, _, fixed = by_name.values()
    # By hand: half a square; 20 tokens; of groups of 8 what ended 16 tokens ago, tokens after them.
    assert full["pairs"] == {"decoder": [96 * 97 / 2] * 2} and full["groups"] == {}
    assert window["pairs"]["decoder"][0] == sum(min(t + 1, 20) for t in range(96))
    far = [sum(8 * j + 7 <= t - 16 for j in range(12)) for t in range(96)]
    assert fixed["pairs"]["decoder"][1] == sum(n + t + 1 - 8 * n for t, n in enumerate(far))
    assert fixed["groups"] == {"decoder": [12.0, 12.0]}
    assert fixed["cache_nbytes"] < full["cache_nbytes"] and len(full["loss_by_position"]) == 8


def test_every_mechanism_trains_with_the_best_of_three_rates(run, monkeypatch, capsys):
    """Each has as many parameters as standard attention, to one unit of its MLPs."""
    from benchmarks.compare.run import last_loss
    from heedful.files import only_writer
    from heedful_lab.records import read_records

    monkeypatch.setattr(Recall, "recipe", Recipe(16, 2, 2, 12, 2, 2e-3, (), held_out=4))
    names = ["standard", "parallax"]
    run("compare.run", "recall", "--seeds", 1, "--only", *names, "--out", "tuned.jsonl")
    before = lines("tuned.jsonl")
    run("compare.run", "recall", "--seeds", 2, "--only", *names, "--out", "tuned.jsonl")
    assert lines("tuned.jsonl")[: len(before)] == before and not Path("tuned").exists()
    after = Path("tuned.jsonl").read_text()
    with only_writer(Path("tuned")), pytest.raises(SystemExit):
        run("compare.run", "recall", "--seeds", 3, "--out", "tuned.jsonl")
    assert "tuned is in use by" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("compare.run", "recall", "--out", "tuned")
    assert "--out must end in .jsonl, got tuned" in capsys.readouterr().err
    assert Path("tuned.jsonl").read_text() == after
    records = read_records(Path("tuned.jsonl"))
    for name in names:
        own = [x for x in records if x.mechanism == name]
        rates = {x.config["budget"]["learning_rate"]: last_loss(x) for x in own if x.seed == 100}
        assert list(rates) == [1e-3, 2e-3, 4e-3] and len(set(rates.values())) == 3
        best = min(rates, key=rates.get)
        later = [(x.seed, x.config["budget"]["learning_rate"]) for x in own if x.seed < 100]
        assert later == [(0, best), (1, best)]
    standard, parallax = (next(x for x in records if x.mechanism == name) for name in names)
    assert parallax.config["size"]["intermediate"] < 32
    assert abs(parallax.parameters - standard.parameters) <= 3 * 16 * 2 / 2


def test_the_ladder_gives_each_form_the_steps_of_its_price(run, monkeypatch):
    monkeypatch.setattr(Text, "recipe", Recipe(16, 2, 2, 12, 2, 2e-3, (), held_out=4))
    options = ("--rounds", 2, "--only", "standard", "rank 2, pairs", "--out", "ladder.jsonl")
    run("compare.ladder", "--seeds", 1, *options)
    timed, trained = lines("ladder.jsonl")[:2], lines("ladder.jsonl")[2:]
    assert [x["form"] for x in timed] == [x["form"] for x in trained]
    for one, other in zip(timed, trained, strict=True):
        assert other["steps"] == round(12 / max(1.0, one["times_standard"]))
        assert other["config"]["budget"]["learning_rate"] == 4e-3
    assert timed[0]["times_standard"] == 1 and trained[0]["steps"] == 12
    before = lines("ladder.jsonl")
    run("compare.ladder", "--seeds", 2, *options)  # times are not taken again
    assert lines("ladder.jsonl")[:4] == before and len(lines("ladder.jsonl")) == 6


@pytest.mark.parametrize("script", ["run", "overhead"])
def test_the_narrower_model_has_as_many_parameters_as_standard_attention(run, script):
    """To what one unit less of its MLPs would take away."""
    script = importlib.import_module(f"benchmarks.training.{script}")

    def parameters(name: str, config: dict) -> int:
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(config))
        convert(model, name)
        return sum(x.numel() for x in model.parameters())

    config = script.CONFIG | script.NARROWER["differential-v2, narrower"]
    standard = parameters("standard", script.CONFIG)
    assert parameters("differential-v2", script.CONFIG) > 1.05 * standard
    unit = 3 * config["hidden_size"] * config["num_hidden_layers"]
    assert 0 <= parameters("differential-v2", config) - standard < unit


def test_what_is_trained_side_by_side(run, tmp_path):
    """Rates first, then all of a seed; equal time is fewer steps of what is slow."""
    from benchmarks.training import run as training

    def planned(*changes: tuple) -> list[tuple]:
        options = argparse.Namespace(
            steps=800, seeds=2, only=["standard", "mta"], long=None, continual=None,
            ablation=False,
        )  # fmt: skip
        vars(options).update(changes)
        plan = training.plan(options, {"mta": 1.6, "standard": 1.0})
        return [tuple(x) if x.base else tuple(x)[:5] for x in plan]

    rates = [("rate", x, 100, 200, rate) for x in ("standard", "mta") for rate in training.RATES]
    assert planned() == rates + [
        run
        for seed in (0, 1)
        for run in (
            ("steps", "standard", seed, 800, None),
            ("steps", "mta", seed, 800, None),
            ("time", "mta", seed, 500, None),
        )
    ]
    narrow = "differential-v2, narrower"  # whose rates are those of the whole
    only = [("rate", "differential-v2", 100, 200, rate) for rate in training.RATES]
    only += [("steps", narrow, seed, 800, None) for seed in (0, 1)]
    assert planned(("only", [narrow])) == only
    config = training.RunSpec("steps", narrow, 0, 1).config
    assert config == training.CONFIG | {"intermediate_size": 447}
    longer = [("long", x, 0, 2000, None) for x in ("standard", "mta")]
    assert planned(("long", 2000)) == rates + longer
    going_on = [("continual", x, 0, 400, training.ADAPTED_WITH, 2000) for x in ("standard", "mta")]
    assert planned(("long", 2000), ("continual", 400)) == rates[:3] + going_on
    forms = [*training.FORMS][:2]
    in_parts = [("ablation", x, seed, 800, None) for seed in (0, 1) for x in forms]
    assert planned(("ablation", True), ("only", forms)) == rates[3:] + in_parts


def test_two_loops_take_a_step_in_turn(run, monkeypatch, tmp_path):
    """Each step of the one has two of the other around it."""
    from benchmarks.training import overhead as training_overhead

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setattr(training_overhead, "CONFIG", training_overhead.CONFIG | sizes)
    monkeypatch.setattr(training_overhead, "BATCH", 1)
    monkeypatch.setattr(training_overhead, "LENGTH", 32)
    order = []
    clock_call = training_overhead.Clock.__call__

    def noted(clock) -> bool:
        order.append(clock)
        return clock_call(clock)

    monkeypatch.setattr(training_overhead.Clock, "__call__", noted)
    ratios = training_overhead.in_turn(("plain", "standard"), 9, tmp_path)
    assert len(ratios) == 9 - 1 - training_overhead.SKIPPED - 1
    assert all(0 < x < 100 for x in ratios)
    assert len(order) == 18 and order[::2] == order[:1] * 9 and order[1::2] == order[1:2] * 9
    assert order[0] is not order[1]


def test_the_forms_of_the_ablation_are_those_of_the_paper(monkeypatch):
    from benchmarks.training import run as training
    from benchmarks.training import table as training_tables

    studied = ablations()
    *forms, (control, alone) = training.FORMS.items()
    for name, words in forms:
        assert mechanisms_named(words) == {studied[name]: None}
        assert name in training_tables.PUBLISHED
    assert control in training_tables.UNPUBLISHED
    nothing = MultiToken(None, None, mix=None, post_mix=None, input_scaling="depth")
    assert mechanisms_named(alone) == {nothing: None}


def test_what_a_model_learned_is_reported_by_layer_and_kind(run):
    from heedful_lab.commands.compare.scratch import Size, from_scratch

    task = TASKS["recall"].default()
    model = from_scratch(task, heedful.MultiToken(conv_every=2), Size(16, 2, 2), 0)
    with torch.no_grad():
        model.model.layers[1].self_attn.heedful.conv[1, -2, 4] = 0.5  # on the diagonal
    model.save_pretrained("mta")
    run("training.learned", "mta", "--out", "learned.jsonl")
    records = lines("learned.jsonl")
    patterns = {(x["layer"], x["kind"], x["number"]): x["pattern"] for x in records}
    assert patterns.pop((1, "conv", 1)) == "diagonal"
    assert set(patterns.values()) == {"near identity"}
    kinds = [(layer, kind) for layer, kind, number in patterns if number == 0]
    assert kinds == [(0, "mix"), (0, "post_mix")] + [
        (1, kind) for kind in ("conv", "post_conv", "mix", "post_mix")
    ]
    assert records[3]["values"][-2][4] == 0.5


@pytest.fixture
def trained(run) -> Path:
    """A selective model of the short sequences, as `heedful compare` leaves one."""
    from heedful_lab.commands.compare.scratch import Size, from_scratch

    task = TASKS["recall"].default()
    model = from_scratch(task, heedful.Selective(), Size(16, 2, 2), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # so that something is hidden
    model.save_pretrained("selective")
    return Path("selective")


@pytest.mark.slow
def test_a_model_is_fine_tuned_and_scored_under_small_caches(run, trained):
    """Standard attention begins with a selective model's weights, and learns to hide after it."""
    training = ("--task", "recall", "--steps", 2, "--batch", 2)
    run("small_caches.teach", trained, *training, "--mechanism", "standard", "--to", "standard")
    run("small_caches.teach", "standard", *training, "--mechanism-rate", 20, "--to", "masking")
    report = json.loads(Path("masking/taught.json").read_text())
    standard, masking = (heedful.load(x, budgets=False) for x in ("standard", "masking"))
    # An extra selector hides nothing before it has learnt: the score is that of its start.
    assert report["before"] == json.loads(Path("standard/taught.json").read_text())["after"]
    kinds = [type(m.model.layers[0].self_attn.heedful).__name__ for m in (standard, masking)]
    assert kinds == ["StandardAttention", "SelectiveAttention"]

    scored = ("--budgets", 0.5, "--rows", 4, "--batch", 2, "--out", "scored.jsonl")
    run("small_caches.run", "a=standard", "b=masking", *scored, "--by-layer", 0.5)
    records = read(Path("scored.jsonl"), UnderBudget)
    assert {x.policy for x in records if x.mechanism == "b"} > {"whole", "MostHidden", "Random"}
    searched = [x for x in records if x.policy.startswith("searched")]
    assert [x.mechanism for x in searched] == ["b"]  # what hides nothing has no such search
    budgets = [int(x) for x in searched[0].policy.split()[1].split("/")]
    assert all(13 <= x <= 96 for x in budgets) and searched[0].tokens == round(sum(budgets) / 2)
    run("small_caches.run", "a=standard", "b=masking", *scored, "--by-layer", 0.5)
    assert len(read(Path("scored.jsonl"), UnderBudget)) == len(records)


@pytest.mark.slow
def test_rivals_are_taught_and_scored_at_equal_bytes(run, trained):
    """What evicts has as many tokens as fit; what forgets within an error takes what it takes."""
    training = ("--task", "recall", "--steps", 2, "--batch", 2)
    run("small_caches.teach", trained, *training, "--mechanism", "standard", "--to", "standard")
    standard = heedful.load("standard").state_dict()
    for name in ("retention-gate", "selectors", "forgetting"):
        options = ("--mechanism", name, "--rate", 0.1, "--to", name)
        run("small_caches.teach", "standard", *training, *options)
        state = load(name).state_dict()
        frozen = all(torch.equal(state[key], x) for key, x in standard.items())
        assert frozen == (name != "forgetting")
        report = json.loads(Path(name, "taught.json").read_text())
        # A gate changes no prediction; it starts at zero, and learns.
        gates = [x for key, x in state.items() if ".retention." in key]
        assert bool(gates) == (name == "retention-gate") and all(x.any() for x in gates)
        assert not gates or report["before"] == report["after"]
    run("small_caches.teach", "forgetting", *training, "--to", "masking")  # F is not a selector's
    masking = heedful.load("masking", budgets=False).model.layers[0].self_attn.heedful
    assert type(masking).__name__ == "SelectiveAttention"
    acting = ("--mechanism", "self-pruned", "--window", 5, "--rate", 0.1, "--memory-loss", 0.5)
    run("small_caches.teach", "standard", *training, *acting, "--to", "self-pruned")
    pruned = load("self-pruned", budgets=False).model.layers[0].self_attn.heedful
    assert pruned.config.window == 5 and bool(pruned.retention.weight.any())
    report = json.loads(Path("self-pruned", "taught.json").read_text())
    assert (report["memory_loss"], report["window"]) == (0.5, 5)
    models = [f"{x}={x}" for x in ("standard", "selectors", "retention-gate", "forgetting")]
    options = ("--shares", 1, 0.5, "--rows", 2, "--batch", 2)
    run("small_caches.equal_bytes", *models, *options, "--out", "equal.jsonl")
    records = lines("equal.jsonl")
    assert {(x["model"], x["policy"]) for x in records} == {
        ("standard", "StreamingLLM"), ("standard", "TOVA"), ("standard", "Random"),
        ("standard", "TriAttention"), ("selectors", "MostHidden"), ("retention-gate", "LowestGate"),
        ("retention-gate", "LowestGate, half recent"), ("forgetting", "MostHidden"),
    }  # fmt: skip
    whole = next(x for x in records if x["share"] == 1)
    assert whole["tokens"] == 96 and whole["peak_bytes"] == whole["measure"]
    full = 2 * 2 * (2 * 16) * 96  # bytes, layers, keys and values of 16 numbers, tokens
    assert {x["bf16_bytes"] for x in records} == {full}
    budgets = [x for x in records if x["share"] is not None]
    assert len(budgets) == 8 * 2 and all(
        0.9 * x["share"] < x["peak_bytes"] / x["measure"] <= x["share"] for x in budgets
    )
    run("small_caches.equal_bytes", *models, *options, "--out", "equal.jsonl")
    assert lines("equal.jsonl") == records
    with pytest.raises(SystemExit, match="lines with rows 2, and this run has 3"):
        run("small_caches.equal_bytes", *models, "--rows", 3, "--out", "equal.jsonl")


def test_a_grid_goes_on_from_a_fine_tuned_model(run, trained):
    """The weights are those of the start: nothing is learnt in a step of no size."""
    grid = ("--seeds", 1, "--only", "full attention", "--out", "grid.jsonl")
    run("grouped.run", "recall", "--start", trained, "--steps", 1, *grid)
    run("grouped.run", "recall", "--steps", 1, *grid)
    begun, fresh = lines("grid.jsonl")
    assert begun["start"] == "selective" and fresh["start"] is None
    assert begun["loss_by_position"] != fresh["loss_by_position"]


@pytest.mark.slow
def test_the_toy_table_goes_on_and_scores_with_dropout_left_on(run, monkeypatch):
    from benchmarks.toy import run as toy_table

    steps = dict.fromkeys(toy_table.STEPS, 2)
    monkeypatch.setattr(toy_table, "STEPS", steps | {(8, "all"): 3})
    monkeypatch.setattr(toy_table, "HELD_OUT", 32)
    options = ("--seeds", 1, "--blocks", 3, "--out", "toy.jsonl")
    run("toy.run", *options, "--only", "standard")
    run("toy.run", *options)
    records = lines("toy.jsonl")
    assert [x["name"] for x in records] == ["standard"] * 6 + ["mta"] * 6
    columns = [(5, "all"), (5, "first"), (5, "last"), (8, "all"), (8, "first"), (8, "last")]
    assert [(x["letters"], x["answer"]) for x in records[:6]] == columns
    assert all(0 <= x["with_dropout"] <= 1 and x["dropout"] == 0.1 for x in records)
    run("toy.run", *options[:-1], "other.jsonl", "--only", "standard", "--letters", 5)
    other = ("--seeds", 1, "--blocks", 2, "--out", "other.jsonl", "--only", "standard")
    run("toy.run", *other, "--letters", 5)  # what has other sequences is not done yet
    assert [x["blocks"] for x in lines("other.jsonl")] == [3, 3, 3, 2, 2, 2]
    from benchmarks.toy import table as reproductions

    assert [x["steps"] for x in records[:6]] == [2, 2, 2, 3, 2, 2]
    table = reproductions.toy(Path("toy.jsonl"))
    assert "sequences of 3 blocks, 2 steps of 32 sequences (3 where N = 8, all); published" in table
    rows = [line.split(" | ") for line in table.splitlines()[2:8]]
    error = 100 * records[11]["final"]["in-distribution"]  # mta, N = 8, last
    assert rows[2][0] == "| mta" and rows[2][-1] == f"{error:.1f} % |" and rows[2][1] == "1"
    assert rows[4][0] == "| published: standard, dropout left on" and rows[5][-1] == "0.0 ± 0.0 % |"


@pytest.mark.slow
def test_training_side_by_side_goes_on_from_the_model_of_a_long_run(run, monkeypatch):
    from benchmarks.training import run as training

    monkeypatch.setattr(
        training, "CONFIG",
        training.CONFIG | {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32},
    )  # fmt: skip
    monkeypatch.setattr(training, "RATES", (1e-3,))
    text = [f"line {i}: {'the quick brown fox '[: i % 21]}jumps\n" for i in range(900)]
    Path("read.txt").write_text("".join(text[:700]))
    Path("held.txt").write_text("".join(text[700:]))
    speeds = [{"kind": "standard", "times_plain": 1.0}, {"kind": "mta", "times_plain": 2.0}]
    Path("speeds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in speeds))
    options = ("--data", "read.txt", "--held-out", "held.txt", "--out", "runs/found.jsonl")
    options += ("--steps", 8, "--batch", 1, "--length", 32, "--only", "standard", "mta")
    run("training.run", *options, "--seeds", 1, "--speeds", "speeds.jsonl")
    run("training.run", *options, "--long", 12, "--continual", 6)
    base = Path("runs/found/long-standard-0-12-0.001/training.json")
    begun = base.stat().st_mtime_ns
    run("training.run", *options, "--long", 12)
    records = lines("runs/found.jsonl")
    assert [(x["kind"], x["name"], x["steps"], len(x["curve"])) for x in records] == [
        ("rate", "standard", 2, 1), ("rate", "mta", 2, 1),
        ("steps", "standard", 8, 1), ("steps", "mta", 8, 1), ("time", "mta", 4, 1),
        ("continual", "standard", 6, 6), ("continual", "mta", 6, 6),
        ("long", "standard", 12, 6), ("long", "mta", 12, 6),
    ]  # fmt: skip
    assert {x["base"] for x in records if x["kind"] == "continual"} == {12}
    assert base.stat().st_mtime_ns == begun  # the model was there
    assert sorted(x.name for x in Path("runs/found").iterdir() if x.is_dir()) == [
        "long-mta-0-12-0.001", "long-standard-0-12-0.001",
    ]  # fmt: skip
