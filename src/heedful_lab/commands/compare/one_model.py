"""Train one model on one task: transformers' Trainer underneath, resumable, measured."""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from heedful.hf.identity import model_identity
from heedful.testing import process_peak_mib
from heedful.training.checkpoints import Checkpoints
from heedful.training.losses import MemoryLoss
from heedful.training.run import RunCallback, RunTrainer, Schedule, check_device
from heedful.training.trainer import parameter_groups
from heedful_lab.commands.compare.options import Device, check_memory_loss
from heedful_lab.commands.compare.scoring import final_scores, score
from heedful_lab.commands.compare.scratch import (
    Attention,
    Hyperparameters,
    Size,
    described,
    from_scratch,
    from_trained,
)
from heedful_lab.tasks import Task

_JUDGED = "eval_score"  # in the log


class RunResult(NamedTuple):
    """A finished run: the trained model, what it scored, and what it cost."""

    model: PreTrainedModel
    metric: str
    final: dict[str, float]
    curve: list[tuple[int, float]]
    loss_curve: list[tuple[int, float]]
    parameters: int
    tokens_per_second: float
    seconds: float
    peak_memory_mib: float


class Diverged(ValueError):
    """Training met a number that is not finite, from which no run comes back.

    Arguments:
        step: the step at which it showed.
        run: what was measured until then, nan at the end of every split.
    """

    def __init__(self, step: int, run: RunResult) -> None:
        super().__init__(
            f"the model diverged: at step {step} the loss, a score or a parameter is not finite; "
            "a lower learning_rate or a longer warmup may hold it"
        )
        self.step, self.run = step, run


Progress = Callable[[int, float | None], None]
"""Called after each step with their number, and the score where the step has an evaluation."""


def train(
    task: Task,
    mechanism: Attention,
    size: Size,
    hyperparameters: Hyperparameters,
    seed: int,
    folder: Path,
    *,
    start: Path | None = None,
    memory_loss: float = 0.0,
    device: Device = "auto",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    save_seconds: float = 60.0,
) -> RunResult:
    """Train a model from scratch; a run that ended early in `folder` goes on where it was saved.

    On the same device and with the same versions, a run that goes on ends with the parameters,
    scores and losses of one that was never interrupted, to the last bit.

    Arguments:
        task: what to learn and how to score it.
        mechanism: the attention of every layer, or of several by index.
        size, hyperparameters: model and training.
        seed: of the initialisation and the training sequences; the evaluation set is the same for
            all.
        folder: for this run's state while training; removed after the run.
        start: a trained model's folder, whose weights are begun with, in place of a new model of
            this size.
        memory_loss: factor of `heedful.MemoryLoss` (tau 1) in what is trained; 0 is none. Losses
            are reported without it. That of learned groups (`heedful.GroupingLoss`) is always
            added.
        device: `"auto"` (the accelerator where there is one), `"cpu"` or `"cuda"`.
        progress: called after each step.
        should_stop: called after each step; once true, the state is saved and `Stopped` raised.
        save_seconds: the state is saved this often, so that a killed run loses no more.

    Raises:
        heedful.training.run.Stopped: `should_stop` returned true.
        Diverged: the model diverged; it is a `ValueError` and carries what was measured.
        ValueError: the folder holds something else than this run's state, or an argument does not
            fit.
    """
    check_device(device)
    check_memory_loss(memory_loss)
    rows = _Rows(task, hyperparameters, seed)
    if start is None:
        model = from_scratch(task, mechanism, size, seed)
    else:
        model = from_trained(start, mechanism, seed)
    if memory_loss:
        MemoryLoss(model).remove()  # refused before anything is written
    identity = _run_identity(task, mechanism, size, hyperparameters, seed, rows)
    identity |= {"memory_loss": memory_loss} if memory_loss else {}
    identity |= {} if start is None else {"start": model_identity(model)}
    checkpoints = Checkpoints(Path(folder), identity)
    schedule = _schedule(task, hyperparameters, save_seconds)
    callback = RunCallback(schedule, checkpoints, should_stop)
    callbacks = [] if progress is None else [_ProgressCallback(progress, schedule)]
    trainer = RunTrainer(
        model=model,
        args=_arguments(hyperparameters, seed, folder, device),
        train_dataset=rows,
        data_collator=lambda batch: batch,
        optimizer=partial(_optimizer, hyperparameters),
        evaluation=partial(_evaluation, task, hyperparameters),
        callbacks=[*callbacks, callback],
        memory_loss=memory_loss,
    )
    _reset_peak(model.device)
    callback.train(trainer)
    step = trainer.state.global_step
    metric, final = final_scores(model, task, hyperparameters)
    numbers = [*final.values(), *(p.detach().sum().item() for p in model.parameters())]
    diverged = callback.diverged or not all(map(math.isfinite, numbers))
    run = RunResult(
        model=model,
        metric=metric,
        final=dict.fromkeys(final, math.nan) if diverged else final,
        curve=callback.entries(_JUDGED),
        loss_curve=callback.entries("loss"),
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_second=callback.tokens_per_second(),
        seconds=callback.seconds(),
        peak_memory_mib=_peak_mib(model.device),
    )
    checkpoints.remove()
    if diverged:
        raise Diverged(step, run)
    return run


