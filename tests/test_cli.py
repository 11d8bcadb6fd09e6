"""The command line as a shell sees it."""

import signal
import subprocess
import sys
import time

import pytest

from heedful.cli import main

HEEDFUL = [sys.executable, "-m", "heedful"]


def test_the_commands_are_these():
    done = subprocess.run([*HEEDFUL, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    commands = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("│   • ")]
    assert commands == ["compare", "bench", "doctor"]


def test_a_typo_in_an_option_is_a_usage_error():
    done = subprocess.run([*HEEDFUL, "compare", "--taks"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--tasks" in done.stderr + done.stdout and "Traceback" not in done.stderr


def test_doctor_finds_this_machine_sound(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert "tiled equals reference" in printed and "keeps its logits, and reverts" in printed
    assert "fused        no: its kernels need a GPU; impl='auto' runs tiled" in printed
    assert "all works" in printed


def test_doctor_reports_what_is_broken(capsys, monkeypatch):
    monkeypatch.setattr(
        "heedful.ops.mta.api.multi_token_attention_tiled", lambda q, *_, **__: q * 1
    )
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    printed = capsys.readouterr().out
    assert stop.value.code == 1
    assert "BROKEN" in printed and "all works" not in printed


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path):
    command = [*HEEDFUL, "compare", "--tasks", "parity", "--steps", "20000", "--batch", "2"]
    command += ["--device", "cpu", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    for line in process.stderr:  # the bar rewrites its line, so this sees it in pieces
        if "stopping" in line or time.monotonic() > deadline:
            break
        if (tmp_path / "config.json").exists():
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            break
    else:
        pytest.fail("the process ended by itself")
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130, rest
    assert "the same command goes on there" in rest and "Traceback" not in rest
    assert list((tmp_path / "unfinished").glob("*/checkpoint-*"))
