"""Train one model on one task: transformers' Trainer underneath, resumable, measured.

A model from scratch is a Llama configuration plus `convert`; there is no own language model here.
"""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from heedful.hf import conversion_of, convert
from heedful.nn import Mechanism
from heedful.tasks import Samples, Task, Text, token_losses
from heedful.testing import process_peak_mib


@dataclass(frozen=True)
class Size:
    """Width, depth and heads of a model from scratch."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden must be an even multiple of heads (rotary embedding), got hidden="
                f"{self.hidden} with heads={self.heads}"
            )


@dataclass(frozen=True)
class Budget:
    """What a run may spend, and how it learns.

    Arguments:
        steps, batch: optimiser steps and rows in each.
        learning_rate: peak of a cosine with linear warm-up over `warmup` steps.
        mechanism_rate: factor on the learning rate of the mechanism's own parameters. A kernel
            starts as the identity, with zeros that must reach the size of one; at the rate of the
            model's weights that alone takes Adam hundreds of steps.
        evaluations: how often the held-out rows are scored in the course of a run.
        held_out: how many rows are held out.
    """

    steps: int = 400
    batch: int = 32
    learning_rate: float = 3e-3
    warmup: int = 50
    mechanism_rate: float = 1.0
    evaluations: int = 8
    held_out: int = 256

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluations", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")


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


Progress = Callable[[int, float | None], None]
"""Told after each step: how many are done, and the newest held-out value if there is one."""


def from_scratch(task: Task, mechanism: Mechanism, size: Size, seed: int) -> PreTrainedModel:
    """A small Llama for the task, converted; the same seed gives all mechanisms the same start."""
    torch.manual_seed(seed)
    longest = max(other.length for other in (task, *task.evaluations().values()))
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=task.vocab_size,
            hidden_size=size.hidden,
            intermediate_size=8 * size.hidden // 3 // 16 * 16 or 16,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=longest,
            # At these widths the usual 0.02 would start the residual stream near zero.
            initializer_range=size.hidden**-0.5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return convert(model, mechanism).model


def train(
    task: Task,
    mechanism: Mechanism,
    size: Size,
    budget: Budget,
    seed: int,
    folder: Path,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train a model from scratch; a run that was stopped in `folder` goes on where it was.

    Arguments:
        task: what to learn and how to score it.
        mechanism: the attention of every layer.
        size, budget: model and training.
        seed: of the initialisation and the training rows; held-out rows are the same for all.
        folder: for checkpoints while training; empty again after the run.
        device: `"auto"` (the accelerator where there is one), `"cpu"` or `"cuda"`.
        progress: told after each step.
        should_stop: asked after each step; once true, the state is saved and `Stopped` raised.

    Raises:
        Stopped: `should_stop` said so.
        ValueError: the model diverged, or the folder holds the state of another run.
    """
    model = from_scratch(task, mechanism, size, seed)
    watch = _Watch(task, budget, progress, should_stop)
    trainer = Trainer(
        model=model,
        args=_arguments(budget, seed, folder, device),
        train_dataset=_Rows(task.sample(budget.steps * budget.batch, seed + 1)),
        data_collator=lambda batch: batch,
        optimizers=(_optimizer(model, budget), None),
        callbacks=[watch],
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    _reset_peak(model.device)
    started = time.perf_counter()
    checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step < budget.steps:
        raise Stopped
    seconds = time.perf_counter() - started
    shutil.rmtree(folder, ignore_errors=True)
    history = trainer.state.log_history
    metric, final = final_scores(model, task, budget)
    return Run(
        model=model,
        metric=metric,
        final=final,
        curve=[(row["step"], row["held_out"]) for row in history if "held_out" in row],
        loss_curve=[(row["step"], row["loss"]) for row in history if "loss" in row],
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_second=watch.steps * budget.batch * task.length / watch.seconds,
        seconds=seconds,
        peak_memory_mib=_peak(model.device),
    )


def final_scores(model: PreTrainedModel, task: Task, budget: Budget) -> tuple[str, dict]:
    """The task's metric, and its value on every evaluation split, judged split first."""
    splits = {name: score(model, other, budget) for name, other in task.evaluations().items()}
    metric = "error" if task.scored_by == "predictions" else "perplexity"
    final = {name: scores[metric] for name, scores in splits.items()}
    for other in ("bits_per_byte",):
        if other in next(iter(splits.values())):
            final[other] = next(iter(splits.values()))[other]
    return metric, final


@torch.no_grad()
def score(model: PreTrainedModel, task: Task, budget: Budget) -> dict[str, float]:
    """The task's scores of a model on held-out rows, the same rows at every call."""
    held_out = task.held_out if isinstance(task, Text) else lambda count: task.sample(count, 0)
    rows = held_out(budget.held_out)
    training = model.training
    model.eval()
    values = []
    for ids, labels in zip(
        rows.input_ids.split(budget.batch), rows.labels.split(budget.batch), strict=True
    ):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
        predicted = task.scored_by == "predictions"
        values.append(logits.argmax(-1) if predicted else token_losses(logits, labels))
    model.train(training)
    return task.score(torch.cat(values), rows.labels)


class _Rows(torch.utils.data.Dataset):
    """Rows of a task, drawn beforehand and handed out a batch at a time."""

    def __init__(self, samples: Samples) -> None:
        self.ids, self.labels = samples.input_ids, samples.labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict:
        return {"input_ids": self.ids[indices], "labels": self.labels[indices]}


class _Watch(TrainerCallback):
    """Scores held-out rows, keeps time of the training steps alone, and stops when asked."""

    def __init__(self, task, budget, progress, should_stop) -> None:
        self.task, self.budget = task, budget
        self.progress, self.should_stop = progress, should_stop
        self.every = max(1, budget.steps // budget.evaluations)
        self.seconds, self.steps, self._since = 0.0, 0, 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        self.seconds += time.perf_counter() - self._since
        self.steps += 1
        value = None
        if state.global_step % self.every == 0 or state.global_step == self.budget.steps:
            scores = score(model, self.task.evaluations()[_judged(self.task)], self.budget)
            value = scores["error" if "error" in scores else "perplexity"]
            # Beside the losses, so that it is in the checkpoint; Trainer.log would drop the loss.
            state.log_history.append({"held_out": value, "step": state.global_step})
        if self.progress is not None:
            self.progress(state.global_step, value)
        if self.should_stop() and state.global_step < self.budget.steps:
            control.should_save = control.should_training_stop = True


def _judged(task: Task) -> str:
    return next(iter(task.evaluations()))


def _optimizer(model: PreTrainedModel, budget: Budget) -> torch.optim.Optimizer:
    own = {id(p) for p in conversion_of(model).parameters().values()}
    rate = budget.learning_rate
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in own], "lr": rate},
        {"params": [p for p in model.parameters() if id(p) in own]}
        | {"lr": rate * budget.mechanism_rate},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.98), weight_decay=0.0
    )


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
        logging_steps=max(1, budget.steps // 50),
        save_strategy="steps",
        save_steps=max(1, budget.steps // 2),
        save_total_limit=1,
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
    try:  # Linux resets a process's peak on this request; elsewhere `_peak` says nothing
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak(device: torch.device) -> float:
    """Highest memory since the reset in MiB: allocations on a GPU, the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return process_peak_mib() if Path("/proc/self/clear_refs").exists() else math.nan
