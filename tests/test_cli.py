"""The command line as a shell sees it."""

import json
import signal
import subprocess
import sys
import time

import pytest

from heedful.bench import Bench, bench, check
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


def test_bench_writes_records_and_a_table(tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    arguments = ["--lengths", "128", "--rounds", "2", "--heads", "2", "--dim", "16"]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--mechanisms", "selective", *arguments, "--no-memory", "--out", str(out)])
    assert stop.value.code == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    cases = [(r["mechanism"], r["impl"], r["pass"]) for r in records]
    each = [("sdpa", "torch"), ("selective", "reference"), ("selective", "tiled")]
    assert cases == [(*case, p) for p in ("forward", "forward+backward") for case in each]
    assert all(r["low_ms"] <= r["ms"] <= r["high_ms"] for r in records)
    assert capsys.readouterr().out.count("selective") == 4


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
    check(Bench(heads=4, dim=16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanisms": ("mtaa",)}, "mechanisms must be among"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"heads": 3}, "heads must be even"),
        ({"lengths": (0,)}, "lengths must be positive"),
        ({"rounds": 0}, "rounds must be at least 1"),
    ],
)
def test_bench_refuses_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Bench(**options)
