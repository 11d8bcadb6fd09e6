"""Imports go one way, and importing the package does next to no work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

ROOT = Path(heedful.__file__).parent

# What each room may import: the first name of a foreign package, or a room of this one.
COMPUTING = {"torch", "jaxtyping"}
MAY_IMPORT = {
    "ops": COMPUTING | {"heedful.ops"},
    "nn": COMPUTING | {"heedful.ops", "heedful.nn"},
    "hf": COMPUTING | {"transformers", "safetensors", "heedful.ops", "heedful.nn", "heedful.hf"},
    "tasks": COMPUTING | {"numpy", "tokenizers", "heedful.tasks", "heedful.data"},
    "testing.py": {"torch"},
    "data.py": {"torch", "numpy", "tokenizers", "datasets"},
}
COMMANDS = {"train.py", "compare.py", "cli.py", "doctor.py", "look.py", "exhibits.py"}
MAY_USE_TRANSFORMERS = {"hf"} | COMMANDS


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imported(path: Path) -> set[str]:
    """Foreign packages by first name, this package's rooms by two."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "heedful":
                found |= {f"heedful.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    parts = (name.split(".") for name in found)
    return {".".join(name[: 2 if name[0] == "heedful" else 1]) for name in parts}


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_they_stand_on(room):
    files = [path for path in FILES if room_of(path) == room]
    assert files
    for path in files:
        kernels = path.parent.name == "fused" or path.name in ("triton_tiles.py", "impl.py")
        triton = {"triton"} if room == "ops" and kernels else set()  # impl.py: in a function
        outside = imported(path) - set(sys.stdlib_module_names) - MAY_IMPORT[room] - triton
        assert not outside, f"{path.relative_to(ROOT)} imports {outside}"


def test_transformers_stays_behind_its_door():
    users = {room_of(path) for path in FILES if "transformers" in imported(path)}
    assert "hf" in users
    assert users <= MAY_USE_TRANSFORMERS, users - MAY_USE_TRANSFORMERS


def loaded_by(statement: str) -> set[str]:
    """First names of the modules that a fresh interpreter holds after one statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "triton", "matplotlib", "numpy", "datasets", "tyro", "accelerate"}


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import heedful") & HEAVY == set()
    assert loaded_by("import heedful; dir(heedful)") & HEAVY == set()


@pytest.mark.parametrize("room", ["ops", "nn"])
def test_operators_and_layers_need_torch_alone(room):
    loaded = loaded_by(f"import heedful.{room}")
    assert "torch" in loaded
    assert loaded & (HEAVY - {"torch", "numpy"}) == set()


def test_every_public_name_resolves():
    for name in heedful.__all__:
        assert getattr(heedful, name) is not None, name
    assert set(heedful.__all__) <= set(dir(heedful))
    for room, names in heedful._ROOMS.items():
        assert set(names) <= set(heedful.__all__), room


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'heedful' has no attribute 'converts'"):
        _ = heedful.converts
