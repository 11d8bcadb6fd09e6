"""`heedful train`: a language model on text, on one device or several, killed and resumed at will.

The output folder holds the model, `training.json` (what was asked, what came out) and `log.jsonl`;
while the run lasts, `unfinished/` in it holds the encoded text, the vocabulary and checkpoints.
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from heedful.commands.compare.one_model import Stopped, check_device
from heedful.commands.train.checkpoints import Checkpoints, differences
from heedful.commands.train.options import HARMLESS, Recipe, Training, asked_for
from heedful.commands.train.rows import Encoded, HeldOutRows, TrainingRows, encode
from heedful.commands.train.sharded import TextTrainer
from heedful.commands.train.start import has_weights, model_and_tokenizer
from heedful.hf import conversion_of, load, revert
from heedful.hf.versions import checkpointing_options
from heedful.nn import Standard, to_json
from heedful.records.environment import environment
from heedful.records.files import only_writer, write_lines, write_whole
from heedful.training.losses import MemoryLoss
from heedful.training.trainer import parameter_groups

_ABOUT, _LOG, _UNFINISHED = "training.json", "log.jsonl", "unfinished"
_BESIDE = "heedful.json"  # in a checkpoint: what Trainer does not keep


class Trained(NamedTuple):
    """What a training run came to."""

    folder: Path
    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss: float
    bits_per_byte: float


def train_text(
    asked: Training, should_stop: Callable[[], bool] = lambda: False, *, show: bool = True
) -> Trained | None:
    """Train as asked; a run that ended early in `asked.out` goes on where it was saved.

    On one device and with the same versions a run that goes on ends with the weights and losses of
    one that was never stopped, to the last bit.

    Arguments:
        asked: what to train on what, and how.
        should_stop: asked after each step; once true, the state is saved and `Stopped` raised.
        show: bars on the terminal.

    Returns:
        what it came to; None on all processes but the first.

    Raises:
        Stopped: `should_stop` said so.
        ValueError: an argument does not fit the model, the text or the folder, or the loss stopped
            being finite.
    """
    check_device(asked.device)
    _check_reports(asked.report_to)
    out = Path(asked.out)
    recipe = asked.filled(has_weights(asked.model))
    arguments = _arguments(asked, recipe, out / _UNFINISHED)
    main = arguments.process_index == 0
    with ExitStack() as held:
        if main:
            held.enter_context(_gone_if_empty(out))
            held.enter_context(only_writer(out))
        # The first process reads and writes, then the others find it done.
        with arguments.main_process_first(local=False, desc="reading the text"):
            if (done := _finished(out, asked)) is not None:
                return done
            run = _begin(asked, recipe, out, arguments, show=show and main)
        trained = _train(asked, recipe, out, arguments, run, should_stop, show=show and main)
        arguments.distributed_state.wait_for_everyone()
    return trained if main else None


@contextmanager
def _gone_if_empty(folder: Path) -> Iterator[None]:
    """A folder that was made for a run which never began goes again."""
    try:
        yield
    finally:
        with suppress(OSError):  # it holds something
            folder.rmdir()


def _check_reports(names: tuple[str, ...]) -> None:
    """Raise unless losses can be sent there; Trainer would say so after the text is read."""
    try:
        for callback in get_reporting_integration_callbacks(list(names)):
            callback()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"report_to={' '.join(names)}: {error}") from None


class _Run(NamedTuple):
    model: PreTrainedModel
    tokenizer: object
    text: Encoded
    checkpoints: Checkpoints


def _finished(out: Path, asked: Training) -> Trained | None:
    """What a folder's run came to, if it has ended; raises if another run made the folder."""
    path = out / _ABOUT
    if not path.is_file():
        others = sorted(x.name for x in out.glob("*") if not x.name.startswith("."))
        if others and others != [_UNFINISHED]:
            raise ValueError(
                f"out={str(out)!r} holds {', '.join(others[:3])} and no {_ABOUT}, so no run of "
                "this command made it; choose another folder"
            )
        return None
    try:
        about = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); choose another folder") from None
    if changed := differences(about["asked"], json.loads(json.dumps(asked_for(asked)))):
        raise ValueError(
            f"out={str(out)!r} is the folder of another run: {'; '.join(changed)}; choose another "
            "folder, or delete this one"
        )
    for changed in differences(about["harmless"], _harmless(asked)):
        warnings.warn(f"{changed}; the run stays what it was", stacklevel=3)
    ended = about["ended"]
    return ended and Trained(out, **ended)


