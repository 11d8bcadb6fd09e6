"""Imports go one way, and importing the package does next to no work."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import heedful
import heedful_lab
from helpers import ROOT as CHECKOUT

ROOT = Path(heedful.__file__).parent
LAB = Path(heedful_lab.__file__).parent
STUDIES = CHECKOUT / "benchmarks"

# What each room may import: a foreign package, a room of this one, or one file of a room.
COMPUTING = {"torch", "jaxtyping"}
FILES_OF_ALL = {f"heedful.{file}" for file in ("checks", "compatibility", "files")}
LIBRARY = {f"heedful.{x}" for x in ("ops", "nn", "eviction", "hf", "training", "data", "testing")}
MAY_IMPORT = {
    "checks.py": set(),
    "compatibility.py": set(),
    "files.py": {"heedful.checks"},
    "ops": COMPUTING | {"heedful.ops", "heedful.checks"},
    "nn": COMPUTING | {"heedful.ops", "heedful.nn", "heedful.checks"},
    "eviction": COMPUTING | {f"heedful.{room}" for room in ("ops", "nn", "eviction", "checks")},
    "hf": COMPUTING
    | {"transformers", "safetensors", "peft"}  # peft: when called
    | {f"heedful.{room}" for room in ("ops", "nn", "eviction", "hf")}
    | FILES_OF_ALL,
    "training": COMPUTING
    | {"transformers", "safetensors", "accelerate", "numpy", "tqdm"}
    | {f"heedful.{room}" for room in ("ops", "nn", "hf", "training", "eviction", "data")}
    | FILES_OF_ALL,
    "papers.py": {"transformers", "heedful.hf", "heedful.nn", "heedful.checks"},
    "testing.py": {"torch", "heedful.testing", "heedful.checks"},
    "data.py": {"torch", "numpy", "tokenizers", "datasets", "heedful.checks"},
}
# The same of the laboratory, which stands on the library.
LAB_MAY_IMPORT = {
    "tasks": COMPUTING
    | {"numpy", "tokenizers", "sacrebleu", "rouge_score"}
    | {"heedful_lab.tasks", "heedful.data", "heedful.checks"},
    "records": {"torch", "heedful_lab.records", "heedful.training.checkpoints"} | FILES_OF_ALL,
    "rivals": COMPUTING
    | {"transformers", "safetensors", "heedful_lab.rivals", "heedful.papers"}
    | LIBRARY
    | FILES_OF_ALL,
    "commands": COMPUTING
    | {
        "numpy",
        "transformers",
        "accelerate",
        "huggingface_hub",
        "matplotlib",
        "safetensors",
        "tokenizers",
        "tqdm",
        "tyro",
        "lm_eval",
        "x_transformers",
        "liger_kernel",
    }
    | {f"heedful_lab.{room}" for room in ("commands", "tasks", "records", "rivals")}
    | LIBRARY
    | FILES_OF_ALL,
}
MAY_USE_TRANSFORMERS = {"hf", "training", "papers.py"}
# The commands may import everything, but only where they are called, save these.
COMMANDS = {"__main__.py", "cli.py", "doctor.py"}
ROOMS = (
    "bench",
    "budget",
    "compare",
    "convert",
    "evaluate",
    "shrink",
    "generate",
    "inspect",
    "train",
)
LIGHT = {"tyro", "heedful.__version__", "heedful_lab.cli", "heedful_lab.records.environment"}
LIGHT |= {"heedful.checks", "heedful.compatibility"}
LIGHT |= {f"heedful_lab.commands.{command}.options" for command in ROOMS}


def room_of(path: Path) -> str:
    return path.relative_to(LAB if path.is_relative_to(LAB) else ROOT).parts[0]


def imported(path: Path) -> set[str]:
    """Foreign packages by first name, files and folders of this one in full."""
    return imported_by(ast.walk(ast.parse(path.read_text())))


def imported_by(nodes: Iterable[ast.AST]) -> set[str]:
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            if node.module in OWN:
                modules |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                modules.add(node.module)
    return {x if x.partition(".")[0] in OWN else x.partition(".")[0] for x in modules}


def beyond(names: set[str], allowed: set[str]) -> set[str]:
    """The names that are neither allowed nor in a room that is."""
    rooms = tuple(f"{room}." for room in allowed)
    return {name for name in names - allowed if not name.startswith(rooms)}


OWN = ("heedful", "heedful_lab")
FILES, LAB_FILES = (sorted(root.rglob("*.py")) for root in (ROOT, LAB))


@pytest.mark.parametrize("room", [*MAY_IMPORT, *LAB_MAY_IMPORT])
def test_rooms_import_only_what_they_stand_on(room):
    rules = MAY_IMPORT | LAB_MAY_IMPORT
    files = [path for path in (*FILES, *LAB_FILES) if room_of(path) == room]
    assert files
    for path in files:
        kernels = path.parent.name == "fused" or path.name == "impl.py"
        triton = {"triton"} if room == "ops" and kernels else set()  # impl.py: in a function
        outside = beyond(imported(path), set(sys.stdlib_module_names) | rules[room] | triton)
        assert not outside, f"{path} imports {outside}"


def test_no_room_is_left_without_a_rule():
    assert {room_of(path) for path in FILES} == MAY_IMPORT.keys() | {"__init__.py"}
    rooms = LAB_MAY_IMPORT.keys() | COMMANDS | {"__init__.py"}
    assert {room_of(path) for path in LAB_FILES} == rooms


def test_the_library_never_names_the_laboratory():
    """Law 35."""
    assert [path for path in FILES if "heedful_lab" in path.read_text()] == []


def test_the_laboratory_knows_no_private_name_of_the_library():
    """Law 35."""
    private = {name for path in FILES for name in private_names(path, defined=True)}
    assert {"_heedful", "_evict"} <= private
    actual = {path: private_names(path, defined=False) & private for path in LAB_FILES}
    assert {str(path): names for path, names in actual.items() if names} == {}


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, in spite of their names


def private_names(path: Path, defined: bool) -> set[str]:
    """Private names that a file defines, or those that it uses of others."""
    names, own = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if of_self else names).add(node.attr)
            if not of_self and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OWN:
            names |= {alias.name for alias in node.names}
    chosen = (own if defined else names - own) - NAMED_TUPLE
    return {name for name in chosen if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_import_their_rooms_when_they_are_called(name):
    top = [node for node in ast.parse((LAB / name).read_text()).body if not is_for_types(node)]
    assert not beyond(imported_by(top), set(sys.stdlib_module_names) | LIGHT)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"


@pytest.mark.parametrize(
    ("names", "allowed", "result"),
    [
        ({"heedful.hf.look"}, {"heedful.hf.look"}, set()),
        ({"heedful.hf", "heedful.hf.look"}, {"heedful.hf.look"}, {"heedful.hf"}),
        ({"heedful.hf.look", "heedful.hfx"}, {"heedful.hf"}, {"heedful.hfx"}),
    ],
)
def test_a_file_does_not_open_its_room(names, allowed, result):
    assert beyond(names, allowed) == result


def test_transformers_stays_behind_its_door():
    users = {room_of(path) for path in FILES if "transformers" in imported(path)}
    assert "hf" in users
    assert users <= MAY_USE_TRANSFORMERS, users - MAY_USE_TRANSFORMERS


# What else a command imports of another: options are everyone's, and models below them all.
BELOW_COMMANDS = {"options", "models", "policies"}
COMMAND_MAP = {
    "models": {"options"},
    "options": set(),
    "policies": {"options"},
    "bench": set(),
    "budget": {"train"},  # texts with facts
    "generate": set(),
    "inspect": set(),
    "convert": set(),
    "train": set(),
    "compare": {"inspect"},  # the names of kernels' patterns
    "shrink": {"train", "budget"},  # which it runs one after the other
    "evaluate": {"generate", "compare"},  # prompts in chunks; tasks and figures
}


def room_of_command(module: str) -> str:
    return module.split(".")[2]


def test_commands_import_one_another_as_the_map_says():
    modules, imports = module_graph(LAB)
    commands = [name for name in modules if name.startswith("heedful_lab.commands.")]
    assert {room_of_command(name) for name in commands} == COMMAND_MAP.keys()
    for name in commands:
        room = room_of_command(name)
        others = {
            room_of_command(x) for x in imports[name] if x.startswith("heedful_lab.commands.")
        }
        allowed = COMMAND_MAP[room] | ({room} if room in BELOW_COMMANDS else BELOW_COMMANDS)
        assert others <= allowed | {room}, f"{name} imports {others - allowed}"


@pytest.mark.parametrize("folder", [ROOT, LAB, STUDIES], ids=lambda x: x.name)
def test_no_file_imports_itself_in_a_circle(folder):
    """Whatever a file imports, when it is loaded and when its functions are called."""
    modules, imports = module_graph(folder)
    finished, under_way = set(), []

    def visit(name: str) -> None:
        if name in under_way:
            raise AssertionError(" -> ".join([*under_way[under_way.index(name) :], name]))
        if name in finished:
            return
        under_way.append(name)
        for other in sorted(imports[name]):
            visit(other)
        finished.add(under_way.pop())

    for name in modules:
        visit(name)


def module_graph(folder: Path) -> tuple[dict[str, Path], dict[str, set[str]]]:
    """The modules of a folder by dotted name, and which of these each imports, anywhere in it."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imports = {}
    for name, path in modules.items():
        imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                imports[name] |= {x if x in modules else node.module for x in full}
            elif isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names}
        imports[name] = (imports[name] & modules.keys()) - {name}
    return modules, imports


def loaded_by(statement: str) -> set[str]:
    """First names of the modules that a fresh interpreter holds after one statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(process.stdout.split())


HEAVY = {"torch", "transformers", "triton", "matplotlib", "numpy", "datasets", "tyro", "accelerate"}


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import heedful") & HEAVY == set()
    assert loaded_by("import heedful; dir(heedful)") & HEAVY == set()


def test_operators_and_layers_need_torch_alone():
    loaded = loaded_by("import heedful.ops, heedful.nn")
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


def test_the_core_is_read_in_an_afternoon():
    """The files of the reading list are there, few and short."""
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    part = text.partition("## The core, in reading order")[2].partition("\n## ")[0]
    files = [x for row in part.splitlines() for x in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(files) == len(set(files)) <= 34
    assert sum(len((ROOT / x).read_text().splitlines()) for x in files) <= 6500
