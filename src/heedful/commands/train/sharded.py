"""The Trainer of `heedful train`: bits per byte, and states that any number of processes can load.

With FSDP2 each process holds a part of every parameter and of the optimiser's state. What is saved
is whole, in the same files and by the same names as with one process.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from heedful.training.trainer import InOrder

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


class TextTrainer(InOrder):
    """Trains on rows in their order and scores the held-out ones, each token once.

    Arguments:
        text_bytes: of the held-out text.
        optimizer: makes it of the model, once the model is where it trains.
        args, kwargs: as `LayerTrainer`'s.
    """

    def __init__(
        self,
        *args,
        text_bytes: int,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.text_bytes, self._make_optimizer = text_bytes, optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(self.model if model is None else model)
        return self.optimizer

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict:
        """Nats per token and bits per byte, over all processes."""
        model = self.model_wrapped
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in self.get_eval_dataloader():
            batch = self.on_device(batch)
            with self.compute_loss_context_manager():
                mean = model(**batch, use_cache=False).loss
            asked = (batch["labels"][:, 1:] != -100).sum()
            if asked:
                total += torch.stack([mean.double() * asked, asked.double()])
        nats, tokens = self.accelerator.reduce(total, "sum").tolist()
        metrics = {
            "eval_loss": nats / tokens,
            "eval_bits_per_byte": nats / (math.log(2) * self.text_bytes),
        }
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
        self.write_weights(output_dir, self.whole_weights())

    def read_weights(self, checkpoint: str) -> None:
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
