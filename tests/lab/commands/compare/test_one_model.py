"""Training: deterministic, resumable, and able to learn."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from heedful import MemoryLoss
from heedful.nn import Selective, Standard
from heedful.testing import process_peak_mib
from heedful.training.run import Stopped
from heedful.training.trainer import parameter_groups
from heedful_lab.commands.compare.one_model import Diverged, train
from heedful_lab.commands.compare.scoring import score
from heedful_lab.commands.compare.scratch import Hyperparameters, Size, from_scratch
from heedful_lab.tasks import Copy, Parity, Text
from helpers import ROOT

TASK = Parity(bits=6)
SIZE = Size(32, 2, 2)
HYPERPARAMETERS = Hyperparameters(steps=12, batch=8, evaluations=3, held_out=16, warmup=2)


def trained(folder, *, seed: int = 0, hyperparameters=HYPERPARAMETERS, mechanism=None, **options):
    """A run of the task; selective unless another mechanism is named."""
    mechanism = Selective() if mechanism is None else mechanism
    return train(TASK, mechanism, SIZE, hyperparameters, seed, folder, device="cpu", **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a break."""
    return trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def with_loss(tmp_path_factory):
    """The same with the memory loss."""
    return trained(tmp_path_factory.mktemp("loss") / "run", memory_loss=0.1)


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path):
    runs = [
        trained(tmp_path / str(n), seed=seed, mechanism=Standard())
        for n, seed in enumerate((0, 0, 1))
    ]
    assert runs[0].loss_curve == runs[1].loss_curve
    assert runs[0].final == runs[1].final
    assert runs[0].loss_curve != runs[2].loss_curve
    assert [step for step, _ in runs[0].curve] == [4, 8, 12]


def test_all_mechanisms_start_from_the_same_weights():
    standard = from_scratch(TASK, Standard(), SIZE, 3).state_dict()
    selective = from_scratch(TASK, Selective(), SIZE, 3).state_dict()
    assert all(torch.equal(standard[name], selective[name]) for name in standard)


def test_a_stopped_run_goes_on_to_the_same_end(whole, tmp_path):
    steps = []

    def five_steps_and_stop() -> bool:
        return len(steps) >= 5

    with pytest.raises(Stopped):
        trained(
            tmp_path / "parts", progress=lambda step, _: steps.append(step),
            should_stop=five_steps_and_stop,
        )  # fmt: skip
    assert steps == [1, 2, 3, 4, 5]
    steps = []
    resumed = trained(tmp_path / "parts", progress=lambda step, _: steps.append(step))
    assert steps == [6, 7, 8, 9, 10, 11, 12]
    assert_same(resumed, whole)
    assert not (tmp_path / "parts").exists()


def assert_same(run, other) -> None:
    assert run.final == other.final and run.curve == other.curve
    assert run.loss_curve == other.loss_curve
    for name, value in other.model.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[name]), name


class Killed(Exception):
    """Stands for a death: nothing is saved when it comes."""


def killed_at(step: int, folder, hyperparameters: Hyperparameters, save_seconds: float) -> None:
    def die(now: int, value: float | None) -> None:
        if now == step:
            raise Killed

    with pytest.raises(Killed):
        trained(folder, hyperparameters=hyperparameters, progress=die, save_seconds=save_seconds)


def test_a_killed_run_goes_on_from_the_last_save(tmp_path):
    """Also between two means of the loss: 100 steps have one of every second."""
    hyperparameters = replace(HYPERPARAMETERS, steps=100)
    whole = trained(tmp_path / "whole", hyperparameters=hyperparameters)
    assert [step for step, _ in whole.loss_curve] == list(range(2, 101, 2))
    parts = tmp_path / "parts"
    killed_at(4, parts, hyperparameters, save_seconds=math.inf)
    assert not list(parts.glob("checkpoint-*"))
    killed_at(6, parts, hyperparameters, save_seconds=0)
    assert sorted(path.name for path in parts.glob("checkpoint-*")) == [
        "checkpoint-4", "checkpoint-5",
    ]  # fmt: skip
    steps = []
    resumed = trained(
        parts, hyperparameters=hyperparameters, progress=lambda step, _: steps.append(step)
    )
    assert steps[0] == 6
    assert_same(resumed, whole)
    assert resumed.tokens_per_second > 0 and resumed.seconds > 0


