"""Samples, labels and errors: the data of every task, and how predictions are counted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.checks import UserError, check_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IGNORE = -100
"""The label of a position without loss, as in transformers and `torch.nn.CrossEntropyLoss`."""

BOS, EOS = 0, 1
"""The first two ids of every synthetic task: begin and end of a sequence."""


class Samples(NamedTuple):
    """Sequences of a task, named as the forward of a transformers model names them.

    Arguments:
        input_ids: `[N, T]` token ids.
        labels: `[N, T]`, -100 where there is no loss. The label of the token at position t stands
            at position t: the model shifts by one inside, so its logits at t answer `labels[t+1]`.
        attention_mask: `[N, T]`, 1 for a real token, 0 for padding on the right.
    """

    input_ids: Int[Tensor, "N T"]
    labels: Int[Tensor, "N T"]
    attention_mask: Int[Tensor, "N T"]

    def inputs(self) -> dict[str, Tensor]:
        """Arguments of a call of the model; without the mask, as nothing is padded here."""
        return {"input_ids": self.input_ids, "labels": self.labels}


class Recipe(NamedTuple):
    """Recipe to learn a task within a minute or two on a CPU, and what is compared there.

    Arguments:
        hidden, layers, heads: width, depth and heads of the model.
        steps, batch: optimiser steps, and sequences in each.
        learning_rate: peak of the schedule.
        mechanisms: names of those that are compared by default: where the papers claim a
            difference.
        mechanism_rate: factor on the learning rate of a mechanism's own parameters.
        held_out: how many sequences the evaluation set has.
        changes: fields in which a named mechanism differs on this task.
    """

    hidden: int
    layers: int
    heads: int
    steps: int
    batch: int
    learning_rate: float
    mechanisms: tuple[str, ...]
    mechanism_rate: float = 1.0
    held_out: int = 256
    changes: Mapping[str, dict] = MappingProxyType({})


class Task(ABC):
    """Base of every task: a frozen configuration that samples, shows and scores its sequences.

    metric: what a run is judged by, a key of what `score` returns.
    also: further keys of it that are recorded.
    scored_by: what `score` takes beside the labels: `"predictions"`, the argmax of the logits at
        each position, `"losses"`, what `token_losses` returns, or `"texts"`, what the model writes.
    paired: whether sequences are `heedful_lab.tasks.pairs.Pairs`, for encoder-decoders.
    recipe: the small model that learns it, and the training.
    end: how the end of a sequence is shown, which decodes to nothing.
    """

    metric: ClassVar[str] = "error"
    also: ClassVar[tuple[str, ...]] = ()
    scored_by: ClassVar[Literal["predictions", "losses", "texts"]] = "predictions"
    paired: ClassVar[bool] = False
    recipe: ClassVar[Recipe]
    end: ClassVar[str] = "EOS"

    @classmethod
    def default(cls, data: Sequence[str] = ()) -> "Task":
        """The task as the comparison runs it; `data` is text for tasks that read some."""
        return cls()

    def cut(self, length: int | None, tokenizer: str) -> "Task":
        """The same with sequences of so many tokens, and text in tokens of this kind."""
        if length is not None:
            raise UserError(
                f"length: sequences of {type(self).__name__} are as long as what they hold; "
                "leave it out, or take a task whose sequences can be longer, such as text or recall"
            )
        return self

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a sequence."""

    @property
    def row_tokens(self) -> float:
        """Tokens of a sequence that are no padding, on average."""
        return self.length

    @abstractmethod
    def sample(self, count: int, seed: int) -> Samples:
        """`count` sequences, the same for the same configuration, count and seed."""

    def batch(self, count: int, seed: int, step: int) -> Samples:
        """The training sequences of one step: drawn when they are needed, and never kept."""
        return self.sample(count, 1 + (seed << 32) + step)  # 0 draws the evaluation set

    def held_out(self, count: int) -> Samples:
        """Sequences that are never trained on, the same at every call."""
        return self.sample(count, 0)

    @abstractmethod
    def evaluations(self) -> "dict[str, Task]":
        """Evaluations of a model, by name; a run is judged by the first."""

    def saved_tokenizer(self) -> "Tokenizer | None":
        """Tokenizer of this task, to be saved with its models; `None` for none."""
        return None

    def special_tokens(self) -> dict[str, int]:
        """Ids with a meaning, as transformers names them, such as `bos_token`."""
        return {}

    def under_budgets(self) -> "dict[str, Task]":
        """Tasks to score a model on under a small KV cache; none where that means nothing."""
        return {}

    @abstractmethod
    def score(self, values: Tensor, labels: Int[Tensor, "N T"]) -> dict[str, float]:
        """The task's measures, by name."""

    @abstractmethod
    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str:
        """The text of one sequence."""

    def shown(self) -> Int[Tensor, " T"] | None:
        """A short evaluation sequence to be read; `None` where attention is not pictured."""
        return self.sample(1, 0).input_ids[0]

    def tokens(self, ids: Int[Tensor, " T"]) -> list[str]:
        """The tokens of one sequence as text, one by one."""
        return ["BOS", *(self.decode([i]) or self.end for i in ids.tolist()[1:])]


