"""What the documentation says is true: its code runs, its commands exist, its links lead somewhere.

Commands run as they stand, in a folder that holds the files they name, with every model and
measurement made small: at their real sizes they take minutes.
"""

import gzip
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
from benchmarks import tables
from heedful.compatibility import TESTED
from heedful.eviction import MostHidden
from heedful.hf.budgets import write_budgets
from heedful.hf.stock import stock_model, stock_tokenizer
from heedful_lab.commands.bench import measure as bench
from heedful_lab.commands.compare import run as compare
from heedful_lab.commands.compare.scratch import Size
from heedful_lab.commands.train import start as trained_models
from heedful_lab.commands.train.options import SIZES, Shape
from helpers import ROOT
from helpers.command_line import change_setups, status_of
from helpers.gguf_files import write_gguf
from helpers.small_models import needs_smollm2, small, tokenizer_of_words

STUDIES = tuple(sorted((ROOT / "benchmarks").glob("**/README.md")))
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SLOW = ("compiled.py", "fsdp.py")
SLOW_PAGES = ("docs/using.md",)  # which trains several models
# Of models that other commands made.
FOLDERS = (
    "runs/study", "runs/text-", "runs/training/", "runs/lora-", "runs/alone-", "runs/lower-",
    "runs/all-",
)  # fmt: skip
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
EVERY_PAGE = (*PAGES, ROOT / "CHANGELOG.md", *STUDIES)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    line: int
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    assert text.count("\n```") % 2 == 0, "a code block is not closed"
    return [
        Block(text.count("\n", 0, match.start(2)), match[1].strip(), match[2])
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def commands() -> list:
    """Every `heedful ...` command line of the documentation, once whatever file it writes."""
    cases = {}
    for page in EVERY_PAGE:
        for block in blocks(page):
            if block.kind != "sh":
                continue
            for line in block.text.splitlines():
                for words in map(shlex.split, line.split("&&")):
                    if words and Path(words[0]).name == "heedful":
                        out = words.index("--out") + 1 if "--out" in words else len(words)
                        # As slow: what a study ran, and comparisons of pages but the README.
                        late = words[1] == "compare" and page != ROOT / "README.md"
                        late |= page in STUDIES
                        marks = [pytest.mark.slow] * late
                        label = f"{name(page)}: {' '.join(words)}"
                        case = pytest.param(words[1:], id=label, marks=marks)
                        cases.setdefault((*words[1:out], *words[out + 1 :]), case)
    return list(cases.values())


def scripts(page: Path) -> dict[str, str]:
    """The blocks of a page that are files of their own, marked `python FILE.py`, by name."""
    kinds = [(block.kind.partition(" "), block.text) for block in blocks(page)]
    return {kind[2]: text for kind, text in kinds if kind[0] == "python" and ".py" in kind[2]}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(x, id=name(x), marks=[pytest.mark.slow] * (name(x) in SLOW_PAGES))
        for x in PAGES
    ],
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order and in one namespace per page; `python no-run` is only compiled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    small(positions=8192).save_pretrained(tmp_path / HUB)  # a folder of that name: no network
    tokenizer_of_words(chat=True).save_pretrained(tmp_path / HUB)
    namespace = {"__name__": "documentation"}
    for block in blocks(page):
        kind = "script" if block.kind.removeprefix("python ") in scripts(page) else block.kind
        assert kind in ("python", "python no-run", "script", "sh", "bibtex", "text"), block
        if kind in ("python", "python no-run"):
            # The line numbers of the page, so that a failure points into it.
            code = compile("\n" * block.line + block.text, name(page), "exec")
            if block.kind == "python":
                exec(code, namespace)


