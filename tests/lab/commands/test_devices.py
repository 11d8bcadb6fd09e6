"""Where a command's model runs and in which precision: chosen once, for every command alike."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import heedful
from heedful_lab import doctor
from heedful_lab.commands import models
from heedful_lab.commands.models import device_of, open_model
from helpers.command_line import refusal, status_of
from helpers.small_models import small, tokenizer_of_words

DATA = ("--data", "book.txt", "--length", "40")
COMMANDS = {
    "generate": ("generate", "model", "--prompt", "a red", "--max-new-tokens", "2"),
    "eval": ("eval", "model", "--tasks", "perplexity", *DATA, "--samples", "2"),
    "budget": ("budget", "model", *DATA, "--rows", "1", "--trials", "1", "--restart"),
    "inspect": ("inspect", "model", "--text", "a red bus"),
}
TRAINING = {
    "train": ("train", "model", *DATA, "--steps", "1", "--batch", "1"),
    "compare": ("compare", "--tasks", "parity", "--steps", "1", "--batch", "2"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    """In a folder with a converted model, saved in bfloat16, and a text."""
    model = small().bfloat16()
    heedful.convert(model, "mta")
    model.save_pretrained(tmp_path / "model")
    tokenizer_of_words().save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text("a red bus and a red car, and one book. " * 40)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gpus(monkeypatch) -> None:
    """As with two GPUs that torch sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Test GPU")


@pytest.fixture
def opened(monkeypatch) -> list[PreTrainedModel]:
    """The models that commands open, which stay on the CPU wherever they are sent."""
    opened = []
    real = models.open_model

    def recorded(*args, **options):
        opened.append(real(*args, **options))
        return opened[-1]

    monkeypatch.setattr(models, "open_model", recorded)
    return opened


def test_auto_is_a_gpu_where_torch_sees_one(gpus):
    named = {name: str(device_of(name)) for name in ("auto", "cpu", "cuda", "cuda:1")}
    assert named == {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:1": "cuda:1"}
    for name in ("cuda:2", "cuda:7"):
        with pytest.raises(ValueError, match=f"device='{name}' .* torch sees cuda:0 to cuda:1"):
            device_of(name)


def test_auto_is_the_cpu_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(device_of("auto")) == "cpu"
    with pytest.raises(ValueError, match="device='cuda' needs a GPU, and torch sees none; use cpu"):
        device_of("cuda")


@pytest.mark.parametrize("words", [(), ("--device", "cuda:1")], ids=["default", "cuda:1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_device_reaches_the_model(command, words, gpus, monkeypatch):
    devices = []

    def send(self, device):
        devices.append(str(device))
        raise OSError("there is no such device here")

    monkeypatch.setattr(PreTrainedModel, "to", send)
    assert status_of(*COMMANDS[command], *words) == 1
    assert devices == [words[-1] if words else "cuda"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("dtype", ["auto", *DTYPES])
def test_a_model_is_opened_in_its_dtype(command, dtype, opened, capsys):
    words = () if dtype == "auto" else ("--dtype", dtype)
    assert status_of(*COMMANDS[command], *words) == 0, capsys.readouterr().err
    expected = DTYPES.get(dtype, torch.bfloat16)
    assert opened and {x.dtype for x in opened} == {expected}
    printed = capsys.readouterr()
    said = [x for x in printed.err.splitlines() if x.startswith("device: ")]
    assert said == [f"device: {device_of('auto')}"], printed.err


def test_rotations_stay_in_float32():
    model = open_model("model", dtype="bfloat16")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_written_folder_has_its_dtype():
    for name, dtype in {"auto": torch.bfloat16, **DTYPES}.items():
        chosen = () if name == "auto" else ("--dtype", name)
        assert status_of("convert", "model", f"out-{name}", "--revert", *chosen) == 0
        assert heedful.stock_model(f"out-{name}").dtype == dtype


@pytest.mark.parametrize("command", [*COMMANDS, *TRAINING])
def test_a_device_that_is_not_there_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = (COMMANDS | TRAINING)[command]
    before = sorted(Path().iterdir())
    for device, message in (
        ("cuda", "torch sees no"),
        ("cuda:x", "device must be one of 'auto', 'cpu', 'cuda', got 'cuda:x'"),
        ("cuda:7", "'cuda:7'"),
    ):
        assert message in refusal(capsys, *words, "--device", device)
    assert sorted(Path().iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING)
def test_training_says_its_device(command, capsys):
    assert status_of(*TRAINING[command], "--device", "cpu") == 0
    assert capsys.readouterr().err.count("device: cpu") == 1


def test_doctor_lists_devices_and_optional_parts(monkeypatch, gpus):
    versions = {"peft": None, "gguf": "0.17.0", "lm_eval": None, "torchao": None, "datasets": None}
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, real(name)))
    lines = []
    assert doctor.examine(lines.append) == 0
    text = "\n".join(lines)
    for expected in (
        "device       cuda (Test GPU)",
        "commands     cuda: generate, eval, budget, inspect, train, compare, bench; cpu: convert",
        "gguf         0.17.0",
        "peft         missing, for LoRA: pip install 'heedful[lora]'",
        "lm_eval      missing, for heedful eval's tasks of lm-evaluation-harness: pip install "
        "lm-eval",
        "torchao      missing, for quantized models: pip install 'heedful[quantized]'",
        "datasets     missing, for --data hf:NAME: pip install 'heedful[data]'",
    ):
        assert expected in text, text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines.clear()
    doctor.examine(lines.append)
    assert any(line.startswith("commands     cpu: generate") for line in lines)
