"""The main job end to end, at a size that takes seconds."""

import errno
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from heedful import files
from heedful.nn import MultiToken, from_json, to_json
from heedful.training.run import Stopped
from heedful_lab.commands.compare.findings import overview
from heedful_lab.commands.compare.options import Comparison
from heedful_lab.commands.compare.page import write_report
from heedful_lab.commands.compare.run import compare, kept
from heedful_lab.commands.compare.scratch import Size
from heedful_lab.commands.compare.setups import setups
from heedful_lab.records import read_records
from heedful_lab.rivals.models import load
from heedful_lab.rivals.table import mechanism
from heedful_lab.tasks import TASKS
from helpers.command_line import change_setups, refusal, setups_of

paged = partial(compare, show=write_report)  # as the command does, for tests of the page

TINY = Comparison(
    tasks=("blocks", "parity"), mechanisms=("standard", "mta", "selective"), steps=2, batch=2,
    device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small():
    """A small evaluation set and narrow models: scoring is what takes the time here."""
    with pytest.MonkeyPatch.context() as patch:
        change_setups(patch, lambda size: Size(16, size.layers, size.heads), held_out=4)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    return out, paged(TINY, out)


def test_every_run_is_recorded_with_its_environment(finished):
    out, records = finished
    keys = [(r.task, r.mechanism, r.seed) for r in records]
    assert keys == [(task, mechanism, 0) for task in TINY.tasks for mechanism in TINY.mechanisms]
    assert read_records(out / "results.jsonl") == records
    for record in records:
        assert record.steps == 2 and record.batch == 2 and len(record.loss_curve) == 2
        assert set(record.environment) >= {"command", "date", "commit", "machine", "versions"}
    blocks = {r.mechanism: r for r in records if r.task == "blocks"}
    setup = setups_of(TINY)["blocks"]
    config, heads, layers = setup.mechanism("mta"), setup.size.heads, setup.size.layers
    assert from_json(blocks["mta"].config["mechanism"]) == config
    assert config.conv_every == 1 and config.mix == config.post_mix == "all"
    kernels = sum(math.prod(size) for size in (config.conv, config.post_conv))
    added = blocks["mta"].parameters - blocks["standard"].parameters
    assert added == layers * heads * (kernels + 2 * heads)
    assert blocks["selective"].parameters == blocks["standard"].parameters


def test_the_folder_holds_a_page_a_config_and_the_models(finished):
    out, records = finished
    page = (out / "report.html").read_text()
    for word in ("blocks", "parity", "selective", "mta", "masked token"):
        assert word in page
    config = json.loads((out / "config.json").read_text())
    assert config["tasks"]["parity"]["mechanisms"]["mta"] == json.loads(
        json.dumps(to_json(MultiToken()))
    )
    assert sorted(p.name for p in (out / "models").iterdir()) == sorted(
        f"{r.task}-{r.mechanism}-0" for r in records
    )
    assert not (out / "unfinished").exists()


def test_the_summary_has_a_line_for_every_run(finished):
    text = overview(finished[1])
    for task in TINY.tasks:
        assert len(re.findall(rf"^{task} ", text, flags=re.M)) == len(TINY.mechanisms)
    assert text.count("One seed may be luck; run more (--seeds 3).") == 1
    assert "mta is not the same everywhere: conv_every=1 on blocks, 4 on parity." in text


def test_another_comparison_does_not_mix_in_and_the_difference_is_named(finished):
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    message = r"another run: tasks\.blocks\.budget\.batch was 2 and is 3 now; .*choose another"
    with pytest.raises(ValueError, match=message):
        compare(replace(TINY, batch=3), out)
    with pytest.raises(ValueError, match=r"tasks\.blocks was there and is absent now; choose"):
        compare(replace(TINY, tasks=("parity",)), out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


PARITY = replace(TINY, tasks=("parity",), mechanisms=("standard", "selective"))


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    out = tmp_path_factory.mktemp("parity") / "out"
    return out, paged(PARITY, out)


@pytest.fixture
def one_seed(parity, tmp_path):
    """A folder of a finished comparison, for each test to spoil or to go on in."""
    out, records = parity
    return Path(shutil.copytree(out, tmp_path / "out")), records


@pytest.mark.slow
def test_rivals_are_compared_as_the_others_are(tmp_path):
    names = (
        "standard", "knocking-heads", "canon", "gated", "exclusive", "forgetting",
        "parallax", "dex", "simplicial", "differential-v2", "local-global",
    )  # fmt: skip
    comparison = replace(PARITY, mechanisms=names)
    records = {r.mechanism: r for r in paged(comparison, tmp_path / "out")}
    assert tuple(records) == names
    setup = setups_of(comparison)["parity"]
    layers, width, heads = setup.size.layers, setup.size.hidden, setup.size.heads
    added = {
        "knocking-heads": (width // heads) ** 2,
        "canon": 4 * 4 * width,  # a kernel for every channel of the input, of q, k and v
        "differential-v2": width * width + width * heads,
        "gated": width * width,
        "exclusive": 0,
        "forgetting": width * heads + heads,
        "parallax": width * width,
        "dex": (width // heads) ** 2 + 1,
        "simplicial": 2 * width * width / min(4, layers),  # in one layer of these
        "local-global": 0,
    }
    for name, each in added.items():
        assert records[name].parameters == records["standard"].parameters + layers * each
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(name in page for name in names)
    model = load(tmp_path / "out" / "models" / "parity-canon-0")
    assert model._heedful.mechanism == mechanism("canon")


def test_a_tour_is_what_is_learned_where_no_task_is_named():
    short, full = (setups_of(Comparison(tour=tour)) for tour in ("short", "full"))
    assert {name: x.hyperparameters.steps for name, x in short.items()} == {
        "magic-numbers": 150, "assignment": 450, "text": 50,
    }  # fmt: skip
    assert list(full) == ["blocks", "assignment", "text"]
    assert full["text"].hyperparameters.steps == full["text"].task.recipe.steps
    assert {x.hyperparameters.steps for x in setups_of(Comparison(steps=7)).values()} == {7}


def test_more_seeds_are_added_and_fewer_lose_nothing(one_seed):
    out, first = one_seed
    three = paged(replace(PARITY, seeds=2), out)
    assert three[:2] == first and [(r.mechanism, r.seed) for r in three[2:]] == [
        ("standard", 1), ("selective", 1),
    ]  # fmt: skip
    assert json.loads((out / "config.json").read_text())["seeds"] == 2
    assert "2 seeds each" in (out / "report.html").read_text()
    with pytest.warns(UserWarning, match="was made for 2 seeds: those that are there are kept"):
        assert compare(PARITY, out) == three
    assert json.loads((out / "config.json").read_text())["seeds"] == 2


def test_one_process_writes_at_a_time(one_seed):
    out, _ = one_seed
    code = (
        "import sys, pathlib, heedful.files as files\n"
        f"with files.only_writer(pathlib.Path({str(out)!r})):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
        message = rf"out is in use by process {holder.pid} on {socket.gethostname()} since 20\d\d-"
        with pytest.raises(ValueError, match=message):
            compare(replace(PARITY, seeds=2), out)
        assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before
    finally:
        holder.kill()
        holder.wait()
    assert (out / ".heedful.lock").exists(), "a killed holder cleans nothing up"
    assert len(compare(PARITY, out)) == 2
    assert not (out / ".heedful.lock").exists()


def test_a_new_folder_stays_if_something_is_written_into_it(tmp_path):
    with files.only_writer(tmp_path / "new" / "empty"):
        pass
    assert not (tmp_path / "new").exists()
    with files.only_writer(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run" / "line").touch()
    assert (tmp_path / "new" / "run" / "line").exists()
    (tmp_path / "old").mkdir()
    with files.only_writer(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()


def test_without_the_system_s_locks_the_file_alone_is_one(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    lock = tmp_path / ".heedful.lock"
    with files.only_writer(tmp_path):
        message = rf"in use by process {os.getpid()} on .*; if it no longer runs, delete .*lock"
        with pytest.raises(ValueError, match=message), files.only_writer(tmp_path):
            pass
        assert lock.exists()
    assert not lock.exists()


def test_a_run_that_is_there_twice_is_named_by_its_lines(one_seed):
    out, _ = one_seed
    results = out / "results.jsonl"
    results.write_text(results.read_text() + results.read_text().splitlines()[1] + "\n")
    message = (
        r"results\.jsonl, lines 2 and 3: both hold selective on parity with seed 0.*delete one"
    )
    with pytest.raises(ValueError, match=message):
        compare(replace(PARITY, seeds=2), out)
    assert len(results.read_text().splitlines()) == 3


def test_a_damaged_model_costs_its_pictures_alone(one_seed):
    out, records = one_seed
    whole = (out / "report.html").read_text()
    weights = out / "models" / "parity-selective-0" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.warns(UserWarning, match=r"parity-selective-0 cannot be shown, its numbers stay"):
        assert paged(PARITY, out) == records
    damaged = (out / "report.html").read_text()
    assert "masked token" in whole and "masked token" not in damaged
    assert whole.count("selective, layer") > damaged.count("selective, layer") == 0
    shutil.rmtree(weights.parent)
    assert paged(PARITY, out) == records


def test_a_diverged_run_is_a_result_and_the_others_go_on(tmp_path, monkeypatch):
    change_setups(monkeypatch, learning_rate=1e30)
    with pytest.warns(UserWarning, match="parity · .* · seed 0: the model diverged: at step"):
        records = compare(replace(PARITY, steps=8), tmp_path)
    assert [r.mechanism for r in records] == ["standard", "selective"]
    assert "1 of 1 diverged" in overview(records)
    assert read_records(tmp_path / "results.jsonl")[0].to_json() == records[0].to_json()


def test_a_stopped_comparison_goes_on(parity, tmp_path):
    _, whole = parity
    calls = 0

    def after_three_steps() -> bool:
        nonlocal calls
        calls += 1
        return calls >= 3

    with pytest.raises(Stopped):
        paged(PARITY, tmp_path, after_three_steps)
    there = read_records(tmp_path / "results.jsonl")
    assert [r.mechanism for r in there] == ["standard"]
    text = kept(tmp_path)
    assert (
        text == f"1 finished run and parity-selective-0 as it was after step 1 kept in {tmp_path}"
    )
    assert (tmp_path / "report.html").exists()
    resumed = compare(PARITY, tmp_path)
    assert [r.final for r in resumed] == [r.final for r in whole]
    assert [r.curve for r in resumed] == [r.curve for r in whole]


def test_with_the_memory_loss_a_mechanism_is_there_twice(tmp_path):
    comparison = replace(PARITY, memory_loss=0.1, steps=3)
    records = paged(comparison, tmp_path)
    names = ["standard", "selective", "selective + memory loss"]
    assert [r.mechanism for r in records] == names
    _, plain, with_it = records
    assert plain.config == {k: v for k, v in with_it.config.items() if k != "memory_loss"}
    assert "memory_loss" not in plain.config and with_it.config["memory_loss"] == 0.1
    assert plain.loss_curve[0] == with_it.loss_curve[0]
    assert plain.loss_curve[2] != with_it.loss_curve[2], "the first step warms up at a rate of 0"
    folders = {path.name for path in (tmp_path / "models").iterdir()}
    assert {"parity-selective-0", "parity-selective-memory-loss-0"} < folders
    assert (tmp_path / "report.html").read_text().count("selective + memory loss, layer") > 0
    assert re.findall("^parity +selective \\+ memory loss ", overview(records), flags=re.M)
    assert compare(comparison, tmp_path) == records
    with pytest.raises(ValueError, match=r"selective \+ memory loss\.memory_loss was 0\.1 and is"):
        compare(replace(comparison, memory_loss=0.2), tmp_path)


def test_every_task_has_a_setup_whose_sizes_fit():
    assert set(setups()) == set(TASKS)
    for name, setup in setups().items():
        assert setup.size.hidden % setup.size.heads == 0, name
        assert "standard" in setup.mechanisms


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "block"], "did you mean 'blocks'"),
        (["--tasks", "text", "--data", "missing.txt"], "missing.txt"),
        (["--tasks", "blocks", "--memory-loss", "0.1"], "and standard, mta do not: add selective"),
        (["--tasks", "parity", "--steps", "1", "--out", "file/inside"], "file/inside cannot be wr"),
        (["--tasks", "parity", "--steps", "1", "--out", "file"], "file is a file where a folder"),
        (["--tasks", "parity", "--out", ""], "out must be a path, got an empty text"),
        (["--tasks", "text", "--data", "file"], "file: too short for sequences of length=256"),
    ],
)
def test_bad_input_is_one_clean_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    assert message in refusal(capsys, "compare", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"
