"""For every test: shapes checked, uninitialised memory poisoned, no network, fixed seeds."""

import gc
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from jaxtyping import config as jaxtyping_config

from helpers import ROOT, shapes
from helpers.crosses import in_share, leave_covers

shapes.install()

TESTS = Path(__file__).parent
PLACES = ("src/heedful", "src/heedful_lab", "tests", "benchmarks")

# A device context looks up once which functions it redirects: before one of them is replaced below,
# or models "on meta" would take real memory.
with torch.device("meta"):
    torch.empty(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: run only the laws of the operators, on a GPU with the real kernels",
    )
    parser.addoption(
        "--shapes", action="store_true", help="check the shapes in annotations in every test"
    )
    parser.addoption(
        "--share", metavar="K/N", help="run the K-th of N shares of the tests that are chosen"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "device: runs on the device that --device names")
    config.addinivalue_line(
        "markers", "crossed: every pair of values is run, the rest of the cross is exhaustive"
    )
    config.addinivalue_line(
        "markers", "sampled(n): n cases of a test are run, evenly spread; the others are slow"
    )
    if config.getoption("--shapes") and not shapes.CHECKED:
        raise pytest.UsageError("--shapes: beartype is not installed")
    if config.getoption("--device") == "cpu":
        if "triton" in sys.modules:
            raise pytest.UsageError(
                "triton was imported before its interpreter was chosen: conftest.py files below "
                "tests/ must import heedful in their fixtures"
            )
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are made: they run on any machine
    elif not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device on this machine")


def pytest_report_header() -> list[str]:
    return [] if shapes.CHECKED else ["shapes are not checked: beartype is not installed"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the lines of Python, which the house limits."""
    counts = {place: lines_of(ROOT / place) for place in PLACES}
    words = ", ".join(f"{place} {count:,}" for place, count in counts.items())
    terminalreporter.write_line(f"lines of Python: {words}")


def lines_of(place: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in place.rglob("*.py"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_covers(items)
    others: list[pytest.Item] = []
    if config.getoption("--device") != "cpu":
        others = [item for item in items if item.get_closest_marker("device") is None]
    if (share := config.getoption("--share")) is not None:
        number, shares = map(int, share.split("/"))
        others += [item for item in items if not in_share(item.nodeid, number, shares)]
    if others:
        config.hook.pytest_deselected(items=others)
        deselected = set(items) - set(others)
        items[:] = [item for item in items if item in deselected]


def pytest_collection_finish() -> None:
    """Modules and collected tests are no garbage: to look them through takes a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made unless a test says otherwise."""
    name = request.config.getoption("--device")
    if name == "cpu":  # to name the default would turn on a mode under which torch runs slower
        yield name
    else:
        with torch.device(name):
            yield name


@pytest.fixture(autouse=True)
def shape_checks(request: pytest.FixtureRequest) -> None:
    """Of the usual suite only tests of operators and layers check shapes: the others would take a
    sixth longer. The slow and the exhaustive suites and `--shapes` check them everywhere."""
    rare = any(request.node.get_closest_marker(name) for name in ("slow", "exhaustive"))
    everywhere = rare or request.config.getoption("--shapes")
    room = request.path.relative_to(TESTS).parts[0]
    jaxtyping_config.update("jaxtyping_disable", not (everywhere or room in ("ops", "nn")))


@pytest.fixture
def no_shape_checks(shape_checks) -> None:
    """For wrong shapes that a function answers itself, and for what is compiled: dynamo cannot
    trace the checks."""
    jaxtyping_config.update("jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def as_without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`impl="fused"` is answered as on a machine without a GPU; but see `interpreted`."""
    monkeypatch.setattr("heedful.ops.impl._interpreted", lambda: False)


@pytest.fixture
def interpreted(as_without_interpreter, device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`impl="fused"` runs: in Triton's interpreter, or on the GPU."""
    monkeypatch.setattr("heedful.ops.impl._interpreted", lambda: device == "cpu")


# Of 5.17: what its own assisted decoding calls `generate` with.
_OF_ITS_OWN = "Passing `generation_config` together with generation-related arguments"


class _Deprecations(logging.Handler):
    """Collects what transformers logs of names that it will remove."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "deprecated" in message and not message.startswith(_OF_ITS_OWN):
            self.messages.append(message)


@pytest.fixture(autouse=True)
def no_deprecated_names() -> Iterator[None]:
    """No call here uses a name that transformers will remove (warnings fail by themselves)."""
    handler = _Deprecations()
    logging.getLogger("transformers").addHandler(handler)
    yield
    logging.getLogger("transformers").removeHandler(handler)
    assert handler.messages == []


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, address):
        raise AssertionError(f"a test tried to reach {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def task_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A few documents of each task of lm-evaluation-harness, where a package would have them."""
    from helpers.task_data import forget, write_task_data

    folder = write_task_data(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    forget()
    yield folder
    forget()


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating-point buffers hold NaN: forgetting an entry shows."""

    def poison(make):
        def poisoned(*args, **kwargs):
            x = make(*args, **kwargs)
            plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta"
            return x.fill_(float("nan")) if plain and x.is_floating_point() else x

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
