"""The command line as a shell sees it."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful
from heedful.checks import UserError
from heedful_lab import doctor
from heedful_lab.cli import main
from heedful_lab.commands.bench import cases
from heedful_lab.commands.bench import options as config
from heedful_lab.commands.compare import one_model as train
from heedful_lab.commands.compare import options as comparison
from heedful_lab.commands.compare import setups
from heedful_lab.commands.options import EVICTIONS
from heedful_lab.commands.policies import POLICIES, spelled
from heedful_lab.rivals.table import TABLE
from heedful_lab.tasks import TASKS
from helpers.command_line import refusal, status_of

HEEDFUL = [sys.executable, "-m", "heedful_lab"]


def test_the_commands_are_these():
    result = subprocess.run([*HEEDFUL, "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    commands = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("│   • ")]
    assert commands == [
        "compare",
        "train",
        "shrink",
        "convert",
        "generate",
        "budget",
        "eval",
        "inspect",
        "bench",
        "doctor",
    ]


def test_a_typo_in_an_option_is_a_usage_error():
    result = subprocess.run([*HEEDFUL, "compare", "--taks"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "--tasks" in result.stderr + result.stdout and "Traceback" not in result.stderr


CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_doctor_says_which_mechanisms_fit_a_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(CONFIG))
    assert status_of("doctor", "tiny.json") == 0
    printed = capsys.readouterr().out
    fits = {line.split()[0]: line.split(maxsplit=1)[1] for line in printed.splitlines()}
    assert "attention    2 layers of 4 heads of 8, 2 key heads" in printed
    # 2 layers x 2 key heads x 8 x (K and V)
    assert "KV cache     64 numbers per token, so 128 bytes in bfloat16" in printed
    # Mixing before and after the softmax: 2 layers x 2 x 4 x 4.
    assert fits["talking-heads"] == "fits: 64 parameters more; caches hold keys and values"
    assert fits["selective"] == "fits: 0 parameters more; caches hold keys and values, F"
    assert fits["canon"].endswith(" parameters more; no cache")
    Path("sinks.json").write_text(json.dumps(CONFIG | {"model_type": "gpt_oss", "head_dim": 8}))
    assert status_of("doctor", "sinks.json") == 0
    assert re.search("grouped +does not fit: mechanism Grouped", capsys.readouterr().out)
    line = refusal(capsys, "doctor", "nothing.json")
    assert "'nothing.json' has no configuration that can be read" in line


def test_a_folder_is_converted_and_back(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.bfloat16)
    model.save_pretrained("stock")
    assert status_of("convert", "stock", "made", "--mechanism", "mta:conv_every=1@1") == 0
    printed = capsys.readouterr().out
    assert "in 1 layers" in printed and "parameters of its own" in printed
    model_back = heedful.load("made")
    assert model_back.dtype == torch.bfloat16
    assert model_back._heedful.mechanisms == {heedful.MultiToken(conv_every=1): (1,)}
    assert status_of("doctor", "made") == 0
    assert "converted    to MultiToken(" in capsys.readouterr().out
    assert status_of("convert", "made", "back", "--revert") == 0
    assert Path("made/open_with_heedful.py").exists()
    assert not Path("back/open_with_heedful.py").exists()
    back = AutoModelForCausalLM.from_pretrained("back")
    for name, value in model.state_dict().items():
        assert torch.equal(value, back.state_dict()[name])
    capsys.readouterr()
    for words, message in (
        (("made", "more", "--mechanism", "mta"), "is converted already; take its mechanism out"),
        (("stock", "more", "--revert"), "is not a converted model; there is nothing to take out"),
        (("stock", "made", "--mechanism", "mta"), "out must be a new or empty folder"),
        (("stock", "more"), "give either --mechanism, or --revert"),
        (
            ("a/b/c", "more", "--mechanism", "mta"),
            "source 'a/b/c' cannot be opened: there is no such folder",
        ),
        (("stock", "more", "--mechanism", "mta:convevery=1"), "has no option 'convevery=1'"),
        (("stock", "more", "--mechanism", "mta", "selective"), "each must say its layers"),
        (("stock", "more", "--mechanism", "mta@x"), "must be spelled NAME[:OPTION=VALUE"),
    ):
        assert message in refusal(capsys, "convert", *words)
        assert not Path("more").exists()


def test_train_ends_with_a_line_and_errors_with_a_message(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(CONFIG))
    Path("text.txt").write_text("one line and another line\n" * 200)
    options = "--data text.txt --steps 2 --batch 2 --length 16 --device cpu --out run"
    options = shlex.split(options)
    assert status_of("train", "tiny.json", *options) == 0
    printed = capsys.readouterr().out
    assert "2 steps, 64 tokens in" in printed and "bits per byte of the evaluation set" in printed
    line = refusal(capsys, "train", "tiny.json", *options, "--seed", "1")
    assert "folder of another run: seed was 0 and is 1 now" in line
    assert "did you mean 'mta'" in refusal(capsys, "train", "tiny.json", "--recipe", "mat")


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        (
            {"torch": "2.13.0+cpu", "transformers": "5.23.0"},
            [
                "torch        2.13.0+cpu (heedful is tested with 2.13.0, 2.14.1)\n",
                "transformers 5.23.0 (heedful is tested with 5.17.0, 5.23.0, 5.24.0)\n",
            ],
        ),
        (
            {"torch": "2.15.0+cu130", "transformers": "5.25.0"},
            [
                "torch        2.15.0+cu130 (untested: heedful is tested with 2.13.0, 2.14.1)",
                "transformers 5.25.0 (untested: heedful is tested with 5.17.0, 5.23.0, 5.24.0; "
                "convert() proves of every model that it computes the same)",
            ],
        ),
        ({"triton": None}, ["triton       missing, for impl=fused: pip install triton"]),
    ],
    ids=str,
)
def test_doctor_says_which_versions_are_untested_or_at_odds(versions, words, monkeypatch):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, real(name)))
    lines = []
    assert doctor.examine(lines.append) == 0
    assert all(text in "\n".join(lines) for text in words), lines


def test_doctor_stops_at_a_transformers_that_is_too_old(monkeypatch):
    real, lines = doctor.installed, []
    monkeypatch.setattr(doctor, "installed", lambda x: {"transformers": "5.3.0"}.get(x, real(x)))
    assert doctor.examine(lines.append) == 1
    assert "transformers 5.3.0 (too old: heedful is tested with 5.17.0" in "\n".join(lines)
    assert "pip install 'transformers>=5.17.0'" in "\n".join(lines)


def test_the_version_is_printed(capsys):
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"heedful {heedful.__version__}\n"


def test_help_lists_what_the_rooms_accept(capsys):
    lists = {
        comparison.TaskName: TASKS,
        comparison.MechanismName: [row.name for row in TABLE],
        comparison.Device: ("auto", "cpu", "cuda"),
        config.CaseName: cases.MECHANISMS,
        config.ImplName: cases.OURS + cases.PEERS,
        config.PassName: cases.PASSES,
        config.Dtype: ("float32", "bfloat16", "float16"),
    }
    policies = {spelled(policy.__name__) for policy in POLICIES}
    assert {*EVICTIONS} == {"auto", "none"} | policies
    printed = ""
    for command in ("compare", "generate", "budget", "bench"):
        status_of(command, "--help")
        printed += re.sub(r"[│\s]", "", capsys.readouterr().out)
    assert f"{{{','.join(EVICTIONS)},MODULE:CLASS}}" in printed
    for options, accepted in lists.items():
        assert set(get_args(options)) == set(accepted)
        assert f"{{{','.join(get_args(options))}}}" in printed


def test_a_reader_that_stops_reading_is_no_error():
    for arguments in (["compare", "--help"], ["--version"]):
        read, write = os.pipe()
        os.close(read)
        result = subprocess.run([*HEEDFUL, *arguments], stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        assert result.returncode == 141 and result.stderr == b""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "runs/x"), "Permission denied: runs/x"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "not enough memory (CUDA out of"),
        (MemoryError("Unable to allocate 1 TiB"), "not enough memory (Unable to allocate 1 TiB)"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_what_the_machine_refuses_is_one_line(monkeypatch, capsys, error, message):
    def fail(command):
        warnings.warn("a word of warning", stacklevel=1)
        raise error

    monkeypatch.setattr("heedful_lab.cli._run", fail)
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "warning: a word of warning" and second.startswith(f"heedful: {message}")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("illegal memory access"),
        ValueError("only one element tensors can be converted"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        json.JSONDecodeError("Expecting value", "", 0),
        KeyError("weights"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch, error):
    def fail(command):
        raise error

    monkeypatch.setattr("heedful_lab.cli._run", fail)
    with pytest.raises(type(error)) as raised:
        main(["doctor"])
    assert raised.value is error


def test_a_mistake_of_the_user_is_one_line(monkeypatch, capsys):
    def fail(command):
        raise UserError("steps must be a whole number of at least 1, got 0")

    monkeypatch.setattr("heedful_lab.cli._run", fail)
    assert refusal(capsys, "doctor") == "heedful: steps must be a whole number of at least 1, got 0"


def test_python_catches_it_as_a_value_error():
    with pytest.raises(ValueError, match="mechanism must be one of") as raised:
        heedful.nn.mechanism("mtaa")
    assert type(raised.value) is UserError


@pytest.mark.filterwarnings("default")
def test_a_line_that_was_cut_off_is_one_clean_line(tmp_path, capsys, monkeypatch):
    setup = setups.setups()["parity"]
    setup = setup._replace(hyperparameters=replace(setup.hyperparameters, held_out=4))
    monkeypatch.setattr(setups, "setups", lambda data: {"parity": setup})
    command = ["compare", "--tasks", "parity", "--steps", "1", "--batch", "2", "--device", "cpu"]
    command += ["--mechanisms", "standard", "--out", str(tmp_path)]
    status_of(*command)
    results = tmp_path / "results.jsonl"
    results.write_bytes(results.read_bytes()[:-20])
    capsys.readouterr()
    assert status_of(*command) == 0
    error = capsys.readouterr().err
    assert f"warning: {results}: removed a last line that was cut off\n" in error
    assert ".py:" not in error and "UserWarning" not in error


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
    assert "Traceback" not in rest
    (saved,) = (tmp_path / "unfinished").glob("*/checkpoint-*")
    step = saved.name.removeprefix("checkpoint-")
    state = f"parity-standard-0 as it was after step {step} kept in {tmp_path}"
    assert f"stopped: 0 finished runs and {state}; the same command goes on there" in rest


def test_sigterm_saves_as_ctrl_c_does(tmp_path, monkeypatch):
    def endless(*arguments, should_stop, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return train.train(*arguments, should_stop=should_stop, **options)

    monkeypatch.setattr("heedful_lab.commands.compare.run.train", endless)
    before = signal.getsignal(signal.SIGTERM)
    command = ["compare", "--tasks", "parity", "--steps", "9", "--batch", "2", "--device", "cpu"]
    assert status_of(*command, "--out", str(tmp_path)) == 143
    assert (tmp_path / "unfinished" / "parity-standard-0" / "checkpoint-1").is_dir()
    assert signal.getsignal(signal.SIGTERM) is before
