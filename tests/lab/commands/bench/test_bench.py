"""`heedful bench`: what it times is right, and what it cannot time it says."""

import json
from dataclasses import asdict

import pytest
import torch

from benchmarks.gpu import where_time_goes
from benchmarks.gpu.training_step import Step, measure
from heedful.ops import selective_attention
from heedful_lab.cli import main
from heedful_lab.commands.bench.cases import OURS, PASSES, call, draw
from heedful_lab.commands.bench.measure import Bench, bench, cases_here, check
from helpers.command_line import refusal, status_of


def test_bench_writes_records_and_a_table(tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    arguments = ["--lengths", "128", "--rounds", "2", "--heads", "2", "--dim", "16"]
    with pytest.raises(SystemExit) as stop:
        arguments += ["--impls", "reference", "tiled", "fused", "--passes", *PASSES]
        main(["bench", "--mechanisms", "selective", *arguments, "--no-memory", "--out", str(out)])
    assert stop.value.code == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    cases = [(r["mechanism"], r["impl"], r["pass"]) for r in records]
    each = [("sdpa", "torch"), ("selective", "reference"), ("selective", "tiled")]
    assert cases == [(*case, p) for p in ("forward", "forward+backward", "decode") for case in each]
    assert all(r["low_ms"] <= r["ms"] <= r["high_ms"] for r in records)
    output = capsys.readouterr()
    assert output.out.count("selective") == 6
    assert (
        "left out: selective fused forward, " in output.err
        and "impl='fused' does not" in output.err
    )


@pytest.mark.parametrize(
    ("there", "out", "message"),
    [
        ("notes.jsonl", "notes.jsonl", "notes.jsonl is there already: choose another name"),
        ("notes", "notes/x.jsonl", "notes is not a writable folder"),
        ("notes", ".", "out must be a file for JSON lines such as bench.jsonl, got '.'"),
        ("notes", "", "out must be a path, got an empty text"),
    ],
)
def test_bench_replaces_no_file(tmp_path, monkeypatch, capsys, there, out, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / there).write_text("mine")
    monkeypatch.setattr(
        "heedful_lab.commands.bench.measure.bench", lambda _: pytest.fail("measured")
    )
    assert message in refusal(capsys, "bench", "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_records_are_printed_though_they_cannot_be_written(tmp_path, monkeypatch, capsys):
    """A file of this name may appear while it measures."""
    out = tmp_path / "bench.jsonl"
    record = {"mechanism": "mta", "impl": "tiled", "pass": "forward", "tokens": 7, "ms": 1.0}
    record |= {"low_ms": 1.0, "high_ms": 1.0, "sdpa_ratio": 1.0, "peak_mib": None}
    record |= {"config": asdict(Bench())}

    def meanwhile(config):
        out.write_text("mine")
        return [record]

    monkeypatch.setattr("heedful_lab.commands.bench.measure.bench", meanwhile)
    assert status_of("bench", "--mechanisms", "mta", "--impls", "tiled", "--out", str(out)) == 1
    output = capsys.readouterr()
    assert "there already" in output.err and "tiled" in output.out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.jsonl"]
    assert out.read_text() == "mine"


def test_the_table_tells_the_layout_of_real_models(capsys):
    words = "--mechanisms selective --impls tiled --lengths 32 --rounds 1 --layout transposed "
    words += "--batch 4 --heads 2 --dim 16 --passes forward --no-memory"
    assert status_of("bench", *words.split()) == 0
    sizes = "batch 4, 2 heads of 16, float32, transposed q, k and v"
    assert capsys.readouterr().out.endswith(f"{sizes}\n")
    leaves = draw(Bench(layout="transposed"), "mta", 8, "forward")
    assert all(leaves[name].transpose(1, 2).is_contiguous() for name in ("q", "k", "v"))


def test_memory_that_cannot_be_measured_is_none(monkeypatch):
    monkeypatch.setattr(
        "heedful_lab.commands.bench.measure.peak_memory_mib", lambda code: float("nan")
    )
    config = Bench(mechanisms=("selective",), impls=("tiled",), lengths=(32,), passes=("forward",))
    assert [record["peak_mib"] for record in bench(config)] == [None, None]


def test_bench_does_not_time_what_is_wrong(monkeypatch):
    import heedful.ops.selective.api as api

    right = api.selective_attention_tiled

    def leaks(q, *rest, **options):
        output, *others = right(q, *rest, **options)
        return output + 1e-3, *others

    monkeypatch.setattr(api, "selective_attention_tiled", leaks)
    with pytest.raises(ValueError, match="selective tiled is wrong, not timed"):
        bench(Bench(mechanisms=("selective",), lengths=(64,), rounds=1, memory=False))


def test_bench_checks_every_mechanism():
    config = Bench(heads=4, dim=16, impls=OURS, passes=PASSES)
    check(config, cases_here(config)[0])


@pytest.mark.parametrize("impl", ["x-transformers", pytest.param("flex", marks=pytest.mark.slow)])
def test_others_implementations_compute_the_same(impl):
    config = Bench(heads=4, dim=16, impls=(impl,))
    cases, reasons = cases_here(config)
    assert [case.mechanism for case in cases][:1] == ["selective"], reasons
    check(config, cases)


def test_bench_says_when_nothing_can_run():
    with pytest.raises(ValueError, match="impls: none of flex can run these cases here"):
        bench(Bench(mechanisms=("mta",), impls=("flex",)))


@pytest.mark.parametrize("mechanism", ["mta", "mta-pre", "selective", "talking-heads"])
def test_decoding_is_the_last_row_of_the_whole(mechanism):
    config = Bench(heads=4, dim=16)
    whole, step = (draw(config, mechanism, 40, passed) for passed in ("forward", "decode"))
    assert step["q"].shape[2] == {"mta": 11, "mta-pre": 6}.get(mechanism, 1)
    if mechanism == "selective":
        before = {name: x[:, :, :-1] for name, x in whole.items()}
        step["state"] = selective_attention(**before, impl="reference").state
    torch.testing.assert_close(
        call(mechanism, "reference", step), call(mechanism, "reference", whole)[:, :, -1:]
    )


def test_where_the_time_of_a_small_call_goes():
    record = where_time_goes.measure(Bench(mechanisms=("mta",), impls=("tiled",), lengths=(70,)))
    times = [part["ms"] for part in record["parts"]]
    assert times == sorted(times, reverse=True) and sum(times) == pytest.approx(record["total_ms"])
    # Of each block: scores, mixings and values; backward all but the last again, its own eight,
    # and one per row of both kernels for four of the eight heads at a time.
    products = {part["name"]: part["calls"] for part in record["parts"]}["aten::bmm"]
    assert products == 2 * (4 + 3 + 8 + 2 * 6 * 2)


def test_training_steps_of_a_small_model():
    sizes = Step(layers=3, hidden=32, heads=4, feed_forward=48, vocabulary=50, batch=2, tokens=40,
                 steps=2)  # fmt: skip
    standard, mta = (
        measure(sizes, name, "tiled", "cpu") for name in ("unconverted", "mta-published")
    )
    extra = 3 * (2 * 4 * 4 + 8 + 8 + 1) + 1 * 2 * 4 * 66  # mixing, norm, gate; one convolved layer
    assert mta["parameters"] == standard["parameters"] + extra
    for record in (standard, mta):
        speed = record["tokens_per_second"] * record["step_ms"]
        assert speed == pytest.approx(1000 * 2 * 40) and record["peak_mib"] > 0