class SymbolTask(Task):
    """A task whose sequences are drawn, all of one length, and read by symbols: `symbols[id]`."""

    @property
    @abstractmethod
    def symbol_names(self) -> tuple[str, ...]:
        """Text of each id; empty for BOS and EOS."""

    @property
    def vocab_size(self) -> int:
        """One id for each symbol."""
        return len(self.symbol_names)

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int) -> Samples:
        """`count` sequences, from these random numbers."""

    def sample(self, count: int, seed: int) -> Samples:
        """`count` sequences, the same for the same configuration, count and seed."""
        check_draw(count, seed)
        return self.draw(np.random.default_rng(seed), count)

    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str:
        """The text of one sequence, without BOS and EOS."""
        return render(ids, self.symbol_names)

    def score(
        self, predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]
    ) -> dict[str, float]:
        """`error`: sequences with any wrong token; `token_error`: wrong tokens."""
        return {
            "error": sequence_error(predictions, labels),
            "token_error": token_error(predictions, labels),
        }


def sequence_error(predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]) -> float:
    """The fraction of sequences with at least one wrong prediction under teacher forcing.

    Arguments:
        predictions: argmax of the logits at each position; position t answers `labels[t+1]`, and
            that shift happens in here.
        labels: -100 where there is no target. Sequences without a target do not count.

    Raises:
        ValueError: if the shapes differ or no position has a label.

    Source: the metric of the toy task of Multi-Token Attention, arXiv 2504.00927, §4.1.
    """
    wrong, mask = errors_and_mask(predictions, labels)
    rows = mask.any(dim=1)
    return wrong.any(dim=1)[rows].double().mean().item()


def token_error(predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]) -> float:
    """The fraction of wrong predictions among all positions with a label, under teacher forcing.

    Arguments and errors are those of `sequence_error`.
    """
    wrong, mask = errors_and_mask(predictions, labels)
    return (wrong.sum() / mask.sum()).item()


def token_losses(
    logits: Float[Tensor, "N T V"], labels: Int[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """The negative log-likelihood in nats of each label, aligned as predictions are.

    Arguments:
        logits: as a causal language model returns them.
        labels: -100 where there is no target.

    Returns:
        fp32 `[N, T]`: position t holds the loss of `labels[t+1]`; zero where there is no target and
        at the last position, which has no successor.
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise UserError(
            f"logits must be [N, T, V] with labels' [N, T] = {list(labels.shape)}, got "
            f"{list(logits.shape)}"
        )
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=IGNORE
    )
    return torch.nn.functional.pad(losses, (0, 1))


def errors_and_mask(predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mark the wrong predictions and those that count, `[N, T - 1]`, each at its label less one."""
    check_aligned("predictions", predictions, labels)
    if predictions.is_floating_point():
        raise UserError(
            f"predictions must be token ids, got {predictions.dtype}; take logits.argmax(-1)"
        )
    targets = labels[:, 1:]
    mask = targets != IGNORE
    return (predictions[:, :-1] != targets) & mask, mask


def check_aligned(name: str, values: Tensor, labels: Tensor) -> None:
    """Raise unless `values` has the shape `[N, T]` of `labels` and there is a target."""
    if labels.ndim != 2:
        raise UserError(f"labels must be [N, T], got shape {list(labels.shape)}")
    if values.shape != labels.shape:
        hint = "; take logits.argmax(-1)" if name == "predictions" and values.ndim == 3 else ""
        raise UserError(
            f"{name} must have labels' shape {list(labels.shape)}, got {list(values.shape)}{hint}"
        )
    if not bool((labels[:, 1:] != IGNORE).any()):
        raise UserError(
            "labels must have at least one target after the first position, but all are "
            f"{IGNORE}; pass the labels that sample() returned"
        )


def rows(input_ids: Int[Tensor, "N T"], answers: slice) -> Samples:
    """Samples of one length whose loss lies on the positions `answers`, the same for all."""
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, answers] = input_ids[:, answers]
    return Samples(input_ids, labels, torch.ones_like(input_ids))


def render(ids: Int[Tensor, " T"] | Sequence[int], symbols: Sequence[str]) -> str:
    """The text of one sequence: `symbols[id]` for each id, joined."""
    ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if any(isinstance(i, list) for i in ids):
        raise UserError("ids must be one sequence, got a batch; decode sequences one at a time")
    for i in ids:
        if not 0 <= i < len(symbols):
            raise UserError(
                f"ids must lie in 0..{len(symbols) - 1}, got {i}; -100 marks a label without "
                "loss: decode input_ids, or leave such positions out"
            )
    return "".join(symbols[i] for i in ids)


def check_draw(count: int, seed: int) -> None:
    """Raise unless `count` and `seed` can start a draw."""
    check_whole("count", count, 1)
    check_whole("seed", seed, 0)
