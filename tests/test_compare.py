"""The main job end to end, at a size that takes seconds."""

import errno
import json
import math
import re

import pytest

from heedful.cli import main
from heedful.compare import Comparison, compare, setups, summary
from heedful.nn import MultiToken, from_json, to_json
from heedful.report import read_records
from heedful.tasks import TASKS
from heedful.train import Stopped

TINY = Comparison(
    tasks=("blocks", "parity"), mechanisms=("standard", "mta", "selective"), steps=2, batch=2,
    device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    return out, compare(TINY, out)


def test_every_run_is_recorded_with_its_environment(finished):
    out, records = finished
    keys = [(r.task, r.mechanism, r.seed) for r in records]
    assert keys == [(task, mechanism, 0) for task in TINY.tasks for mechanism in TINY.mechanisms]
    assert read_records(out / "results.jsonl") == records
    for record in records:
        assert record.steps == 2 and record.batch == 2 and len(record.loss_curve) == 2
        assert set(record.environment) >= {"command", "date", "commit", "machine", "versions"}
    blocks = {r.mechanism: r for r in records if r.task == "blocks"}
    setup = TINY.setups()["blocks"]
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
    for word in ("blocks", "parity", "selective", "mta", "hid token"):
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
    text = summary(finished[1])
    for task in TINY.tasks:
        assert len(re.findall(rf"^{task} ", text, flags=re.M)) == len(TINY.mechanisms)
    assert "one seed cannot tell" in text


def test_calling_again_trains_nothing(finished):
    out, records = finished
    before = (out / "results.jsonl").read_bytes()
    assert compare(TINY, out) == records
    assert (out / "results.jsonl").read_bytes() == before


def test_another_comparison_does_not_mix_in(finished):
    out, _ = finished
    with pytest.raises(ValueError, match=r"holds another comparison.*choose another folder"):
        compare(Comparison(tasks=("parity",), steps=3, batch=2), out)


def test_a_stopped_comparison_goes_on(finished, tmp_path):
    _, whole = finished
    asked = 0

    def after_seven_steps() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 7

    with pytest.raises(Stopped):
        compare(TINY, tmp_path, after_seven_steps)
    kept = read_records(tmp_path / "results.jsonl")
    assert [r.mechanism for r in kept] == ["standard", "mta", "selective"]
    assert (tmp_path / "report.html").exists()
    resumed = compare(TINY, tmp_path)
    assert [r.final for r in resumed] == [r.final for r in whole]
    assert [r.curve for r in resumed] == [r.curve for r in whole]


def test_every_task_has_a_setup_whose_sizes_fit():
    assert set(setups()) == set(TASKS)
    for name, setup in setups().items():
        assert setup.size.hidden % setup.size.heads == 0, name
        assert "standard" in setup.mechanisms


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "block"], "did you mean 'blocks'"),
        (["--mechanisms", "selectve"], "did you mean 'selective'"),
        (["--tasks", "text", "--data", "missing.txt"], "missing.txt"),
        (["--tasks", "blocks", "--data", "x.txt"], "data is read by the task 'text'"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--device", "tpu"], "device must be auto, cpu or cuda, got 'tpu'"),
        (["--tasks", "parity", "--steps", "1", "--out", "file/inside"], "file"),
    ],
)
def test_bad_input_is_one_clean_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SystemExit) as stop:
        main(["compare", *arguments])
    printed = capsys.readouterr()
    assert stop.value.code == 1
    assert message in printed.err and "Traceback" not in printed.err
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


def test_an_empty_data_file_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(SystemExit):
        main(["compare", "--tasks", "text", "--data", "empty.txt"])
    assert "empty.txt" in capsys.readouterr().err


def test_a_full_disk_is_one_clean_line_and_loses_nothing(tmp_path, capsys, monkeypatch):
    import heedful.compare as room

    monkeypatch.chdir(tmp_path)
    append = room.append_record

    def full(path, record):
        if record.mechanism == "selective":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, record)

    monkeypatch.setattr(room, "append_record", full)
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--tasks", "parity", "--steps", "2", "--batch", "2", "--out", "runs"])
    assert stop.value.code == 1
    printed = capsys.readouterr().err
    assert "No space left on device" in printed and "Traceback" not in printed
    assert [r.mechanism for r in read_records(tmp_path / "runs" / "results.jsonl")] == ["standard"]