def _run_identity(
    task: Task,
    mechanism: Attention,
    size: Size,
    hyperparameters: Hyperparameters,
    seed: int,
    rows: "_Rows",
) -> dict:
    """Identity of a run, some of its sequences included."""
    digest = hashlib.sha256()
    for step in {0, hyperparameters.steps - 1}:
        for tensor in rows.of_step(step).values():
            digest.update(tensor.numpy().tobytes())
    return {
        "task": {"kind": type(task).__name__, **dataclasses.asdict(task)},
        "mechanism": described(mechanism),
        "size": dataclasses.asdict(size),
        "budget": dataclasses.asdict(hyperparameters),
        "seed": seed,
        "rows": digest.hexdigest(),
    }


class _Rows(torch.utils.data.Dataset):
    """The training sequences of a run, drawn a batch at a time."""

    def __init__(self, task: Task, hyperparameters: Hyperparameters, seed: int) -> None:
        self.task, self.hyperparameters, self.seed = task, hyperparameters, seed

    def __len__(self) -> int:
        return self.hyperparameters.steps * self.hyperparameters.batch

    def __getitems__(self, indices: list[int]) -> dict:
        """The sequences of one step: `RunTrainer` takes them in order, a batch at a time."""
        step, first = divmod(indices[0], self.hyperparameters.batch)
        if first or len(indices) != self.hyperparameters.batch:
            raise IndexError(f"rows {indices[0]} to {indices[-1]} are not those of one step")
        return self.of_step(step)

    def of_step(self, step: int) -> dict:
        return self.task.batch(self.hyperparameters.batch, self.seed, step).inputs()


class _ProgressCallback(TrainerCallback):
    """Calls a `Progress` once per step; after its evaluation, where it has one."""

    def __init__(self, progress: Progress, schedule: Schedule) -> None:
        self.progress, self.schedule = progress, schedule

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if not self.schedule.evaluates(state.global_step):
            self.progress(state.global_step, None)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs) -> None:
        self.progress(state.global_step, metrics[_JUDGED])


def _schedule(task: Task, hyperparameters: Hyperparameters, save_seconds: float) -> Schedule:
    return Schedule(
        steps=hyperparameters.steps,
        log_every=max(1, hyperparameters.steps // 50),
        evaluate_every=max(1, hyperparameters.steps // hyperparameters.evaluations),
        check_every=1,
        save_seconds=save_seconds,
        step_tokens=hyperparameters.batch * task.row_tokens,
    )


def _evaluation(
    task: Task, hyperparameters: Hyperparameters, trainer: RunTrainer
) -> dict[str, float]:
    """The task's metric on its first evaluation set."""
    judged = next(iter(task.evaluations().values()))
    return {_JUDGED: score(trainer.model, judged, hyperparameters)[task.metric]}


def _optimizer(hyperparameters: Hyperparameters, model: nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(
        model, hyperparameters.learning_rate, mechanism_rate=hyperparameters.mechanism_rate
    )
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def _arguments(
    hyperparameters: Hyperparameters, seed: int, folder: Path, device: str
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=hyperparameters.steps,
        per_device_train_batch_size=hyperparameters.batch,
        learning_rate=hyperparameters.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(hyperparameters.warmup, hyperparameters.steps // 2),
        max_grad_norm=1.0,
        seed=seed,
        data_seed=seed,
        logging_strategy="no",
        save_strategy="no",  # `RunCallback` says when
        save_total_limit=2,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu" or (device == "auto" and not torch.cuda.is_available()),
        dataloader_pin_memory=False,
    )


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:  # Linux resets a process's peak on this request; elsewhere `_peak_mib` returns nan
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_mib(device: torch.device) -> float:
    """Highest memory since the reset in MiB: allocations on a GPU, the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return process_peak_mib() if Path("/proc/self/clear_refs").exists() else math.nan
