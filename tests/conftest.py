"""For every test: shapes checked, uninitialised memory poisoned, no network, fixed seeds."""

import os
import socket

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at import: its kernels run on any machine
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from jaxtyping import install_import_hook

# Shapes inside the operators are checked at every call. The public functions are left out, as they
# answer a wrong shape themselves; the hook also breaks torch.compile, whose tests run in their own
# process without it.
CHECKED = [
    "heedful.ops.common.precision",
    "heedful.ops.common.standard",
    "heedful.ops.common.tiles",
    "heedful.ops.mta.convolution",
    "heedful.ops.mta.wide",
    "heedful.ops.mta.fused.flash_call",
    *(
        f"heedful.ops.{mechanism}.{part}"
        for mechanism in ("mta", "selective", "differential")
        for part in ("reference", "tiled")
    ),
]
install_import_hook(CHECKED, "beartype.beartype")

# A device context looks up once which functions it redirects: before one of them is replaced below,
# or models "on meta" would take real memory.
with torch.device("meta"):
    torch.empty(0)


@pytest.fixture(autouse=True)
def as_without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`impl="fused"` is answered as on a machine without a GPU; but see `interpreted`."""
    monkeypatch.setattr("heedful.ops.impl._interpreted", lambda: False)


@pytest.fixture
def interpreted(as_without_interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    """`impl="fused"` runs, in Triton's interpreter."""
    monkeypatch.setattr("heedful.ops.impl._interpreted", lambda: True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, address):
        raise AssertionError(f"a test tried to reach {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating-point buffers hold NaN: forgetting an entry shows."""

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta"
            return x.fill_(float("nan")) if plain and x.is_floating_point() else x

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