def _harmless(asked: Training) -> dict:
    return json.loads(json.dumps({name: getattr(asked, name) for name in HARMLESS}))


def _begin(
    asked: Training, recipe: Recipe, out: Path, arguments: TrainingArguments, *, show: bool
) -> _Run:
    """Model, vocabulary and rows, and whose folder this is; nothing is left where they fail."""
    folder = out / _UNFINISHED
    fresh = not folder.exists()
    try:
        model, tokenizer = model_and_tokenizer(asked, recipe.length, folder / "tokenizer")
        if asked.memory_loss:
            MemoryLoss(model).remove()  # refused before the text is read
        text = encode(
            asked.data,
            asked.held_out,
            tokenizer,
            folder / "text",
            length=recipe.length,
            most_tokens=asked.read_tokens or recipe.steps * recipe.batch * (recipe.length - 1) + 1,
            show=show,
        )
    except BaseException:
        if fresh and arguments.process_index == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    identity = {"asked": asked_for(asked), "recipe": recipe._asdict()}
    identity |= {"parameters": sum(p.numel() for p in model.parameters())}
    checkpoints = Checkpoints(folder / "state", identity)
    if arguments.process_index == 0:
        _write_about(out, asked, recipe, model, ended=None)
    return _Run(model, tokenizer, text, checkpoints)


def _write_about(
    out: Path, asked: Training, recipe: Recipe, model: PreTrainedModel, ended: dict | None
) -> None:
    conversion = conversion_of(model)
    about = {
        "asked": asked_for(asked),
        "harmless": _harmless(asked),
        "recipe": recipe._asdict(),
        "mechanisms": [
            {"mechanism": to_json(config), "layers": list(layers)}
            for config, layers in conversion.mechanisms.items()
        ],
        "ended": ended,
        "environment": environment(),
    }
    write_whole(out / _ABOUT, json.dumps(about, indent=2) + "\n")


def _train(
    asked: Training,
    recipe: Recipe,
    out: Path,
    arguments: TrainingArguments,
    run: _Run,
    should_stop: Callable[[], bool],
    *,
    show: bool,
) -> Trained:
    model, checkpoints = run.model, run.checkpoints
    watch = _Watch(asked, recipe, out, checkpoints, should_stop, show=show)
    rows = TrainingRows(run.text.train, recipe.length, recipe.steps * recipe.batch, asked.seed)
    together = arguments.world_size * arguments.per_device_eval_batch_size
    trainer = TextTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=HeldOutRows(run.text.held_out, recipe.length, together),
        data_collator=torch.utils.data.default_collate,
        optimizer=partial(_optimizer, recipe),
        callbacks=[watch],
        memory_loss=asked.memory_loss,
        text_bytes=run.text.held_out.text_bytes,
    )
    watch.trainer = trainer
    checkpoint = checkpoints.newest()
    watch.go_on_from(checkpoint)
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        watch.close()
    if watch.diverged:
        _refuse_divergence(asked, trainer.state.global_step, checkpoints)
    if trainer.state.global_step < recipe.steps:
        raise Stopped
    return _finish(asked, recipe, out, trainer, watch, run)


