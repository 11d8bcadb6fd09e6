"""Provenance of a result: commit, machine, versions, date, command."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path


def environment(command: list[str] | None = None) -> dict:
    """Commit, machine, versions, date and command, as JSON-ready values.

    Arguments:
        command: the command line; default that of this process.
    """
    import torch

    packages = ("heedful", "torch", "transformers", "triton")
    return {
        "command": shlex.join(command or _command()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := installed(name))},
    }


def _command() -> list[str]:
    """That of this process: a module's or a script's, else the command line's."""
    script, spec = Path(sys.argv[0]), getattr(sys.modules["__main__"], "__spec__", None)
    if script.suffix == ".py" and script.name != "__main__.py":
        name = f"{script.parent.name}/{script.name}"
        return ["python", *(["-m", spec.name] if spec else [name]), *sys.argv[1:]]
    return ["heedful", *sys.argv[1:]]


def commit() -> str | None:
    """The commit of heedful's checkout, "+changes" if its sources differ; `None` outside of one."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not git("ls-files", here.name):
            return None  # installed inside some other repository
        changed = git("status", "--porcelain", "--", str(here.parents[2]))  # both packages
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def installed(package: str) -> str | None:
    """The version of an installed package, or `None`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> str:
    """The processor, its usable cores, and the GPU if there is one."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    cores = f"{len(usable)} core{'s' if len(usable) != 1 else ''}"
    described = f"{name}, {cores}, {platform.system()}"
    if torch.cuda.is_available():
        described += f", {torch.cuda.get_device_name()}"
    return described
