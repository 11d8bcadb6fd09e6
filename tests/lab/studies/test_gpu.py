"""The session for a GPU works before there is one: every stage at small sizes, and what goes wrong
on the way is on record."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import watched
from benchmarks.gpu.watched import SessionCase, read, watch, work
from helpers import ROOT

ALL_STAGES = """
import sys, time
from pathlib import Path
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu.sizes import SMALL
out = Path(sys.argv[1])
for stage in (1, 2, 3, 5, 6, 7, 2):
    before = len(gpu_session.read(out))
    assert gpu_session.worker([stage], SMALL, out, time.time() + 540) == 0
assert len(gpu_session.read(out)) == before, "the second time, all of stage 2 was there"
"""


@pytest.mark.slow
def test_all_stages_measure_their_cases_at_small_sizes(tmp_path):
    """In one process without the hooks of the tests, but for the fourth stage, by its command."""
    out = tmp_path / "records.jsonl"
    clean = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    command = ["-m", "benchmarks.gpu.session", "--stage", "4", "--small"]
    command += ["--device", "cpu", "--out", str(out)]
    for words in (["-c", ALL_STAGES, str(out)], command):
        process = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=clean, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr[-3000:]
    records = read(out)
    for stage in range(1, 8):
        check_stage([record for record in records if record["stage"] == stage], stage)
    check_numbers(records)


def check_stage(these: list[dict], stage: int) -> None:
    assert these, stage
    assert not {r["case"]: r["error"] for r in these if r["status"] != "measured"}, stage
    for record in these:
        assert record["config"]["device"] == "cpu"
        assert {"command", "commit", "machine", "versions"} <= set(record["environment"])


def check_numbers(records: list[dict]) -> None:
    """The laws run, and every operator is timed beside SDPA."""
    (laws,) = (record["numbers"] for record in records if record["case"] == "laws")
    assert laws["exit_code"] == 0 and "passed" in laws["end"]
    for stage, passes in ((2, 2), (4, 2), (6, 1)):
        these = [r for r in records if r["stage"] == stage]
        timed = {(r["config"]["mechanism"], r["config"]["pass"]) for r in these}
        assert len(timed) == (6 + (stage == 2)) * passes and {"sdpa", "mta", "selective"} <= {
            x for x, _ in timed
        }
        assert all(r["numbers"]["low_ms"] <= r["numbers"]["ms"] for r in these)
        assert {r["config"]["bench"]["layout"] for r in these} == {"transposed"}
    impls = {r["config"]["impl"] for r in records if r["stage"] == 4}
    assert {"FLASH_ATTENTION"} < impls <= {"FLASH_ATTENTION", "composed", "fused"}
    steps, served = ([r["numbers"] for r in records if r["stage"] == n] for n in (5, 7))
    assert len(steps) == 3 and len(served) == 6
    assert all(x["tokens_per_second"] > 0 for x in (*steps, *served))
    stock, *small = [x["cache_nbytes"] for x in served[:3]]
    assert max(small) < stock, "half of the tokens"


def test_laws_that_cannot_run_are_no_result():
    with pytest.raises(RuntimeError, match=r"(?s)the tests could not run: .*not found: .*nowhere"):
        gpu_session.laws(("tests/nowhere.py",), 60.0)


def cases(seconds: float = 0.0) -> list[SessionCase]:
    def fails(left):
        raise MemoryError("out of memory,\nby far")

    def measured(left):
        time.sleep(seconds)
        return {"ms": 1.5}

    return [
        SessionCase("a", {"tokens": 1}, measured),
        SessionCase("b", {"tokens": 1}, fails),
        SessionCase("a", {"tokens": 2}, measured),
    ]


def test_a_failing_case_is_survived_and_what_is_on_record_is_left_out(tmp_path):
    out = tmp_path / "new" / "records.jsonl"
    late = time.time() - 1
    assert work(2, cases(), out, late, {"commit": "c"})
    assert [record["status"] for record in read(out)] == ["not run"] * 3
    assert work(2, cases(), out, time.time() + 60, {"commit": "c"})
    first, second, third = read(out)[3:]
    assert first["numbers"] == {"ms": 1.5} and first["environment"] == {"commit": "c"}
    assert second["status"] == "failed" and second["error"] == "MemoryError: out of memory, by far"
    assert third["config"] == {"tokens": 2} and third["date"]
    with out.open("a") as file:
        file.write('{"stage": 2, "cas')  # a machine that was taken away
    assert work(2, cases(), out, time.time() + 60, {}) and len(read(out)) == 6
    with pytest.warns(UserWarning, match="removed a last line that was cut off"):
        assert work(3, cases(), out, time.time() + 60, {})
    assert [json.loads(line)["stage"] for line in out.read_text().splitlines()] == [2] * 6 + [3] * 3


def test_the_time_of_a_stage_ends_it_between_cases(tmp_path):
    out = tmp_path / "records.jsonl"
    assert work(2, cases(seconds=0.2), out, time.time() + 0.1, {})
    assert [record["status"] for record in read(out)] == ["measured", "not run", "not run"]


WORKER = """
import os, signal, sys, time
from pathlib import Path
from benchmarks.gpu.watched import SessionCase, work
runs = {
    "good": lambda left: {"ms": 1.0},
    "dies": lambda left: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda left: time.sleep(600),
    "last": lambda left: {"ms": 2.0},
}
cases = [SessionCase(name, {}, run) for name, run in runs.items()]
work(1, cases, Path(sys.argv[1]), float(sys.argv[2]), {})
"""


def test_a_dead_and_a_hanging_process_are_recorded_and_survived(tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "GRACE", 0.5)
    out = tmp_path / "records.jsonl"
    worker = [sys.executable, "-c", WORKER, str(out), str(time.time() + 4)]
    assert watch(worker, out) == 0
    outcomes = {record["case"]: (record["status"], record.get("error")) for record in read(out)}
    assert outcomes == {
        "good": ("measured", None),
        "dies": ("failed", "its process ended with code -11"),
        "hangs": ("failed", "ran longer than its stage may, and was ended"),
        "last": ("not run", "the time of the stage was over"),
    }
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_worker_that_cannot_begin_is_not_started_for_ever(tmp_path):
    assert watch([sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "x.jsonl") == 7