def _optimizer(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(
        model,
        recipe.learning_rate,
        mechanism_rate=recipe.mechanism_rate,
        weight_decay=recipe.weight_decay,
    )
    return torch.optim.AdamW(groups, betas=(0.9, recipe.beta2), fused=True)


def _refuse_divergence(asked: Training, step: int, checkpoints: Checkpoints) -> None:
    kept = checkpoints.newest()
    last = "no checkpoint is good" if kept is None else f"{kept} is the last good checkpoint"
    raise ValueError(
        f"the loss stopped being finite before step {step}, and training stopped; {last}. Try a "
        "lower --learning-rate, a longer --warmup or --dtype float32, in another folder"
        + ("" if kept is None else f" (MODEL may be {kept})")
    )


def _finish(
    asked: Training, recipe: Recipe, out: Path, trainer: "TextTrainer", watch: "_Watch", run: _Run
) -> Trained:
    """Write the model and what came out, then remove what an unfinished run needs."""
    model = run.model
    last = watch.newest("eval_loss")
    ended = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": recipe.steps,
        "tokens": recipe.steps * recipe.batch * recipe.length,
        "seconds": watch.seconds(),
        "tokens_per_second": watch.tokens_per_second(),
        "loss": last["eval_loss"],
        "bits_per_byte": last["eval_bits_per_byte"],
    }
    weights = trainer.whole_weights()
    if trainer.args.process_index == 0:
        if weights is not None:
            model.save_pretrained(out, state_dict=weights)
            model = load(out)
        if set(conversion_of(model).mechanisms) == {Standard()}:
            revert(model)
        model.save_pretrained(out)
        if hasattr(run.tokenizer, "save_pretrained"):
            run.tokenizer.save_pretrained(out)
        about = json.loads((out / _ABOUT).read_text())
        write_whole(out / _ABOUT, json.dumps(about | {"ended": ended}, indent=2) + "\n")
        shutil.rmtree(out / _UNFINISHED)
    return Trained(out, **ended)


