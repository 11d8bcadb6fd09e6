"""Cases measured one after another in a worker process that may die; each is on disk at once.

A failing case is recorded, and one that kills or hangs the worker by the process that watches it,
which then starts another worker. A second run with the same file goes on where the first one ended.
This file imports nothing heavy.
"""

import datetime
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from heedful.files import append_line, write_whole

GRACE = 20.0  # seconds by which a case may overrun its stage before its process is ended
BROKEN = 3  # exit code of a worker whose device answers no more


class SessionCase(NamedTuple):
    """One thing to measure.

    name: for people; with `config` it says which case this is.
    config: whatever the numbers depend on, JSON-ready.
    measure: from the seconds that are left to the stage to the numbers, JSON-ready.
    """

    name: str
    config: dict
    measure: Callable[[float], dict]


def work(stage: int, cases: Iterable[SessionCase], out: Path, until: float, about: dict) -> bool:
    """Measure what `out` has no record of yet; returns whether the device still answers.

    Each record holds stage, case, config, status, date and environment; of status `"measured"` the
    `numbers`, of `"failed"` and `"not run"` the `error`.

    Arguments:
        stage: number of the stage.
        cases: in this order; taken one by one, so that a case may depend on earlier records.
        out: file of JSON lines, one per record.
        until: no case is begun after this time (of `time.time()`); the others are "not run".
        about: the environment.
    """
    recorded = {_key(r) for r in read(out) if r["status"] != "not run"}
    for case in cases:
        record = {"stage": stage, "case": case.name, "config": case.config}
        if _key(record) in recorded:
            continue
        record |= {"environment": about}
        if time.time() >= until:
            late = {"status": "not run", "error": "the time of the stage was over"}
            _append(out, record | late)
            continue
        write_whole(_running(out), json.dumps(record | {"until": until}))
        try:
            outcome = {"status": "measured", "numbers": case.measure(until - time.time())}
        except Exception as error:  # whatever a case dies of, the others go on
            message = " ".join(str(error).split())[:600]
            outcome = {"status": "failed", "error": f"{type(error).__name__}: {message}"}
        _append(out, record | outcome)
        _running(out).unlink()
        if outcome["status"] == "failed" and not _device_answers():
            return False
    return True


def watch(command: Sequence[str], out: Path) -> int:
    """Run a worker until it has done its work, again after each case that ended it.

    Arguments:
        command: the worker; exits with 0 when done, and with anything else if it is to be started
            again.
        out: the file that it writes.

    Returns:
        0, or the worker's exit code if it ended before its first case.
    """
    _bury(out, "the session ended while this case ran")
    while True:
        before = len(read(out))
        process = subprocess.Popen(command, start_new_session=True)
        reason = None
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if _overdue(out):
                    reason = "ran longer than its stage may, and was ended"
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _bury(out, "the session was stopped while this case ran")
            raise
        if process.returncode == 0:
            return 0
        _bury(out, reason or f"its process ended with code {process.returncode}")
        if len(read(out)) == before:
            return max(process.returncode, 1)


def read(out: Path) -> list[dict]:
    """The records of a session so far; a line that was cut off is left out."""
    records = []
    for line in out.read_text().splitlines() if out.is_file() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _key(record: dict) -> str:
    return json.dumps([record["stage"], record["case"], record["config"]], sort_keys=True)


def _append(out: Path, record: dict) -> None:
    record["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    numbers = record.get("numbers", {})
    parts = [f"{k} {v:,.4g}" for k, v in numbers.items() if isinstance(v, int | float)]
    result = " ".join(parts) if "numbers" in record else f"{record['status']}: {record['error']}"
    print(f"{record['stage']} {record['case']}: {result}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    append_line(out, json.dumps(record))


def _running(out: Path) -> Path:
    """File that names the case in progress, for whoever finds its process dead."""
    return out.with_name(f"{out.name}.running")


def _bury(out: Path, reason: str) -> None:
    """Record the case that was running as failed."""
    with suppress(FileNotFoundError, ValueError):
        record = json.loads(_running(out).read_text())
        record.pop("until")
        _append(out, record | {"status": "failed", "error": reason})
    _running(out).unlink(missing_ok=True)


def _overdue(out: Path) -> bool:
    with suppress(FileNotFoundError, ValueError):
        return time.time() > json.loads(_running(out).read_text())["until"] + GRACE
    return False


def _device_answers() -> bool:
    """Test whether the GPU, if there is one, is still usable; frees the failed case's memory.

    After a kernel's wrong access every later call of the process fails.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return True
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
