"""Training: deterministic, resumable, and able to learn."""

import math

import pytest
import torch

from heedful.nn import Selective, Standard
from heedful.tasks import Copy, Parity, Text
from heedful.train import Budget, Size, Stopped, from_scratch, score, train

TASK = Parity(bits=6)
SIZE = Size(32, 2, 2)
BUDGET = Budget(steps=12, batch=8, evaluations=3, held_out=16, warmup=2)


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path):
    runs = [
        train(TASK, Standard(), SIZE, BUDGET, seed, tmp_path / str(n), device="cpu")
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


def test_a_stopped_run_goes_on_to_the_same_end(tmp_path):
    whole = train(TASK, Selective(), SIZE, BUDGET, 0, tmp_path / "whole", device="cpu")
    steps = []

    def five_steps_and_stop() -> bool:
        return len(steps) >= 5

    with pytest.raises(Stopped):
        train(
            TASK, Selective(), SIZE, BUDGET, 0, tmp_path / "parts", device="cpu",
            progress=lambda step, value: steps.append(step), should_stop=five_steps_and_stop,
        )  # fmt: skip
    assert steps == [1, 2, 3, 4, 5]
    steps = []
    resumed = train(
        TASK, Selective(), SIZE, BUDGET, 0, tmp_path / "parts", device="cpu",
        progress=lambda step, value: steps.append(step),
    )  # fmt: skip
    assert steps == [6, 7, 8, 9, 10, 11, 12]
    assert resumed.curve == whole.curve
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert not (tmp_path / "parts").exists()


def test_training_learns(tmp_path):
    task = Copy(symbols=2, alphabet=4)
    budget = Budget(steps=150, batch=32, learning_rate=1e-2, warmup=10, held_out=64)
    run = train(task, Standard(), SIZE, budget, 0, tmp_path / "run", device="cpu")
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
    perplexity = score(model, task.evaluations()["held-out"], BUDGET)["perplexity"]
    assert math.isclose(perplexity, task.vocab_size, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Size(hidden=33, heads=2), "hidden must be an even multiple of heads"),
        (lambda: Size(layers=0), "layers must be at least 1, got 0"),
        (lambda: Budget(steps=0), "steps must be at least 1, got 0"),
        (lambda: Budget(learning_rate=-1.0), "learning_rate must be positive"),
    ],
)
def test_wrong_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
