"""`heedful train`: a language model on text, on one device or several, killed and resumed at will.

The output folder holds the model or the adapter, `training.json` (options and results) and
`log.jsonl`; while the run lasts, `unfinished/` in it holds the encoded text, the vocabulary and
checkpoints.
"""

import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from heedful.checks import UserError
from heedful.files import only_writer, write_lines, write_whole, writing_to
from heedful.hf import conversion_of, revert
from heedful.hf.adapter_folders import save_adapter
from heedful.hf.adapters import converted_inside
from heedful.hf.budgets import NAME, write_budgets
from heedful.nn import Standard, to_json
from heedful.training.checkpoints import Checkpoints, differences
from heedful.training.eviction_order import EvictionOrderLoss, check_length
from heedful.training.losses import MemoryLoss
from heedful.training.run import RunCallback, RunTrainer, Schedule
from heedful.training.sequences import IGNORE, EvaluationSequences, MixedSequences
from heedful.training.trainer import parameter_groups
from heedful.training.under_eviction import EvictionInTraining
from heedful_lab.commands.train.inputs import RunInputs
from heedful_lab.commands.train.machine import Machine
from heedful_lab.commands.train.mixture import Mixture, TextPlan, read_mixture
from heedful_lab.commands.train.options import Origin, Training, TrainingRecipe
from heedful_lab.commands.train.start import Start, starting_point
from heedful_lab.records.environment import environment
from heedful_lab.records.folder import UNFINISHED, resumed
from heedful_lab.rivals.models import load
from heedful_lab.rivals.retention import RetentionGateAttention

_ABOUT, _LOG = "training.json", "log.jsonl"


class TrainingResult(NamedTuple):
    """Result of a training run; `parameters` are those that were trained."""

    folder: Path
    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss: float
    bits_per_byte: float


def train_text(
    options: Training, should_stop: Callable[[], bool] = lambda: False, *, show: bool = True
) -> TrainingResult | None:
    """Train by the options; a run that ended early in `options.out` goes on where it was saved.

    On one device and with the same versions a run that goes on ends with the weights and losses of
    one that was never stopped, to the last bit.

    Arguments:
        options: what to train on what, and how.
        should_stop: called after each step; once true, the state is saved and `Stopped` raised.
        show: bars on the terminal.

    Returns:
        what it came to; None on all processes but the first.

    Raises:
        Stopped: `should_stop` returned true.
        ValueError: an argument does not fit the model, the text or the folder, or the loss stopped
            being finite.
    """
    origin, recipe = options.origin(), options.filled()
    plan = TrainingPlan(
        out=Path(options.out),
        origin=origin,
        recipe=recipe,
        data=TextPlan(
            parts=options.parts(),
            held_out=options.held_out,
            length=recipe.length,
            tokens=options.read_tokens or recipe.steps * recipe.batch * (recipe.length - 1),
            seed=options.seed,
        ),
        inputs=RunInputs(
            options.model,
            options.texts(),
            options.held_out,
            options.tokenizer,
            Path(options.model) / NAME if origin.under_budgets else None,
        ),
        machine=Machine(
            options.device,
            options.dtype,
            options.accumulate,
            options.checkpointing,
            options.compile,
            options.fsdp,
            options.report_to,
        ),
        evaluations=options.evaluations,
        save_minutes=options.save_minutes,
        options=options.identity(),
        harmless=options.harmless(),
    )
    return _run(plan, should_stop, show=show)


@dataclass(frozen=True)
class TrainingPlan:
    """A run in plain values.

    out: its folder.
    origin: what it begins with.
    recipe: its steps, sequences and rates.
    data: the texts.
    inputs: all that it reads, for its identity.
    machine: where it is computed.
    evaluations: how often the evaluation set is scored.
    save_minutes: between checkpoints.
    options: those that make it this run, as JSON.
    harmless: the others.
    """

    out: Path
    origin: Origin
    recipe: TrainingRecipe
    data: TextPlan
    inputs: RunInputs
    machine: Machine
    evaluations: int
    save_minutes: float
    options: dict
    harmless: dict

    def identity(self) -> dict:
        """Options that make it this run, with digests of all that it reads, as JSON."""
        return {"options": self.options, "inputs": self.inputs.digests()}


class _RunParts(NamedTuple):
    start: Start
    text: Mixture
    checkpoints: Checkpoints


