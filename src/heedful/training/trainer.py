"""transformers' Trainer for converted models: what it adds to the loss, and how it saves."""

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import ModelOutput

from heedful.hf import conversion_of
from heedful.hf.adapters import converted_inside
from heedful.hf.versions import TrainerSteps
from heedful.nn import Layer
from heedful.training.losses import GroupingLoss, MemoryLoss
from heedful.training.sequences import IGNORE


def parameter_groups(
    model: PreTrainedModel,
    learning_rate: float,
    *,
    mechanism_rate: float = 1.0,
    weight_decay: float = 0.0,
) -> list[dict]:
    """A converted model's parameters in the groups that an optimiser of torch takes.

    The mechanism's own parameters have a learning rate of theirs and no weight decay, which would
    pull a kernel to zero instead of to the identity; nor have vectors, such as norms and biases.

    Arguments:
        model: converted, or PEFT's wrapper of such a model; frozen parameters are left out.
        learning_rate: of the model's weights.
        mechanism_rate: factor on it for the mechanism's parameters.
        weight_decay: of the model's matrices.
    """
    own = {id(p) for p in conversion_of(converted_inside(model)).parameters().values()}
    trained = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in trained if id(p) not in own]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in own], "weight_decay": 0.0},
    ]
    rates = (1.0, 1.0, mechanism_rate)
    groups = [group | {"lr": learning_rate * x} for group, x in zip(groups, rates, strict=True)]
    return [group for group in groups if group["params"]]


def hiding_layers(model: nn.Module) -> list[Layer]:
    """The layers that mask tokens, and so can imitate a cache that evicts these.

    Raises:
        ValueError: there is none.
    """
    layers = [x for x in model.modules() if isinstance(x, Layer) and x.reports_memory]
    if not layers:
        raise ValueError(
            f"soft_budgets imitate a cache that evicts what is masked, and no layer of this "
            f"{type(model).__name__} masks; call heedful.convert(model, 'selective')"
        )
    return layers


class LayerTrainer(TrainerSteps, Trainer):
    """transformers' Trainer, with what a converted model's layers report added to the loss.

    The memory loss (`heedful.MemoryLoss`) where it is requested, and where groups are learned
    their loss (`heedful.GroupingLoss`), also when a step's batch comes in several parts or on
    several devices. Optimiser, data and arguments are Trainer's.

    Arguments:
        memory_loss: factor of the memory loss; 0 is none.
        tau: of the memory loss.
        soft_budgets: smallest and largest cache to imitate: each step draws a number of tokens from
            there, evenly on a logarithmic scale, and layers that report memory lower the logits of
            what a cache of that size would have evicted.
        teacher: a model without the mechanism; the loss is then the Kullback-Leibler divergence of
            the trained model's predictions from its, in nats per token, wherever there is a label.
        args, kwargs: as Trainer's.

    Raises:
        ValueError: a memory loss or soft budgets are requested of a model without a layer that
            reports memory.
    """

    def __init__(
        self,
        *args,
        memory_loss: float = 0.0,
        tau: float = 1.0,
        teacher: nn.Module | None = None,
        soft_budgets: tuple[int, int] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.memory_factor, self.tau = memory_loss, tau
        self.soft_budgets = soft_budgets
        self.teacher = None if teacher is None else teacher.to(self.args.device)
        self._added: list[tuple[float, MemoryLoss | GroupingLoss]] = []
        self._hiding = [] if soft_budgets is None else hiding_layers(self.model)
        if memory_loss:
            MemoryLoss(self.model).remove()  # refused here, and not after hours of preparation

    def train(self, *args, **kwargs):
        """As Trainer's; the hooks of the added losses stand in the model meanwhile."""
        if self.memory_factor:
            self._added.append((self.memory_factor, MemoryLoss(self.model, self.tau)))
        if any(x.learns_groups for x in self.model.modules() if isinstance(x, Layer)):
            self._added.append((1.0, GroupingLoss(self.model)))
        try:
            return super().train(*args, **kwargs)
        finally:
            self._imitate(None)
            for _, added in self._added:
                added.remove()
            self._added = []

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ):
        if self.soft_budgets is not None and model.training:
            self._imitate(self._drawn_budget(*self.soft_budgets))
        if self.teacher is None:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        else:
            loss, outputs = self._divergence(model, inputs, num_items_in_batch)
        # A loss that is divided by the tokens of the whole step is summed over the step's parts.
        summed = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        part = self.current_gradient_accumulation_steps
        self.note_loss(loss.detach() / (1 if summed else part))
        for factor, added in self._added if model.training else ():
            loss = loss + factor * added() / (part if summed else 1)
        return (loss, outputs) if return_outputs else loss

    def _divergence(
        self, model: nn.Module, inputs: dict[str, Tensor], predicted: Tensor | int | None
    ) -> tuple[Tensor, ModelOutput]:
        """How far the model's predictions are from the teacher's, and its output."""
        inputs = {**inputs, "use_cache": False}
        labels = inputs.pop("labels")[:, 1:]
        with torch.no_grad():
            target = self.teacher(**inputs).logits
        outputs = model(**inputs)
        counts = labels != IGNORE
        ours, theirs = (x[:, :-1][counts].float().log_softmax(-1) for x in (outputs.logits, target))
        total = nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)
        if predicted is None:
            return total / counts.sum().clamp(min=1), outputs
        if self.args.average_tokens_across_devices:
            total = total * self.accelerator.num_processes
        return total / predicted, outputs

    def _drawn_budget(self, least: int, most: int) -> int:
        """The tokens of this step's cache: the same again where a run goes on."""
        draws = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        share = torch.rand((), generator=draws).item()
        return round(least * (most / least) ** share)

    def _imitate(self, tokens: int | None) -> None:
        for layer in self._hiding:
            layer.soft_budget = tokens

    def note_loss(self, loss: Tensor) -> None:
        """Called with what every part of a step adds to the loss, without what layers report."""

    def warn_of_missing(self, load_result) -> None:
        """As Trainer's, but tied weights are there, though saved under one of their names."""
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(load_result.missing_keys)
        loaded = {id(p) for name, p in weights.items() if name not in missing}
        left = [name for name in load_result.missing_keys if id(weights.get(name)) not in loaded]
        super().warn_of_missing(load_result._replace(missing_keys=left))

    def write_checkpoint(self, *args, **kwargs) -> None:
        try:
            super().write_checkpoint(*args, **kwargs)
        except (RuntimeError, SafetensorError) as error:  # how writers of tensors say: disk full
            where = self.args.output_dir
            raise OSError(f"the run's state cannot be saved in {where}: {error}") from error