@pytest.mark.slow
@needs_smollm2
@pytest.mark.parametrize(("page", "count"), [("README.md", 1), ("docs/quickstart.md", 2)])
def test_the_first_snippets_run_on_the_real_model(page, count, tmp_path, monkeypatch):
    """In bfloat16, whose rounding a small random model does not show."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    model = stock_model("smollm2", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / HUB)
    stock_tokenizer("smollm2").save_pretrained(tmp_path / HUB)
    snippets = [x.text for x in blocks(ROOT / page) if x.kind == "python"]
    namespace: dict = {}
    for text in snippets[:count]:
        exec(text, namespace)
    cache = namespace["cache"]
    assert cache.bf16_nbytes == 2 * 2 * 30 * 3 * 64 * cache.get_seq_length()


@pytest.mark.parametrize(
    ("page", "script"),
    [
        pytest.param(page, script, id=script, marks=pytest.mark.slow if script in SLOW else ())
        for page in PAGES
        for script in scripts(page)
    ],
)
def test_scripts_of_a_page_run(page, script, tmp_path):
    """In processes of their own, by the command that the page gives, and without our hooks."""
    lines = "\n".join(block.text for block in blocks(page) if block.kind == "sh")
    (command,) = re.findall(rf"^(?:python|torchrun .*) {script}$", lines, re.MULTILINE)
    (tmp_path / script).write_text(scripts(page)[script])
    words = shlex.split(command)[1:]
    if command.startswith("torchrun"):
        words = ["-m", "torch.distributed.run", *words]
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.parametrize("arguments", commands())
def test_commands_run(arguments, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    if "on-disk" in arguments:
        request.getfixturevalue("task_data")
    books = (f"books{part}" for part in ("", "-held-out", "-train", "-test", "-dev"))
    for place in ("my-notes", "notes", *books):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("heed the needful, need the heedful. " * 300)
    for book in ("book.txt", "wikitext2-valid.txt", "shakespeare.txt"):
        (tmp_path / book).write_text("a book of one line, and then another line. " * 300)
    (tmp_path / "letter.txt").write_text("heed the needful. " * 30)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    turns = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me."}]
    (tmp_path / "chats.jsonl").write_text(300 * (json.dumps({"messages": turns}) + "\n"))
    lines = (f"a source of {n}\ta target of {n * n}\n" for n in range(60))
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    pairs = tokenizer_of_words(pairs=("re",))
    (tmp_path / "gemma").mkdir()
    for file in ("model.gguf", "gemma/gemma-3-270m.gguf"):
        write_gguf(tmp_path / file, small(positions=528), pairs)
    with gzip.open(tmp_path / "book.txt.gz", "wt") as packed:
        packed.write("a book in a parcel, to be opened by whoever reads. " * 300)
    mine = ("my-model", "my-baseline", "runs/selective-30m", "runs/whole", "smollm2")
    folders = {x for x in arguments if x in mine or x.startswith(FOLDERS)}
    length = 512 if any(x.startswith("recall:") for x in arguments) else 48
    result = None  # the folder that the command writes
    if arguments[0] == "convert":
        result = arguments[2]
    elif arguments[0] in ("train", "shrink"):
        result = arguments[arguments.index("--out") + 1]
    for folder in folders - {result}:
        if arguments[0] in ("budget", "generate", "eval", "inspect"):
            _save_small_model(tmp_path / folder)
        if "--cache" in arguments:
            kept = ("--prompt", "a red bus", "--save-cache", "book.cache")
            assert status_of("generate", folder, *kept) == 0, capsys.readouterr().err
        if arguments[0] in ("train", "convert", "doctor", "shrink"):
            small(positions=max(length, 96) + 16).save_pretrained(tmp_path / folder)
            tokenizer_of_words(chat=True).save_pretrained(tmp_path / folder)
    ours = {f"adapters/smollm2-135m-{recipe}" for recipe in ("hide", "evict")}
    for adapter in ({"runs/hide", "runs/gemma-hide"} | ours) & {*arguments} - {result}:
        if arguments[0] != "train" or "evict" in arguments:
            _save_small_adapter(tmp_path / adapter, tmp_path / "smollm2")
    measure = bench.bench

    def small_bench(config):
        sizes = {"batch": min(config.batch, 2), "heads": 4, "dim": 16, "lengths": (150,)}
        impls = tuple(x for x in config.impls if x != "flex")  # which takes long to compile
        return measure(replace(config, impls=impls, rounds=1, memory=False, **sizes))

    if arguments[0] == "train":
        arguments = [*arguments, "--steps", "1", "--batch", "2", "--length", str(length)]
        monkeypatch.setattr(trained_models, "SIZES", dict.fromkeys(SIZES, TINY))
    if arguments[0] == "eval":
        few = "--samples 2 --lengths 900 --depths 0.5 --needles 2 --length 48 --kinds 1"
        arguments = [*arguments, *few.split()]
    if "--revert" in arguments:
        heedful.convert(small(), "mta").model.save_pretrained(tmp_path / "runs" / "with-mta")
    smaller = {"--steps": "1", "--seeds": "1", "--length": str(length), "--hidden": "16"}
    smaller |= {"--layers": "2", "--heads": "2"}
    for option, small_value in smaller.items():
        if option in arguments and arguments[0] != "inspect":  # its layers are which, not how many
            value = arguments.index(option) + 1
            arguments = [*arguments[:value], small_value, *arguments[value + 1 :]]
    if arguments[0] == "shrink":
        few = "--steps 1 --length 96 --trials 2 --rows 1 --ratio 2"
        arguments = [*arguments, *few.split()]
    if arguments[0] == "compare" and "--steps" not in arguments:
        arguments = [*arguments, "--steps", "1"]  # of the tour too, which has steps of its own
    plans = compare.plans
    monkeypatch.setattr(compare, "plans", lambda *arguments: islice(plans(*arguments), 2))
    change_setups(
        monkeypatch, lambda _: Size(16, 2, 2), steps=1, batch=2, evaluations=1, held_out=2
    )
    monkeypatch.setattr(bench, "bench", small_bench)
    assert status_of(*arguments) == 0, capsys.readouterr().err


TINY = Shape(16, 2, 2, 32, 300, True, 1e4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launched_commands_run(launcher, tmp_path):
    """As they stand, but with two processes on a CPU, a small model and two steps."""

    def launch(words: list[str]) -> subprocess.CompletedProcess:
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    lines = [
        line for page in PAGES for block in blocks(page) if block.kind == "sh"
        for line in block.text.splitlines() if line.startswith(launcher) and "heedful" in line
    ]  # fmt: skip
    assert lines
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("heed the needful, need the heedful. " * 300)
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    runs: dict[str, list[list[str]]] = {}
    for line in lines:
        line = re.sub(r"(nproc-per-node|num_processes) 8", r"\1 2", line)
        words = shlex.split(line.replace("node-0:29500", f"127.0.0.1:{port}"))
        words[words.index("train") + 1] = "tiny.json"
        words[0] = str(Path(sys.executable).with_name(words[0]))
        words += shlex.split("--steps 2 --warmup 1 --batch 4 --length 48 --device cpu")
        runs.setdefault(words[words.index("--out") + 1], []).append(words)
    for out, nodes in runs.items():
        with ThreadPoolExecutor(len(nodes)) as pool:  # the nodes of a run all at once
            for process in pool.map(launch, nodes):
                assert process.returncode == 0, process.stderr[-3000:]
        folder = tmp_path / out
        assert (folder / "model.safetensors").is_file() and not (folder / "unfinished").exists()


def _save_small_adapter(folder: Path, base: Path) -> None:
    """Selectors for a model of standard attention, with its tokenizer, and budgets beside them."""
    small(positions=8192).save_pretrained(base)
    tokenizer_of_words(chat=True).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    heedful.convert(model, heedful.Selective(selector="extra"))
    heedful.save_adapter(model, folder, base=base.name)
    write_budgets(folder / "budgets.json", MostHidden(tokens=(20, 30)), model, {})


def _save_small_model(folder: Path) -> None:
    """A selective model with a tokenizer, and budgets beside it; the same at every call."""
    torch.manual_seed(0)
    model = small(positions=16384)
    heedful.convert(model, "selective")
    model.save_pretrained(folder)
    tokenizer_of_words(chat=True).save_pretrained(folder)
    write_budgets(folder / "budgets.json", MostHidden(tokens=(20, 30)), model, {})


def test_other_commands_name_scripts_that_exist():
    for page in EVERY_PAGE:
        for block in blocks(page):
            if block.kind == "sh":
                for module, script in re.findall(
                    r"^python (?:-m (benchmarks\S+)|(\S+\.py))", block.text, re.MULTILINE
                ):
                    path = ROOT / (script or f"{module.replace('.', '/')}.py")
                    assert script in scripts(page) or path.is_file(), f"{name(page)}: {path}"


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{name(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{name(page)}: {target}"


def test_tables_are_those_of_the_results():
    assert tables.main(["--check"]) == 0, "run python -m benchmarks.tables"


def test_every_public_name_is_listed():
    reference = (ROOT / "docs" / "reference.md").read_text()
    section = (ROOT / "docs" / "architecture.md").read_text().split("## The public names")[1]
    listed = set(re.findall(r"^::: [\w.]+\.(\w+)$", reference, re.MULTILINE))
    listed |= set(re.findall(r"`(\w+)`", section.split("\n## ")[0]))
    assert {*heedful.__all__, *heedful.eviction.__all__} - {"__version__"} <= listed


def test_a_fresh_clone_needs_one_command_line_each():
    text = (ROOT / "README.md").read_text()
    for marker, last in (("main command", "heedful compare"), ("test command", "pytest -n auto")):
        (line,) = re.findall(rf"^<!-- {marker} -->\n```sh\n([^\n]*)\n```$", text, re.MULTILINE)
        assert line.startswith("python3 -m venv .venv && ")
        assert line.endswith(f"&& .venv/bin/{last}")
        assert f"install torch=={TESTED['torch'][0]} &&" in line, "doctor says what was tested"
