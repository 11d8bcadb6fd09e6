"""`heedful train`: resumable to the bit, the same on several processes, refused by name."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import heedful
from heedful.training.run import Stopped
from heedful.training.sequences import TrainingSequences, encode
from heedful.training.trainer import LayerTrainer, parameter_groups
from heedful_lab.commands.train.options import RECIPES, SIZES, Training
from heedful_lab.commands.train.run import train_text
from heedful_lab.commands.train.start import starting_point

TEXT = "".join(f"line {i}: {'the quick brown fox '[: i % 21]}jumps\n" for i in range(1500))
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def options(tmp_path, monkeypatch) -> Training:
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(CONFIG))
    Path("text.txt").write_text(TEXT)
    return Training(
        "tiny.json", ("text.txt",), "run", ("selective",), steps=12, batch=4, length=32,
        evaluations=3, memory_loss=0.1, device="cpu",
    )  # fmt: skip


def quietly(options: Training, stop=lambda: False):
    return train_text(options, stop, show=False)


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def log(folder: str) -> list[dict]:
    lines = map(json.loads, (Path(folder) / "log.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def same(first: str, second: str) -> bool:
    a, b = weights(first), weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stop_after(steps: int):
    answers = iter([False] * (steps - 1))
    return lambda: next(answers, True)


def test_a_run_leaves_a_model_its_tokenizer_and_what_came_out(options):
    result = quietly(options)
    assert sorted(os.listdir("run")) == [
        "config.json", "generation_config.json", "log.jsonl", "model.safetensors",
        "open_with_heedful.py",
        "tokenizer.json", "tokenizer_config.json", "training.json",
    ]  # fmt: skip
    scored = [line for line in log("run") if "eval_loss" in line]
    assert [line["step"] for line in scored] == [4, 8, 12]
    assert scored[-1]["eval_loss"] == result.loss < scored[0]["eval_loss"] < math.log(300)
    model = heedful.load("run")
    assert model.config.vocab_size == 300 == len(AutoTokenizer.from_pretrained("run"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = os.stat("run/model.safetensors").st_mtime_ns
    assert quietly(options) == result  # a finished run is told, not made again
    assert os.stat("run/model.safetensors").st_mtime_ns == before


def test_bits_per_byte_are_those_of_the_text(options):
    """By hand: of the saved model, over a document given as evaluation set."""
    single = replace(options, held_out=("one.txt",), tokenizer="bytes", out="one")
    Path("one.txt").write_text("x" * 30)
    result = quietly(single)
    tokenizer = AutoTokenizer.from_pretrained("one")
    assert tokenizer("né")["input_ids"] == [tokenizer.bos_token_id, *"né".encode()]
    row = torch.tensor([[tokenizer.bos_token_id, *b"x" * 30, tokenizer.eos_token_id]])
    nats = heedful.load("one").eval()(input_ids=row, labels=row).loss.item() * 31
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / 30, rel=1e-5)


def test_how_much_of_the_text_a_run_draws_from(options):
    """As much as its steps need, or as much as is requested; a document at most goes beyond."""
    documents = [json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()]
    Path("documents.jsonl").write_text("".join(documents))
    options = replace(options, data=("documents.jsonl",), held_out=("text.txt",), tokenizer="bytes")
    for number, (more, least) in enumerate(
        (({}, 12 * 4 * 31 + 1), ({"steps": 3}, 3 * 4 * 31 + 1), ({"read_tokens": 4000}, 4000))
    ):
        with pytest.raises(Stopped):
            quietly(replace(options, out=f"run-{number}", **more), stop_after(1))
        counts = json.loads(Path(f"run-{number}/unfinished/text/0/tokens.json").read_text())
        assert least <= counts["train"]["tokens"] < least + 60
    with pytest.raises(ValueError, match="read_tokens must be"):
        replace(options, read_tokens=0)


@pytest.mark.parametrize(
    "mechanism",
    [
        "selective",
        pytest.param("mta", marks=pytest.mark.slow),
        "grouped:grouping=cif,size=4,window=8",
    ],
)
def test_a_stopped_run_goes_on_to_the_same_end(options, mechanism):
    memory = 0.1 if mechanism == "selective" else 0.0
    options = replace(options, mechanism=(mechanism,), memory_loss=memory)
    quietly(replace(options, out="whole"))
    for steps in (5, 2):
        with pytest.raises(Stopped):
            quietly(options, stop_after(steps))
        assert not Path("run/model.safetensors").exists()
    quietly(options)
    assert same("run", "whole") and log("run") == log("whole")


def test_a_mixture_teaches_a_new_vocabulary_its_texts(options):
    mixture = replace(options, data=("text.txt:2", "recall:1"), out="mixture")
    starts = [
        starting_point(x.origin(), x.filled(), Path(x.out, "tokenizer")) for x in (options, mixture)
    ]
    vocabularies = [start.tokenizer.get_vocab() for start in starts]
    assert vocabularies[0] == vocabularies[1] and len(vocabularies[0]) > 258


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(options):
    quietly(replace(options, out="whole"))
    for steps in (4, 3):
        with pytest.raises(Stopped):
            quietly(options, stop_after(steps))
    newest = Path("run/unfinished/state/checkpoint-7/model.safetensors")
    newest.write_bytes(newest.read_bytes()[:-8])
    with pytest.warns(UserWarning, match=r"checkpoint-7 is cut short|going on from step 4"):
        quietly(options)
    assert same("run", "whole")


def test_another_run_s_folder_is_refused_by_what_differs(options):
    with pytest.raises(Stopped):
        quietly(options, stop_after(3))
    with pytest.raises(ValueError, match=r"folder of another run: seed was 0 and is 1 now"):
        quietly(replace(options, seed=1))
    with pytest.warns(UserWarning, match=r"save_minutes was 10\.0 and is 1\.0 now; the run stays"):
        quietly(replace(options, save_minutes=1.0))
    with pytest.raises(ValueError, match=r"folder of another run: steps was 12 and is 13 now"):
        quietly(replace(options, steps=13))


def test_a_good_checkpoint_stays_where_the_loss_stops_being_finite(options, monkeypatch):
    with pytest.raises(Stopped):
        quietly(options, stop_after(4))
    compute = LayerTrainer.compute_loss
    monkeypatch.setattr(
        LayerTrainer, "compute_loss", lambda *a, **k: compute(*a, **k) * float("nan")
    )
    monkeypatch.setattr(
        "heedful.training.run.RunTrainer.note_loss",
        lambda self, loss: self.step_losses.append(loss * float("nan")),
    )
    with pytest.raises(ValueError, match=r"checkpoint-4 is the last good checkpoint"):
        quietly(options)


def test_a_full_disk_leaves_the_checkpoint_before_it(options, monkeypatch):
    quietly(replace(options, out="whole"))
    with pytest.raises(Stopped):
        quietly(options, stop_after(4))
    save = torch.save

    def full(state, path, *args, **kwargs):
        if "checkpoint-7" in str(path):
            raise RuntimeError("PytorchStreamWriter failed writing file: file write failed")
        save(state, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"state cannot be saved in .*file write failed"):
        quietly(options, stop_after(3))
    monkeypatch.setattr(torch, "save", save)
    with (
        pytest.warns(UserWarning, match="checkpoint-7 is cut short"),
        pytest.warns(UserWarning, match="going on from step 4"),
    ):
        quietly(options)
    assert same("run", "whole")


def test_parts_of_a_step_give_the_step(options):
    """Gradient accumulation, with documents of different lengths and both added losses."""
    Path("text.jsonl").write_text(
        "".join(json.dumps({"text": TEXT[i * 7 : i * 7 + 5 + i % 90]}) + "\n" for i in range(400))
    )
    options = replace(options, data=("text.jsonl",), steps=4)
    quietly(replace(options, out="whole"))
    quietly(replace(options, accumulate=4, checkpointing=True))
    parts, whole = weights("run"), weights("whole")
    for name in parts:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=2e-6)
    for a, b in zip(log("run"), log("whole"), strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-5)


def test_standard_attention_leaves_an_ordinary_model(options):
    quietly(replace(options, mechanism=(), memory_loss=0.0))
    model = AutoModelForCausalLM.from_pretrained("run")
    assert type(model).__name__ == "LlamaForCausalLM"


def test_a_trained_model_is_trained_on_with_another_mechanism(options):
    quietly(replace(options, mechanism=(), memory_loss=0.0, out="base"))
    on = replace(options, model="base", mechanism=("mta:conv_every=1@1",), memory_loss=0.0)
    quietly(replace(on, learning_rate=1e-30, out="still"))
    base, still = weights("base"), weights("still")
    assert all(torch.equal(base[name], still[name]) for name in base)
    assert sorted(still.keys() - base.keys())[0].startswith("model.layers.1.self_attn.heedful.")
    quietly(replace(on, recipe="adapt", mechanism_rate=100.0))
    assert not same("run", "still")
    again = replace(options, model="run", mechanism=(), memory_loss=0.0, out="more")
    quietly(again)  # keeps what it is converted to
    assert heedful.load("more")._heedful.mechanism == heedful.MultiToken(conv_every=1)
    with pytest.raises(ValueError, match=r"'run' is converted already, to MultiToken"):
        quietly(replace(again, mechanism=("selective",), out="other"))
    with pytest.raises(ValueError, match=r"has weights for the vocabulary"):
        quietly(replace(again, tokenizer="bpe", out="other"))
    with pytest.raises(ValueError, match=r"length must be at most 64, the model's positions"):
        quietly(replace(again, length=65, out="other"))
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "nope.json"}, r"'nope\.json' has no configuration that can be read"),
        ({"model": "no/such/model"}, r"'no/such/model' cannot be opened"),
        ({"model": "vit.json"}, r"is of type 'vit', which has no model that predicts the next"),
        ({"data": ("gone.txt",)}, r"text 'gone\.txt' does not exist"),
        ({"data": ("short.txt",)}, r"data has \d+ tokens, too few for sequences of 32"),
        ({"mechanism": ("mta",)}, r"must have layers that report memory"),
        ({"vocabulary": 258}, r"more than 258 .*for byte pairs, got 258"),
        ({"tokenizer": "no/such/one"}, r"tokenizer 'no/such/one' cannot be read"),
        ({"batch": 5, "accumulate": 2}, r"accumulate must divide the batch of 5 sequences"),
        ({"device": "cuda"}, r"torch sees no CUDA device"),
        ({"report_to": ("paper",)}, r"report_to=paper: paper is not supported, only"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(options, change, message):
    Path("short.txt").write_text("short")
    Path("vit.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match=message):
        quietly(replace(options, **change))
    assert not Path("run").exists()


def test_the_sizes_are_the_papers():
    """880M: 876,553,728 parameters, table 9 of arXiv 2504.00927; d = 8 and 12: about 30M, 100M."""
    from heedful_lab.commands.train.start import _config

    sizes = {}
    for name in SIZES:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(_config(name))
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert sizes["880m"] == 876_553_728
    assert sizes["300m"] == 388_277_248 and sizes["550m"] == 651_818_240
    assert sizes["1b"] == 1_495_894_016
    assert sizes["30m"] == pytest.approx(29.3e6, rel=0.01)
    assert sizes["100m"] == pytest.approx(91e6, rel=0.01)
    assert RECIPES["mta"].batch * RECIPES["mta"].length == 262_144


def test_the_pieces_work_in_a_trainer_and_in_a_loop_of_one_s_own(options, tmp_path):
    """The same steps by `heedful train`, by transformers' Trainer and by a plain loop."""
    quietly(replace(options, schedule="constant", warmup=0))
    tokenizer = AutoTokenizer.from_pretrained("run")
    text = encode(
        options.data, (), tokenizer, tmp_path / "text", length=32, most_tokens=12 * 4 * 31
    )
    rows = TrainingSequences(text.train, 32, 12 * 4, seed=0)

    def start():
        torch.manual_seed(0)
        config = heedful.load("run").config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        heedful.convert(model, "selective")
        groups = parameter_groups(model, 1e-3, weight_decay=0.1)
        return model.train(), torch.optim.AdamW(groups, betas=(0.9, 0.95))

    model, optimizer = start()
    arguments = TrainingArguments(
        "own", max_steps=12, per_device_train_batch_size=4, lr_scheduler_type="constant",
        report_to="none", save_strategy="no", use_cpu=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = LayerTrainer(
        model, arguments, train_dataset=rows, optimizers=(optimizer, None), memory_loss=0.1
    )
    assert isinstance(trainer, Trainer)
    trainer.train()
    trained = weights("run")
    for name, value in model.state_dict().items():
        if name in trained:
            torch.testing.assert_close(value, trained[name], rtol=1e-5, atol=1e-6)

    model, optimizer = start()
    with heedful.MemoryLoss(model) as memory:
        for batch in torch.utils.data.DataLoader(rows, batch_size=4):
            (model(**batch).loss + 0.1 * memory()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        if name in trained:
            torch.testing.assert_close(value, trained[name], rtol=1e-5, atol=1e-6)


COMMAND = [sys.executable, "-m", "heedful_lab", "train"]
OPTIONS = shlex.split(
    "tiny.json --data text.txt --mechanism selective --memory-loss 0.1 --steps 12 --batch 4 "
    "--length 32 --evaluations 3 --device cpu"
)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_bit_equal(options):
    """Killed as a checkpoint begins, with its weights there, and sealed; a file says when."""
    words = [*OPTIONS, "--steps", "300", "--save-minutes", "0.008"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the other worker of the suite has one too
    settings = {"env": one_thread, "stderr": subprocess.PIPE, "text": True}
    subprocess.run([*COMMAND, *words, "--out", "whole"], check=True, **settings)
    moments = (".", "model.safetensors", "whole.json", "optimizer.pt")
    for moment in moments:
        earlier = checkpoints()
        process = subprocess.Popen(
            [*COMMAND, *words, "--out", "run"], env=one_thread, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if any((new / moment).exists() for new in checkpoints() - earlier):
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"ended before a checkpoint had {moment}"
    subprocess.run([*COMMAND, *words, "--out", "run"], check=True, **settings)
    assert same("run", "whole") and log("run") == log("whole")


def checkpoints() -> set[Path]:
    return set(Path("run/unfinished/state").glob("checkpoint-*"))


def torchrun(*options: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "heedful_lab", "train", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_train_what_one_does(options, fsdp):
    """DDP and FSDP2 over gloo; the loss and the weights are those of one process."""
    quietly(options)
    more = ["--fsdp"] if fsdp else []
    result = torchrun(*OPTIONS, *more, "--out", "two")
    assert result.returncode == 0, result.stderr[-2000:]
    single, double = weights("run"), weights("two")
    assert single.keys() == double.keys()
    for name in single:
        torch.testing.assert_close(single[name], double[name], rtol=1e-4, atol=2e-6)
    for a, b in zip(log("run"), log("two"), strict=True):
        assert a.keys() == b.keys()
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-5)
        assert a.get("eval_loss", 0) == pytest.approx(b.get("eval_loss", 0), rel=1e-5)


@pytest.mark.slow
def test_a_sharded_run_goes_on_in_one_process_and_back(options):
    """Saved under FSDP2 by two processes, loaded by one, saved, loaded by two under DDP."""
    quietly(replace(options, steps=40))
    words = [*OPTIONS, "--steps", "40", "--save-minutes", "0.000001", "--out", "two"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "heedful_lab", "train", *words, "--fsdp",
    ]  # fmt: skip
    process = psutil.Popen(command, stderr=subprocess.DEVNULL)
    state = Path("two/unfinished/state")
    deadline = time.monotonic() + 120
    while not list(state.glob("checkpoint-*/whole.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    everyone = [process, *process.children(recursive=True)]
    for worker in everyone:
        worker.kill()
    psutil.wait_procs(everyone)
    if Path("two/model.safetensors").exists():
        pytest.fail("the run ended before it could be killed")
    reached = max(int(x.parent.name.rpartition("-")[2]) for x in state.glob("*/whole.json"))
    with pytest.raises(Stopped), pytest.warns(UserWarning):
        quietly(replace(options, steps=40, out="two"), stop_after(3))
    assert (state / f"checkpoint-{reached + 3}" / "whole.json").exists()
    result = torchrun(*words)
    assert result.returncode == 0, result.stderr[-2000:]
    single, double = weights("run"), weights("two")
    for name in single:
        torch.testing.assert_close(single[name], double[name], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(options):
    """Peak of a fresh process that encodes and trains one step: 2 MB of text against 40 MB."""
    peaks = []
    for megabytes in (2, 40):
        shutil.rmtree("run", ignore_errors=True)
        with open("big.txt", "w") as file:
            for i in range(megabytes * 1000):
                file.write(f"{i} the quick brown fox jumps over the lazy dog " * 20 + "\n")
        code = (
            "import resource, sys\n"
            "from heedful.data import ByteTokenizer\n"
            "from heedful.training.sequences import encode\n"
            "from pathlib import Path\n"
            "made = encode(['big.txt'], (), ByteTokenizer(), Path('made'), length=64, "
            "most_tokens=10**9)\n"
            "print(made.train.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        )
        numbers = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        assert int(numbers[0]) > megabytes * 900_000
        peaks.append(int(numbers[1]) / 1024)
        shutil.rmtree("made")
    assert peaks[1] - peaks[0] < 8, peaks  # MiB; the larger text has 38 MB more
