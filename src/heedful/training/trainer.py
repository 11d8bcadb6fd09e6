"""transformers' Trainer for converted models: what it adds to the loss, and how it saves."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import ModelOutput

from heedful.checks import UserError
from heedful.eviction import Eviction
from heedful.files import writing_to
from heedful.hf import conversion_of
from heedful.hf.adapters import converted_inside
from heedful.hf.versions import TrainerSteps
from heedful.nn import Layer
from heedful.training.eviction_order import EvictionOrderLoss
from heedful.training.losses import GroupingLoss, MemoryLoss
from heedful.training.sequences import IGNORE
from heedful.training.under_eviction import EvictionInTraining


def parameter_groups(
    model: PreTrainedModel,
    learning_rate: float,
    *,
    mechanism_rate: float = 1.0,
    weight_decay: float = 0.0,
) -> list[dict]:
    """A converted model's parameters in the groups that an optimiser of torch takes.

    The mechanism's own parameters have their own learning rate and no weight decay, which would
    pull a kernel to zero instead of to the identity. Vectors, such as norms and biases, have no
    weight decay either.

    Arguments:
        model: converted, or PEFT's wrapper of such a model; frozen parameters are left out.
        learning_rate: of the model's weights.
        mechanism_rate: factor on it for the mechanism's parameters.
        weight_decay: of the model's matrices.

    Returns:
        Groups with `params`, `lr` and `weight_decay`, as torch's optimisers take them.
    """
    own = {id(p) for p in conversion_of(converted_inside(model)).parameters().values()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in parameters if id(p) not in own]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in parameters if id(p) in own], "weight_decay": 0.0},
    ]
    rates = (1.0, 1.0, mechanism_rate)
    groups = [group | {"lr": learning_rate * x} for group, x in zip(groups, rates, strict=True)]
    return [group for group in groups if group["params"]]


class LayerTrainer(TrainerSteps, Trainer):
    """transformers' Trainer, with what a converted model's layers report added to the loss.

    The memory loss (`heedful.MemoryLoss`) where it is requested, and where groups are learned
    their loss (`heedful.GroupingLoss`), also when a step's batch comes in several parts or on
    several devices. Optimiser, data and arguments are Trainer's.

    Arguments:
        memory_loss: factor of the memory loss; 0 is none.
        tau: of the memory loss.
        soft_budgets: smallest and largest cache in tokens: each step draws a size between them,
            evenly on a logarithmic scale, and the loss is `EvictionOrderLoss` for a cache of that
            size. The base stays frozen, and neither text nor teacher is the target.
        teacher: a model without the mechanism; the loss is then the Kullback-Leibler divergence of
            the trained model's predictions from its, in nats per token, wherever there is a label.
        eviction: the loss is that of a model whose caches evict by it, with budgets that vary from
            step to step (`heedful.training.under_eviction`); evaluations in training have these
            budgets.
        args, kwargs: as Trainer's.

    Raises:
        ValueError: a memory loss or soft budgets are requested of a model without a layer that
            reports memory, or both at once.
    """

    def __init__(
        self,
        *args,
        memory_loss: float = 0.0,
        tau: float = 1.0,
        teacher: nn.Module | None = None,
        soft_budgets: tuple[int, int] | None = None,
        eviction: Eviction | None = None,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._under_eviction = (
            None if eviction is None else EvictionInTraining(self.model, eviction)
        )
        self.memory_factor, self.tau = memory_loss, tau
        self.soft_budgets = soft_budgets
        self.teacher = None if teacher is None else teacher.to(self.args.device)
        self._additions: list[tuple[float, MemoryLoss | GroupingLoss]] = []
        self._order = None
        if soft_budgets is not None:
            if memory_loss or teacher is not None:
                raise UserError(
                    "soft_budgets take their loss from attention maps alone: leave out memory_loss "
                    "and teacher"
                )
            self._order = EvictionOrderLoss(self.model, self.args.seed)
        if memory_loss:
            MemoryLoss(self.model).remove()  # refused here, and not after hours of preparation

    def train(self, *args, **kwargs):
        """As Trainer's, with the hooks of the added losses in the model meanwhile."""
        if self.memory_factor:
            self._additions.append((self.memory_factor, MemoryLoss(self.model, self.tau)))
        if any(x.learns_groups for x in self.model.modules() if isinstance(x, Layer)):
            self._additions.append((1.0, GroupingLoss(self.model)))
        observing = nullcontext() if self._order is None else self._order.observing()
        evicting = (
            nullcontext() if self._under_eviction is None else self._under_eviction.evicting()
        )
        try:
            with observing, evicting:
                result = super().train(*args, **kwargs)
                if self._order is not None:
                    self._order.rescale(self._levels())
            return result
        finally:
            for _, addition in self._additions:
                addition.remove()
            self._additions = []

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """As Trainer's, of the model `as_in_use`."""
        with self.as_in_use():
            return super().evaluate(*args, **kwargs)

    @contextmanager
    def as_in_use(self) -> Iterator[None]:
        """Within it the model is what it would be if training ended now.

        While an order of eviction is learned, with F of the scale that it will have; in training
        under eviction, with the budgets themselves.
        """
        if self._under_eviction is not None:
            self._under_eviction.scale(1.0)
        if self._order is None or not self._order.is_observing:
            yield
        else:
            with self._order.settled(self._levels()):
                yield

    def _levels(self) -> Tensor:
        """F of each layer on the first sequences of the evaluation set, of all processes."""
        batch = next(iter(self.get_eval_dataloader()))
        batch = {name: x.to(self.args.device) for name, x in batch.items()}
        return self.accelerator.reduce(self._order.levels(self.model, batch), "mean")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ):
        # A loss that is divided by the tokens of the whole step is summed over the step's parts.
        summed = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        part = getattr(self, "current_gradient_accumulation_steps", 1)  # none before training
        if self._under_eviction is not None and model.training:
            self._under_eviction.draw(self.args.seed, self.state.global_step)
        if self._order is not None and model.training:
            loss, outputs = self._ordered(model, inputs)
            loss = loss / (part if summed else 1)
        elif self.teacher is None:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        else:
            loss, outputs = self._divergence(model, inputs, num_items_in_batch)
        self.note_loss(loss.detach() / (1 if summed else part))
        for factor, addition in self._additions if model.training else ():
            loss = loss + factor * addition() / (part if summed else 1)
        return (loss, outputs) if return_outputs else loss

    def _divergence(
        self, model: nn.Module, inputs: dict[str, Tensor], predicted: Tensor | int | None
    ) -> tuple[Tensor, ModelOutput]:
        """KL(teacher || model) of the predictions, and the model's output."""
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

    def _ordered(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ModelOutput]:
        """Loss of the base's attention in a cache of this step's size, and the output."""
        inputs = {**inputs, "use_cache": False}
        self._order.draw(inputs.pop("labels"), self.state.global_step)
        outputs = model(**inputs)
        return self._order(self._drawn_budget(*self.soft_budgets)), outputs

    def _drawn_budget(self, least: int, most: int) -> int:
        """The tokens of this step's cache: the same again where a run goes on."""
        draws = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        share = torch.rand((), generator=draws).item()
        return round(least * (most / least) ** share)

    def note_loss(self, loss: Tensor) -> None:
        """Called with what every part of a step adds to the loss, without what layers report."""

    def warn_of_missing(self, load_result) -> None:
        """As Trainer's, but tied weights are there, though saved under one of their names."""
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        absent = set(load_result.missing_keys)
        loaded = {id(p) for name, p in weights.items() if name not in absent}
        names = [name for name in load_result.missing_keys if id(weights.get(name)) not in loaded]
        super().warn_of_missing(load_result._replace(missing_keys=names))

    def write_checkpoint(self, *args, **kwargs) -> None:
        where = self.args.output_dir
        try:
            with writing_to(where):
                super().write_checkpoint(*args, **kwargs)
        except (RuntimeError, SafetensorError) as error:  # how writers of tensors say: disk full
            raise OSError(f"the run's state cannot be saved in {where}: {error}") from error