class _Watch(TrainerCallback):
    """Says when to evaluate, save and stop, tells how it goes, and keeps what Trainer forgets."""

    trainer: TextTrainer

    def __init__(
        self,
        asked: Training,
        recipe: Recipe,
        out: Path,
        checkpoints: Checkpoints,
        should_stop: Callable[[], bool],
        *,
        show: bool,
    ) -> None:
        self.recipe, self.out, self.checkpoints = recipe, out, checkpoints
        self.should_stop, self.save_seconds = should_stop, 60 * asked.save_minutes
        self.told_every = max(1, recipe.steps // 100)
        self.scored_every = -(-recipe.steps // asked.evaluations)
        self.bar = tqdm(total=recipe.steps, unit="step", disable=not show, dynamic_ncols=True)
        self.diverged = False
        self.losses: list[torch.Tensor] = []
        self.step_seconds = self._earlier = 0.0
        self._began = self._saved = self._since = time.perf_counter()

    def go_on_from(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            kept = json.loads((checkpoint / _BESIDE).read_text())
            self.losses = [torch.tensor(x) for x in kept["losses"]]
            self.step_seconds, self._earlier = kept["step_seconds"], kept["seconds"]

    def seconds(self) -> float:
        """Since the run began, without what lay between an interruption and going on."""
        return self._earlier + time.perf_counter() - self._began

    def tokens_per_second(self) -> float:
        done = self.trainer.state.global_step * self.recipe.batch * self.recipe.length
        return done / max(self.step_seconds, 1e-9)

    def newest(self, key: str) -> dict:
        return next(row for row in reversed(self.trainer.state.log_history) if key in row)

    def close(self) -> None:
        self.bar.close()

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.bar.update(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.step_seconds += now - self._since
        self.bar.update()
        self.losses.append(torch.stack(self.trainer.parts).sum())
        self.trainer.parts.clear()
        step, last = state.global_step, state.global_step == self.recipe.steps
        stop, due = self._agreed(self.should_stop(), now - self._saved >= self.save_seconds)
        tell = step % self.told_every == 0 or last
        save = (stop or due) and not last
        score = step % self.scored_every == 0 or last
        if tell or save or score:
            (self.diverged,) = self._agreed(not self._finite(save or last))
        if self.diverged:
            control.should_training_stop = True
            return
        if tell:
            self._tell()
        control.should_evaluate, control.should_save = score, save
        control.should_training_stop = last or (stop and save)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs) -> None:
        self._shown(bits_per_byte=f"{metrics['eval_bits_per_byte']:.4f}")
        self._write_log()

    def on_save(self, args, state, control, **kwargs) -> None:
        args.distributed_state.wait_for_everyone()
        if args.process_index == 0:
            path = self.checkpoints.folder / f"checkpoint-{state.global_step}"
            kept = {"losses": [x.item() for x in self.losses], "step_seconds": self.step_seconds}
            write_whole(path / _BESIDE, json.dumps(kept | {"seconds": self.seconds()}))
            self.checkpoints.seal(state.global_step)
            self._write_log()
        args.distributed_state.wait_for_everyone()
        self._saved = time.perf_counter()

    def _agreed(self, *flags: bool) -> list[bool]:
        """Whether any process says so, as all must do the same."""
        if self.trainer.args.world_size == 1:
            return list(flags)
        mine = torch.tensor([flags], dtype=torch.int32, device=self.trainer.args.device)
        return self.trainer.accelerator.gather(mine).amax(0).bool().tolist()

    def _finite(self, weights_too: bool) -> bool:
        found = [torch.stack([x.float().cpu() for x in self.losses]).sum()] if self.losses else []
        if weights_too:
            for p in self.trainer.model.parameters():
                local = p.to_local() if hasattr(p, "to_local") else p
                found.append(local.detach().sum().float().cpu())
        return all(math.isfinite(x) for x in found)

    def _tell(self) -> None:
        mean = torch.stack([x.float().cpu() for x in self.losses]).mean()
        device = self.trainer.args.device
        loss = self.trainer.accelerator.reduce(mean.to(device), "mean").item()
        self.losses = []
        speed = self.tokens_per_second()
        rate = self.trainer.lr_scheduler.get_last_lr()[0]
        self.trainer.log({"loss": loss, "learning_rate": rate, "tokens_per_second": speed})
        self._shown(loss=f"{loss:.4f}", tokens_per_second=f"{speed:,.0f}")

    def _shown(self, **values: str) -> None:
        self._postfix = getattr(self, "_postfix", {}) | values
        self.bar.set_postfix(self._postfix)

    def _write_log(self) -> None:
        if self.trainer.args.process_index == 0:
            write_lines(self.out / _LOG, self.trainer.state.log_history)


def _arguments(asked: Training, recipe: Recipe, folder: Path) -> TrainingArguments:
    cuda = torch.cuda.is_available() and asked.device != "cpu"
    half = asked.dtype == "bfloat16" or (
        asked.dtype == "auto" and cuda and torch.cuda.is_bf16_supported()
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "state"),
        max_steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(
            recipe.schedule, recipe.schedule
        ),
        warmup_steps=recipe.warmup,
        max_grad_norm=1.0,
        gradient_accumulation_steps=asked.accumulate,
        **checkpointing_options(asked.checkpointing),
        bf16=half,
        fsdp=asked.fsdp,
        torch_compile=asked.compile,
        seed=asked.seed,
        data_seed=asked.seed,
        logging_strategy="no",  # `_Watch` says when
        save_strategy="no",
        save_total_limit=2,
        remove_unused_columns=False,
        report_to=list(asked.report_to),
        disable_tqdm=True,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
    )
    parts = arguments.world_size * asked.accumulate
    if recipe.batch % parts:
        raise ValueError(
            f"batch must be a multiple of {parts} (processes x accumulate), got {recipe.batch}"
        )
    arguments.per_device_train_batch_size = recipe.batch // parts
    arguments.per_device_eval_batch_size = recipe.batch // parts
    return arguments


def formatted(trained: Trained) -> str:
    """What came out, for the terminal."""
    return (
        f"{trained.parameters:,} parameters, {trained.steps} steps, {trained.tokens:,} tokens in "
        f"{trained.seconds:,.0f} s ({trained.tokens_per_second:,.0f} tokens/s): "
        f"{trained.bits_per_byte:.4f} bits per byte of held-out text, {trained.loss:.4f} nats per "
        f"token\nmodel: {trained.folder}"
    )
