"""A training run that can be killed at any moment: its Trainer, and when it saves and stops.

With FSDP2 each process holds a part of every parameter and of the optimiser's state. What is saved
is whole, in the same files and by the same names as with one process.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import TrainerCallback

from heedful.checks import UserError, check_choice
from heedful.files import write_whole
from heedful.training.checkpoints import Checkpoints
from heedful.training.trainer import LayerTrainer

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
_TRAINED = "trained.safetensors"  # in a checkpoint beside a frozen base
_BESIDE = "heedful.json"  # in a checkpoint: what Trainer does not keep


class Stopped(Exception):
    """Training was stopped; what is needed to go on is in the run's folder."""


def check_device(device: str) -> None:
    """Raise unless training can run there."""
    check_choice("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda', but torch sees no CUDA device; use auto or cpu")


@dataclass(frozen=True)
class Schedule:
    """Steps of a run at which something beside training happens.

    Arguments:
        steps: of the run.
        log_every: steps between entries of the log, with the mean loss since the last one.
        evaluate_every: steps between evaluations; the last step has one too.
        check_every: steps between checks that the loss is finite.
        save_seconds: time between checkpoints.
        step_tokens: tokens of a step.
    """

    steps: int
    log_every: int
    evaluate_every: int
    check_every: int
    save_seconds: float
    step_tokens: int

    def evaluates(self, step: int) -> bool:
        """Test whether a step has an evaluation."""
        return step % self.evaluate_every == 0 or step == self.steps


