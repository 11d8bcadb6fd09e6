"""The report about a GPU: every case runs at small sizes on a CPU, and one file has them all."""

import json
import time

import pytest
import torch

from heedful_lab.commands.bench import gpu_report
from heedful_lab.commands.bench.gpu_report import SMALL, write_report
from helpers.command_line import refusal


@pytest.fixture
def in_this_process(monkeypatch):
    def watch(command, lines):
        return gpu_report.worker(lines, time.time() + 600, SMALL)

    monkeypatch.setattr(gpu_report, "watch", watch)


def test_every_case_is_in_one_file(tmp_path, in_this_process, monkeypatch):
    monkeypatch.setattr(gpu_report, "MECHANISMS", ("differential",))  # without Triton
    assert write_report(tmp_path / "gpu.json", SMALL) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {"machine", "versions", "commit"} <= set(report["environment"])
    cases = {case["case"]: case for case in report["cases"]}
    failed = {name: x["error"] for name, x in cases.items() if x["status"] != "measured"}
    assert not failed
    assert cases["versions"]["numbers"]["packages"]["torch"]
    timed = [name for name in cases if name.split()[0] not in ("versions", "right")]
    assert all(cases[name]["numbers"]["ms"] > 0 for name in timed) and len(timed) >= 13
    with pytest.raises(ValueError, match="is there already"):
        write_report(tmp_path / "gpu.json", SMALL)
    with pytest.raises(ValueError, match="there is no folder"):
        write_report(tmp_path / "none" / "gpu.json", SMALL)


def test_what_was_measured_is_written_however_it_ended(tmp_path, monkeypatch):
    def stopped(command, lines):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report, "watch", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path / "gpu.json", SMALL)
    assert json.loads((tmp_path / "gpu.json").read_text())["cases"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    for words, message in (([], "needs a GPU, and torch"), (["m"], "leave out m")):
        assert message in refusal(capsys, "doctor", *words, "--gpu-report", tmp_path / "gpu.json")
    assert not list(tmp_path.iterdir())