def test_the_memory_loss_trains_another_model_that_needs_less(whole, with_loss, tmp_path):
    plain, with_it = whole, with_loss
    assert plain.loss_curve[0] == with_it.loss_curve[0], "losses are told without the term"
    assert plain.loss_curve[-1] != with_it.loss_curve[-1]
    rows, needs = TASK.held_out(64).input_ids, []
    strong = trained(tmp_path / "run", memory_loss=3.0)
    for run in (plain, with_it, strong):
        with torch.no_grad(), MemoryLoss(run.model) as memory:  # the run has taken its own away
            run.model(input_ids=rows)
            needs.append(memory().item())
    assert needs[0] > needs[1] > needs[2]


def test_the_first_step_has_the_papers_factor(tmp_path, monkeypatch):
    """The gradient of the first step is that of loss + 0.1 memory, by a plain loop."""
    model, grads = from_scratch(TASK, Selective(), SIZE, 0), []
    rows = TASK.batch(HYPERPARAMETERS.batch, 0, 0)
    with MemoryLoss(model) as memory:
        loss = model(input_ids=rows.input_ids, labels=rows.labels).loss
        (loss + 0.1 * memory()).backward()
    expected = [p.grad for group in parameter_groups(model, 1.0) for p in group["params"]]

    def first(optimizer, *_, **__):
        grads.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])
        raise Killed

    monkeypatch.setattr(torch.optim.AdamW, "step", first)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_, **__: torch.tensor(1.0))
    with pytest.raises(Killed):
        trained(tmp_path, memory_loss=0.1)
    for actual, target in zip(grads[0], expected, strict=True):
        torch.testing.assert_close(actual, target, rtol=1e-5, atol=1e-7)


def test_another_run_s_state_is_refused_by_what_differs(tmp_path):
    killed_at(3, tmp_path, HYPERPARAMETERS, save_seconds=0)
    with pytest.raises(ValueError, match=r"holds the state of another run: seed was 0 and is 1"):
        trained(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"budget\.steps was 12 and is 13 now"):
        trained(tmp_path, hyperparameters=replace(HYPERPARAMETERS, steps=13))
    assert (tmp_path / "checkpoint-2").is_dir()


def test_a_changed_text_is_another_run(tmp_path):
    text = tmp_path / "text.txt"
    task = Text(paths=(str(text),), length=16)

    def begin() -> None:
        train(replace(task), Standard(), SIZE, HYPERPARAMETERS, 0, tmp_path / "run", device="cpu",
              should_stop=lambda: True)  # fmt: skip

    text.write_text("heed the needful, and need the heedful. " * 20)
    with pytest.raises(Stopped):
        begin()
    text.write_text("heed the heedful, and need the needful. " * 20)
    with pytest.raises(ValueError, match="another run: rows was"):
        begin()


def test_a_diverged_model_is_reported(tmp_path):
    hyperparameters = replace(HYPERPARAMETERS, learning_rate=1e30)
    with pytest.raises(Diverged, match=r"diverged: at step \d+ the loss") as raised:
        trained(tmp_path / "run", mechanism=Standard(), hyperparameters=hyperparameters)
    assert isinstance(raised.value, ValueError) and raised.value.step < hyperparameters.steps
    run = raised.value.run
    assert all(map(math.isnan, run.final.values())) and run.tokens_per_second > 0
    assert not (tmp_path / "run").exists()


def test_without_the_system_s_count_the_peak_of_memory_is_nan(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert math.isnan(process_peak_mib())
    files = (ROOT / "src").rglob("*.py")
    assert not [path for path in files if "\nimport resource" in path.read_text()]


def test_training_learns(tmp_path):
    task = Copy(symbols=2, alphabet=4)
    hyperparameters = Hyperparameters(
        steps=150, batch=32, learning_rate=1e-2, warmup=10, held_out=64
    )
    run = train(task, Standard(), SIZE, hyperparameters, 0, tmp_path / "run", device="cpu")
    assert run.final["in-distribution"] < 0.05
    assert run.tokens_per_second > 0 and run.peak_memory_mib > 100


def test_an_untrained_model_scores_as_chance(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("heed the needful, and need the heedful. " * 200)
    task = Text(paths=(str(path),), length=32)
    model = from_scratch(task, Standard(), SIZE, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    perplexity = score(model, task.evaluations()["held-out"], HYPERPARAMETERS)["perplexity"]
    assert math.isclose(perplexity, task.vocab_size, rel_tol=1e-5)
