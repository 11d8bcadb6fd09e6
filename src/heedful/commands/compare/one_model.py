"""Train one model on one task: transformers' Trainer underneath, resumable, measured."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from heedful.checks import check_choice
from heedful.commands.compare.options import Device, check_memory_loss
from heedful.commands.compare.scoring import final_scores, score
from heedful.commands.compare.scratch import (
    Attention,
    Budget,
    Size,
    described,
    from_scratch,
    from_trained,
)
from heedful.commands.train.checkpoints import Checkpoints
from heedful.hf.budgets import fingerprint
from heedful.tasks import Task
from heedful.testing import process_peak_mib
from heedful.training.losses import MemoryLoss
from heedful.training.trainer import InOrder, parameter_groups


class Run(NamedTuple):
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


class Stopped(Exception):
    """Training was asked to stop; what is needed to go on lies in the run's folder."""


class Diverged(ValueError):
    """Training met a number that is not finite, from which no run comes back.

    Arguments:
        step: the step at which it showed.
        run: what was measured until then, nan at the end of every split.
    """

    def __init__(self, step: int, run: Run) -> None:
        super().__init__(
            f"the model diverged: at step {step} the loss, a score or a parameter is not finite; "
            "a lower learning_rate or a longer warmup may hold it"
        )
        self.step, self.run = step, run


Progress = Callable[[int, float | None], None]
"""Told after each step: how many are done, and the newest held-out value if there is one."""


def train(
    task: Task,
    mechanism: Attention,
    size: Size,
    budget: Budget,
    seed: int,
    folder: Path,
    *,
    start: Path | None = None,
    memory_loss: float = 0.0,
    device: Device = "auto",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    save_seconds: float = 60.0,
) -> Run:
    """Train a model from scratch; a run that ended early in `folder` goes on where it was saved.

    On the same device and with the same versions, a run that goes on ends with the parameters,
    scores and losses of one that was never interrupted, to the last bit.

    Arguments:
        task: what to learn and how to score it.
        mechanism: the attention of every layer, or of several by index.
        size, budget: model and training.
        seed: of the initialisation and the training rows; held-out rows are the same for all.
        folder: for this run's state while training; gone again after the run.
        start: a trained model's folder, whose weights are begun with, in place of a new model of
            this size.
        memory_loss: factor of `heedful.MemoryLoss` (tau 1) in what is trained; 0 is none. Losses
            are told without it. That of learned groups (`heedful.GroupingLoss`) is always added.
        device: `"auto"` (the accelerator where there is one), `"cpu"` or `"cuda"`.
        progress: told after each step.
        should_stop: asked after each step; once true, the state is saved and `Stopped` raised.
        save_seconds: the state is saved this often, so that a killed run loses no more.

    Raises:
        Stopped: `should_stop` said so.
        Diverged: the model diverged; it is a `ValueError` and carries what was measured.
        ValueError: the folder holds something else than this run's state, or an argument does not
            fit.
    """
    check_device(device)
    check_memory_loss(memory_loss)
    rows = _Rows(task, budget, seed)
    if start is None:
        model = from_scratch(task, mechanism, size, seed)
    else:
        model = from_trained(start, mechanism, seed)
    if memory_loss:
        MemoryLoss(model).remove()  # refused before anything is written
    identity = _run_identity(task, mechanism, size, budget, seed, rows)
    identity |= {"memory_loss": memory_loss} if memory_loss else {}
    identity |= {} if start is None else {"start": fingerprint(model)}
    checkpoints = Checkpoints(Path(folder), identity)
    checkpoint = checkpoints.newest()
    watch = _Watch(task, budget, checkpoints, progress, should_stop, save_seconds)
    trainer = InOrder(
        model=model,
        args=_arguments(budget, seed, folder, device),
        train_dataset=rows,
        data_collator=lambda batch: batch,
        optimizers=(_optimizer(model, budget), None),
        callbacks=[watch],
        memory_loss=memory_loss,
    )
    watch.parts = trainer.parts
    _reset_peak(model.device)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    step = trainer.state.global_step
    if step < budget.steps and not watch.diverged:
        raise Stopped
    metric, final = final_scores(model, task, budget)
    numbers = [*final.values(), *(p.detach().sum().item() for p in model.parameters())]
    diverged = watch.diverged or not all(map(math.isfinite, numbers))
    run = Run(
        model=model,
        metric=metric,
        final=dict.fromkeys(final, math.nan) if diverged else final,
        curve=[(row["step"], row["held_out"]) for row in watch.history if "held_out" in row],
        loss_curve=[(row["step"], row["mean"]) for row in watch.history if "mean" in row],
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_second=step * budget.batch * task.row_tokens / watch.step_seconds,
        seconds=watch.seconds(),
        peak_memory_mib=_peak_mib(model.device),
    )
    checkpoints.remove()
    if diverged:
        raise Diverged(step, run)
    return run


def check_device(device: str) -> None:
    """Raise unless training can run there."""
    check_choice("device", device, get_args(Device))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device; use auto or cpu")