class RunTrainer(LayerTrainer):
    """Takes the training sequences in their order, which a resumed run finds again.

    Arguments:
        optimizer: makes the optimiser of the model, once the model is where it trains.
        evaluation: scores the trained model, by the names under which the log has them.
        args, kwargs: as `LayerTrainer`'s.
    """

    def __init__(
        self,
        *args,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        evaluation: Callable[["RunTrainer"], dict[str, float]],
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._make_optimizer, self._evaluation = optimizer, evaluation
        # Trainer's mean losses forget what a run that goes on had summed up before.
        self.step_losses: list[Tensor] = []
        for callback in list(self.callback_handler.callbacks):
            if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
                self.remove_callback(callback)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(self.model if model is None else model)
        return self.optimizer

    def note_loss(self, loss: Tensor) -> None:
        self.step_losses.append(loss)

    def sampler_of_rows(self) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict:
        """The scores of the model `as_in_use`, logged."""
        with self.as_in_use():
            metrics = self._evaluation(self)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Under FSDP2 all weights, on the first process; otherwise None: the model holds them."""
        return get_model_state_dict(self.model, options=_WHOLE) if self.is_fsdp_enabled else None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.world_size == 1:
            self.is_fsdp_enabled = False  # nothing to share
        elif self.args.fsdp_plugin_args and state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate shards on accelerators alone, though FSDP2 works on a CPU just the same.
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            if self.args.mixed_precision != "no":
                plugin.set_mixed_precision(self.args.mixed_precision)
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
            self.is_fsdp_enabled = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if all(p.requires_grad for p in self.model.parameters()):
            self.write_weights(output_dir, self.whole_weights())
        elif self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            weights = {name: p.detach().cpu() for name, p in self._trained()}
            save_file(weights, Path(output_dir) / _TRAINED)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def read_weights(self, checkpoint: str) -> None:
        if (path := Path(checkpoint) / _TRAINED).is_file():
            weights = load_file(path)
            with torch.no_grad():
                for name, p in self._trained():
                    p.copy_(weights[name])
            return
        if not self.is_fsdp_enabled:
            super().read_weights(checkpoint)
            return
        weights = {}
        for path in sorted(Path(checkpoint).glob("*.safetensors")):
            weights |= load_file(path)
        options = StateDictOptions(full_state_dict=True, strict=False)  # tied: under one name
        set_model_state_dict(self.model, weights, options=options)

    def write_optimizer(self, folder: str) -> None:
        state = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=_WHOLE)
        if self.args.should_save:
            torch.save(state, Path(folder) / _OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(folder) / _SCHEDULER)

    def read_optimizer(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state, schedule = (
            torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True)
            for name in (_OPTIMIZER, _SCHEDULER)
        )
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer.optimizer, state, options=options)
        self.lr_scheduler.load_state_dict(schedule)


class RunCallback(TrainerCallback):
    """Says when a run logs, evaluates, saves and stops, and keeps what Trainer's state does not.

    Arguments:
        schedule: the steps of all this.
        checkpoints: where the run's state is.
        should_stop: called after each step; once true, the state is saved and training ends.
    """

    trainer: RunTrainer

    def __init__(
        self, schedule: Schedule, checkpoints: Checkpoints, should_stop: Callable[[], bool]
    ) -> None:
        self.schedule, self.checkpoints, self.should_stop = schedule, checkpoints, should_stop
        self.diverged = False
        self.losses: list[Tensor] = []  # of the steps since the last entry of the log
        self.step_seconds = self._earlier = 0.0
        self._began = self._saved = self._since = time.perf_counter()

    def train(self, trainer: RunTrainer) -> None:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            Stopped: `should_stop` returned true.
            ValueError: the newest checkpoint is another version's.
        """
        self.trainer, checkpoint = trainer, self.checkpoints.newest()
        if checkpoint is not None:
            self._restore(checkpoint)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if trainer.state.global_step < self.schedule.steps and not self.diverged:
            raise Stopped

    def _restore(self, checkpoint: Path) -> None:
        try:
            saved = json.loads((checkpoint / _BESIDE).read_text())
        except (OSError, ValueError):
            raise UserError(
                f"{checkpoint} was saved by another version of heedful, or is damaged; delete "
                f"{self.checkpoints.folder} to begin again"
            ) from None
        self.losses = [torch.tensor(x) for x in saved["losses"]]
        self.step_seconds, self._earlier = saved["step_seconds"], saved["seconds"]

    def seconds(self) -> float:
        """Since the run began, without what lay between an interruption and going on."""
        return self._earlier + time.perf_counter() - self._began

    def tokens_per_second(self) -> float:
        tokens = self.trainer.state.global_step * self.schedule.step_tokens
        return tokens / max(self.step_seconds, 1e-9)

    def entries(self, key: str) -> list[tuple[int, float]]:
        """Entries of the log under a name, by step."""
        log = self.trainer.state.log_history
        return [(entry["step"], entry[key]) for entry in log if key in entry]

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now, schedule = time.perf_counter(), self.schedule
        self.step_seconds += now - self._since
        self.losses.append(torch.stack(self.trainer.step_losses).sum())
        self.trainer.step_losses.clear()
        step, last = state.global_step, state.global_step == schedule.steps
        stop, due = self._any_process(
            self.should_stop(), now - self._saved >= schedule.save_seconds
        )
        log = step % schedule.log_every == 0 or last
        save = (stop or due) and not last
        evaluate = schedule.evaluates(step)
        if log or save or evaluate or step % schedule.check_every == 0:
            (self.diverged,) = self._any_process(not self._finite(weights_too=save or last))
        if self.diverged:
            control.should_training_stop = True
            return
        if log:
            self._log()
        control.should_evaluate, control.should_save = evaluate, save
        control.should_training_stop = last or (stop and save)

    def on_save(self, args, state, control, **kwargs) -> None:
        args.distributed_state.wait_for_everyone()
        if args.process_index == 0:
            path = self.checkpoints.folder / f"checkpoint-{state.global_step}"
            saved = {"losses": [x.item() for x in self.losses], "step_seconds": self.step_seconds}
            write_whole(path / _BESIDE, json.dumps(saved | {"seconds": self.seconds()}))
            self.checkpoints.seal(state.global_step)
        args.distributed_state.wait_for_everyone()
        self._saved = time.perf_counter()

    def _any_process(self, *flags: bool) -> list[bool]:
        """Test whether any process sets each flag, as all must do the same."""
        if self.trainer.args.world_size == 1:
            return list(flags)
        own = torch.tensor([flags], dtype=torch.int32, device=self.trainer.args.device)
        return self.trainer.accelerator.gather(own).amax(0).bool().tolist()

    def _finite(self, weights_too: bool) -> bool:
        sums = [torch.stack([x.float().cpu() for x in self.losses]).sum()] if self.losses else []
        for p in self.trainer.model.parameters() if weights_too else ():
            local = p.to_local() if hasattr(p, "to_local") else p
            sums.append(local.detach().sum().float().cpu())
        return all(math.isfinite(x) for x in sums)

    def _log(self) -> None:
        mean = torch.stack([x.float().cpu() for x in self.losses]).mean()
        device = self.trainer.args.device
        loss = self.trainer.accelerator.reduce(mean.to(device), "mean").item()
        self.losses = []
        rate = self.trainer.lr_scheduler.get_last_lr()[0]
        speed = self.tokens_per_second()
        self.trainer.log({"loss": loss, "learning_rate": rate, "tokens_per_second": speed})
