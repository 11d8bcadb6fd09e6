"""The devices of a training run, and Trainer's arguments there."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from heedful.checks import UserError
from heedful.hf.versions import checkpointing_options
from heedful.training.run import check_device
from heedful_lab.commands.train.options import TrainingRecipe


@dataclass(frozen=True)
class Machine:
    """Device and precision of a run, and how it fits there; fields are those of `Training`.

    Raises:
        ValueError: there is no such device here, or losses cannot be reported there.
    """

    device: str
    dtype: str
    accumulate: int
    checkpointing: bool
    compile: bool
    fsdp: bool
    report_to: tuple[str, ...]

    def __post_init__(self) -> None:
        check_device(self.device)
        try:  # Trainer would say so after the text is read
            for callback in get_reporting_integration_callbacks(list(self.report_to)):
                callback()
        except (ValueError, RuntimeError, ImportError) as error:
            raise UserError(f"report_to={' '.join(self.report_to)}: {error}") from None

    def arguments(self, recipe: TrainingRecipe, folder: Path, seed: int) -> TrainingArguments:
        """Trainer's arguments for a recipe, with its state in a folder."""
        cuda = torch.cuda.is_available() and self.device != "cpu"
        half = self.dtype == "bfloat16" or (
            self.dtype == "auto" and cuda and torch.cuda.is_bf16_supported()
        )
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=recipe.steps,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type={"constant": "constant_with_warmup"}.get(
                recipe.schedule, recipe.schedule
            ),
            warmup_steps=recipe.warmup,
            max_grad_norm=1.0,
            gradient_accumulation_steps=self.accumulate,
            **checkpointing_options(self.checkpointing),
            bf16=half,
            fsdp=self.fsdp,
            torch_compile=self.compile,
            seed=seed,
            data_seed=seed,
            logging_strategy="no",  # `RunCallback` says when
            save_strategy="no",
            save_total_limit=2,
            remove_unused_columns=False,
            report_to=list(self.report_to),
            disable_tqdm=True,
            use_cpu=not cuda,
            dataloader_pin_memory=cuda,
        )
        parts = arguments.world_size * self.accumulate
        if recipe.batch % parts:
            raise UserError(
                f"batch must be a multiple of {parts} (processes x accumulate), got {recipe.batch}"
            )
        arguments.per_device_train_batch_size = recipe.batch // parts
        arguments.per_device_eval_batch_size = recipe.batch // parts
        return arguments