def _run_identity(
    task: Task, mechanism: Attention, size: Size, budget: Budget, seed: int, rows: "_Rows"
) -> dict:
    """What makes a run this run and no other; rows of it too, which a changed text changes."""
    digest = hashlib.sha256()
    for step in {0, budget.steps - 1}:
        for tensor in rows.of_step(step).values():
            digest.update(tensor.numpy().tobytes())
    return {
        "task": {"kind": type(task).__name__, **dataclasses.asdict(task)},
        "mechanism": described(mechanism),
        "size": dataclasses.asdict(size),
        "budget": dataclasses.asdict(budget),
        "seed": seed,
        "rows": digest.hexdigest(),
    }


class _Rows(torch.utils.data.Dataset):
    """The training rows of a run, drawn a batch at a time when they are asked for."""

    def __init__(self, task: Task, budget: Budget, seed: int) -> None:
        self.task, self.budget, self.seed = task, budget, seed

    def __len__(self) -> int:
        return self.budget.steps * self.budget.batch

    def __getitems__(self, indices: list[int]) -> dict:
        """The rows of one step: `InOrder` asks in order, a batch at a time."""
        step, first = divmod(indices[0], self.budget.batch)
        if first or len(indices) != self.budget.batch:
            raise IndexError(f"rows {indices[0]} to {indices[-1]} are not those of one step")
        return self.of_step(step)

    def of_step(self, step: int) -> dict:
        return self.task.batch(self.budget.batch, self.seed, step).inputs()


class _Watch(TrainerCallback):
    """Scores held-out rows, keeps losses and time, saves now and then, and stops when asked."""

    def __init__(
        self,
        task: Task,
        budget: Budget,
        checkpoints: Checkpoints,
        progress: Progress | None,
        should_stop: Callable[[], bool],
        save_seconds: float,
    ) -> None:
        self.task, self.budget, self.checkpoints = task, budget, checkpoints
        self.progress, self.should_stop, self.save_seconds = progress, should_stop, save_seconds
        self.every = max(1, budget.steps // budget.evaluations)
        self.mean_of = max(1, budget.steps // 50)
        self.history: list[dict] = []
        self.losses: list[float] = []
        self.parts: list[Tensor] = []
        self.diverged = False
        self.step_seconds = self._earlier = 0.0
        self._began = self._saved = self._since = time.perf_counter()

    def seconds(self) -> float:
        """Since the run began, without what lay between an interruption and going on."""
        return self._earlier + time.perf_counter() - self._began

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        # Trainer saves and restores its own history, so ours travels in it.
        self.history = [row for row in state.log_history if "mean" in row or "held_out" in row]
        saved = [row for row in state.log_history if "losses" in row]
        if saved:
            self.losses = saved[-1]["losses"]
            self.step_seconds, self._earlier = saved[-1]["step_seconds"], saved[-1]["seconds"]

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        now = time.perf_counter()
        self.step_seconds += now - self._since
        step, last = state.global_step, state.global_step == self.budget.steps
        self.losses.append(sum(part.item() for part in self.parts))
        self.parts.clear()
        self.diverged = not math.isfinite(self.losses[-1])
        if step % self.mean_of == 0:
            self.history.append({"step": step, "mean": sum(self.losses) / len(self.losses)})
            self.losses = []
        value = None
        if step % self.every == 0 or last:
            scores = score(model, self.task.evaluations()[_judged(self.task)], self.budget)
            value = scores[self.task.metric]
            self.history.append({"step": step, "held_out": value})
        if self.progress is not None:
            self.progress(step, value)
        if self.diverged:
            control.should_training_stop = True
        elif self.should_stop() and not last:
            control.should_save = control.should_training_stop = True
        elif now - self._saved >= self.save_seconds and not last:
            control.should_save = True
        if control.should_save:
            self._saved = now
            times = {"step_seconds": self.step_seconds, "seconds": self.seconds()}
            state.log_history = [*self.history, {"step": step, "losses": self.losses} | times]

    def on_save(self, args, state, control, **kwargs) -> None:
        self.checkpoints.seal(state.global_step)


def _judged(task: Task) -> str:
    return next(iter(task.evaluations()))


def _optimizer(model: PreTrainedModel, budget: Budget) -> torch.optim.Optimizer:
    groups = parameter_groups(model, budget.learning_rate, mechanism_rate=budget.mechanism_rate)
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def _arguments(budget: Budget, seed: int, folder: Path, device: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=budget.steps,
        per_device_train_batch_size=budget.batch,
        learning_rate=budget.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(budget.warmup, budget.steps // 2),
        max_grad_norm=1.0,
        seed=seed,
        data_seed=seed,
        logging_strategy="no",
        save_strategy="no",  # `_Watch` says when
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
    try:  # Linux resets a process's peak on this request; elsewhere `_peak_mib` says nothing
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_mib(device: torch.device) -> float:
    """Highest memory since the reset in MiB: allocations on a GPU, the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return process_peak_mib() if Path("/proc/self/clear_refs").exists() else math.nan
