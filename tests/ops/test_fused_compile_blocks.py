"""The kernels between the products compile for an H200 without one, and do not spill."""

from pathlib import Path

import pytest
from aot import SHARED_LIMIT, compile_all
from blocks_compiled import NAMES


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    return compile_all(str(Path(__file__).with_name("blocks_compiled.py")))


@pytest.mark.parametrize("name", NAMES)
def test_resources(found, name):
    kernel = found[name]
    assert kernel["shared"] <= SHARED_LIMIT and kernel["registers"] <= 255
    assert kernel["spilled"] <= 32, kernel