def _run(
    plan: TrainingPlan, should_stop: Callable[[], bool], *, show: bool
) -> TrainingResult | None:
    out, unfinished, recipe = plan.out, plan.out / UNFINISHED, plan.recipe
    arguments = plan.machine.arguments(recipe, unfinished / "state", plan.data.seed)
    main = arguments.process_index == 0
    with only_writer(out) if main else nullcontext():
        # The first process reads and writes, then the others find it done.
        with arguments.main_process_first(local=False, desc="reading the text"):
            if (about := resumed(out, _ABOUT, plan.identity)) is not None:
                for changed in differences(about["harmless"], plan.harmless):
                    warnings.warn(f"{changed}; the run stays what it was", stacklevel=3)
                if about["ended"]:
                    return TrainingResult(out, **about["ended"])
            run = _begin(plan, unfinished, arguments, show=show and main)
        schedule = Schedule(
            steps=recipe.steps,
            log_every=max(1, recipe.steps // 100),
            evaluate_every=-(-recipe.steps // plan.evaluations),
            check_every=max(1, recipe.steps // 100),
            save_seconds=60 * plan.save_minutes,
            step_tokens=recipe.batch * recipe.length,
        )
        result = _train(recipe, schedule, out, arguments, run, should_stop, show=show and main)
        arguments.distributed_state.wait_for_everyone()
    return result if main else None


def _begin(
    plan: TrainingPlan, folder: Path, arguments: TrainingArguments, *, show: bool
) -> _RunParts:
    """Model, vocabulary and sequences, and the folder's owner; nothing is left where they fail."""
    fresh = not folder.exists()
    if fresh and arguments.process_index:
        raise UserError(
            f"out={str(plan.out)!r} must be on a file system that all nodes share: the first "
            f"process has begun a run there, and process {arguments.process_index} finds none"
        )
    try:
        start = _start(plan.origin, plan.recipe, folder / "tokenizer", arguments.bf16)
        text = read_mixture(plan.data, start.tokenizer, folder / "text", show)
    except BaseException:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    identity, recipe = plan.identity(), plan.recipe._asdict()
    parameters = sum(p.numel() for p in start.model.parameters())
    own = identity | {"recipe": recipe, "parameters": parameters}
    checkpoints = Checkpoints(folder / "state", own)
    if arguments.process_index == 0:
        about = identity | {
            "harmless": plan.harmless,
            "recipe": recipe,
            "mechanisms": _mechanisms(start.model),
            "ended": None,
            "environment": environment(),
        }
        write_whole(plan.out / _ABOUT, json.dumps(about, indent=2) + "\n")
    return _RunParts(start, text, checkpoints)


def _start(origin: Origin, recipe: TrainingRecipe, tokenizer: Path, half: bool) -> Start:
    """The model and what belongs to it; a loss that it does not support is refused at once."""
    start = starting_point(origin, recipe, tokenizer, half)
    if recipe.memory_loss:
        MemoryLoss(start.model).remove()
    if recipe.soft_budgets is not None:
        check_length(recipe.length, recipe.soft_budgets[0])
        EvictionOrderLoss(start.model)
    elif start.eviction is None:
        _check_gates(start.model)
    if start.eviction is not None:
        EvictionInTraining(start.model, start.eviction)
    return start


def _check_gates(model: PreTrainedModel) -> None:
    """Raise for retention gates where nothing would train them."""
    layers = [x for x in model.modules() if isinstance(x, RetentionGateAttention)]
    if any(x.config.window is None for x in layers):
        raise UserError(
            "retention gates without a window change no prediction, so only attention maps train "
            "them: add --recipe hide, or give them a window (--mechanism retention-gate:window=32)"
        )


def _mechanisms(model: PreTrainedModel) -> list[dict]:
    conversion = conversion_of(converted_inside(model))
    return [
        {"mechanism": to_json(config), "layers": list(layers)}
        for config, layers in conversion.mechanisms.items()
    ]


def _train(
    recipe: TrainingRecipe,
    schedule: Schedule,
    out: Path,
    arguments: TrainingArguments,
    run: _RunParts,
    should_stop: Callable[[], bool],
    *,
    show: bool,
) -> TrainingResult:
    callback, display = (
        RunCallback(schedule, run.checkpoints, should_stop),
        _Display(recipe, out, show=show),
    )
    sequences = recipe.steps * recipe.batch
    together = arguments.world_size * arguments.per_device_eval_batch_size
    trainer = RunTrainer(
        model=run.start.model,
        args=arguments,
        train_dataset=MixedSequences(
            run.text.files, run.text.weights, recipe.length, sequences, arguments.seed
        ),
        eval_dataset=EvaluationSequences(run.text.held_out, recipe.length, together),
        data_collator=torch.utils.data.default_collate,
        optimizer=partial(_optimizer, recipe),
        evaluation=partial(_evaluation, run.text.held_out.text_bytes),
        callbacks=[callback, display],
        memory_loss=recipe.memory_loss,
        tau=recipe.tau,
        soft_budgets=recipe.soft_budgets,
        teacher=run.start.teacher,
        eviction=run.start.eviction,
    )
    try:
        callback.train(trainer)
    finally:
        display.bar.close()
    if callback.diverged:
        _refuse_divergence(trainer.state.global_step, run.checkpoints)
    with writing_to(out):
        return _finish(recipe, out, trainer, callback, run)


def _optimizer(recipe: TrainingRecipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(
        model,
        recipe.learning_rate,
        mechanism_rate=recipe.mechanism_rate,
        weight_decay=recipe.weight_decay,
    )
    return torch.optim.AdamW(groups, betas=(0.9, recipe.beta2), fused=True)


def _refuse_divergence(step: int, checkpoints: Checkpoints) -> None:
    newest = checkpoints.newest()
    last = "no checkpoint is good" if newest is None else f"{newest} is the last good checkpoint"
    raise UserError(
        f"the loss stopped being finite before step {step}, and training stopped; {last}. Try a "
        "lower --learning-rate, a longer --warmup or --dtype float32, in another folder"
        + ("" if newest is None else f" (MODEL may be {newest})")
    )


def _finish(
    recipe: TrainingRecipe,
    out: Path,
    trainer: RunTrainer,
    callback: RunCallback,
    run: _RunParts,
) -> TrainingResult:
    """Write the model and what came out, then remove what an unfinished run needs."""
    model, tokenizer = run.start.model, run.start.tokenizer
    ended = {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": recipe.steps,
        "tokens": recipe.steps * recipe.batch * recipe.length,
        "seconds": callback.seconds(),
        "tokens_per_second": callback.tokens_per_second(),
        "loss": callback.entries("eval_loss")[-1][1],
        "bits_per_byte": callback.entries("eval_bits_per_byte")[-1][1],
    }
    weights = trainer.whole_weights()
    if trainer.args.process_index == 0:
        if run.start.base is not None:
            save_adapter(model, out, base=run.start.base, dtype=torch.bfloat16)
            if run.start.eviction is not None:
                _take_budgets(run.start, out)
        else:
            if weights is not None:
                model.save_pretrained(out, state_dict=weights)
                model = load(out)
            if set(conversion_of(model).mechanisms) == {Standard()}:
                revert(model)
            model.save_pretrained(out)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(out)
        about = json.loads((out / _ABOUT).read_text())
        write_whole(out / _ABOUT, json.dumps(about | {"ended": ended}, indent=2) + "\n")
        shutil.rmtree(out / UNFINISHED)
    return TrainingResult(out, **ended)


def _take_budgets(start: Start, out: Path) -> None:
    """The budgets that the adapter was trained under, as those of the new one."""
    model = load(start.base, adapter=out, budgets=False)
    write_budgets(
        out / NAME, start.eviction, model, {"trained_under": f"the budgets of {start.name}"}
    )


class _Display(TrainerCallback):
    """A bar on the terminal, and the log of the run in its folder."""

    def __init__(self, recipe: TrainingRecipe, out: Path, *, show: bool) -> None:
        self.out, self._newest = out, {}
        if show:
            sequences = f"{recipe.batch} x {recipe.length:,} tokens"
            words = f"{recipe.steps:,} steps of {sequences}; --steps N changes how many"
            tqdm.write(words, file=sys.stderr)
        self.bar = tqdm(total=recipe.steps, unit="step", disable=not show, dynamic_ncols=True)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.bar.update(state.global_step)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.bar.update()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        formats = {"loss": ".4f", "tokens_per_second": ",.0f", "eval_bits_per_byte": ".4f"}
        logged = {
            x.removeprefix("eval_"): f"{logs[x]:{f}}" for x, f in formats.items() if x in logs
        }
        self._newest |= logged
        self.bar.set_postfix(self._newest)

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self._write_log(args, state)

    def on_save(self, args, state, control, **kwargs) -> None:
        self._write_log(args, state)

    def _write_log(self, args, state) -> None:
        if args.process_index == 0:
            write_lines(self.out / _LOG, state.log_history)


def _evaluation(text_bytes: int, trainer: RunTrainer) -> dict[str, float]:
    """Nats per token and bits per byte, over all processes."""
    model = trainer.model_wrapped
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
    for batch in trainer.get_eval_dataloader():
        batch = trainer.on_device(batch)
        with trainer.compute_loss_context_manager():
            mean = model(**batch, use_cache=False).loss
        predicted = (batch["labels"][:, 1:] != IGNORE).sum()
        if predicted:
            total += torch.stack([mean.double() * predicted, predicted.double()])
    nats, tokens = trainer.accelerator.reduce(total, "sum").tolist()
    return {"eval_loss": nats / tokens, "eval_bits_per_byte": nats / (math.log(2) * text_bytes)}


def formatted(result: TrainingResult) -> str:
    """Format the result for the terminal."""
    return (
        f"{result.parameters:,} parameters trained, {result.steps} steps, {result.tokens:,} "
        f"tokens in {result.seconds:,.0f} s ({result.tokens_per_second:,.0f} tokens/s): "
        f"{result.bits_per_byte:.4f} bits per byte of the evaluation set, {result.loss:.4f} nats "
        f"per token\nmodel: {result.folder}"
    )
