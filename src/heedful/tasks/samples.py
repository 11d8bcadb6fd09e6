"""What every task gives and how its predictions are counted: samples, labels and errors."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORE = -100
"""The label of a position without loss, as in transformers and `torch.nn.CrossEntropyLoss`."""

BOS, EOS = 0, 1
"""The first two ids of every synthetic task: begin and end of a row."""


class Samples(NamedTuple):
    """Rows of a task, named as the forward of a transformers model names them.

    Arguments:
        input_ids: `[N, T]` token ids.
        labels: `[N, T]`, -100 where there is no loss. The label of the token at position t stands
            at position t: the model shifts by one inside, so its logits at t answer `labels[t+1]`.
        attention_mask: `[N, T]`, 1 for a real token, 0 for padding on the right.
    """

    input_ids: Int[Tensor, "N T"]
    labels: Int[Tensor, "N T"]
    attention_mask: Int[Tensor, "N T"]


class Task(Protocol):
    """The outward shape of every task: a frozen configuration that samples, shows and scores.

    `scored_by` says what `score` takes beside the labels: `"predictions"`, the argmax of the
    logits at each position, or `"losses"`, what `token_losses` returns.
    """

    scored_by: ClassVar[str]

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int: ...

    def sample(self, count: int, seed: int) -> Samples: ...

    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str: ...

    def evaluations(self) -> dict[str, Self]: ...

    def score(self, values: Tensor, labels: Int[Tensor, "N T"]) -> dict[str, float]: ...


def sequence_error(predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]) -> float:
    """The fraction of rows with at least one wrong prediction under teacher forcing.

    Arguments:
        predictions: argmax of the logits at each position; position t answers `labels[t+1]`, and
            that shift happens in here.
        labels: -100 where nothing is asked. Rows that ask nothing do not count.

    Raises:
        ValueError: if the shapes differ or no position has a label.

    Source: the metric of the toy task of Multi-Token Attention, arXiv 2504.00927, §4.1.
    """
    wrong, asked = _wrong_and_asked(predictions, labels)
    rows = asked.any(dim=1)
    return wrong.any(dim=1)[rows].double().mean().item()


def token_error(predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]) -> float:
    """The fraction of wrong predictions among all positions with a label, under teacher forcing.

    Arguments and errors are those of `sequence_error`.
    """
    wrong, asked = _wrong_and_asked(predictions, labels)
    return (wrong.sum() / asked.sum()).item()


def token_losses(
    logits: Float[Tensor, "N T V"], labels: Int[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """The negative log-likelihood in nats of each label, aligned as predictions are.

    Arguments:
        logits: as a causal language model returns them.
        labels: -100 where nothing is asked.

    Returns:
        fp32 `[N, T]`: position t holds the loss of `labels[t+1]`; zero where nothing is asked and
        at the last position, which has no successor.
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits must be [N, T, V] with labels' [N, T] = {list(labels.shape)}, got "
            f"{list(logits.shape)}"
        )
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=IGNORE
    )
    return torch.nn.functional.pad(losses, (0, 1))


def _wrong_and_asked(predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    check_aligned("predictions", predictions, labels)
    if predictions.is_floating_point():
        raise ValueError(
            f"predictions must be token ids, got {predictions.dtype}; take logits.argmax(-1)"
        )
    targets = labels[:, 1:]
    asked = targets != IGNORE
    return (predictions[:, :-1] != targets) & asked, asked


def check_aligned(name: str, values: Tensor, labels: Tensor) -> None:
    """Raise unless `values` has the shape `[N, T]` of `labels` and a label asks for something."""
    if labels.ndim != 2:
        raise ValueError(f"labels must be [N, T], got shape {list(labels.shape)}")
    if values.shape != labels.shape:
        hint = "; take logits.argmax(-1)" if name == "predictions" and values.ndim == 3 else ""
        raise ValueError(
            f"{name} must have labels' shape {list(labels.shape)}, got {list(values.shape)}{hint}"
        )
    if not bool((labels[:, 1:] != IGNORE).any()):
        raise ValueError(
            "labels must ask for at least one token after the first position, but all are "
            f"{IGNORE}; pass the labels that sample() returned"
        )


def rows(input_ids: Int[Tensor, "N T"], asked: slice) -> Samples:
    """Samples of one length whose loss lies on the positions `asked`, the same in each row."""
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, asked] = input_ids[:, asked]
    return Samples(input_ids, labels, torch.ones_like(input_ids))


def render(ids: Int[Tensor, " T"] | Sequence[int], symbols: Sequence[str]) -> str:
    """The text of one row: `symbols[id]` for each id, joined."""
    ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if any(isinstance(i, list) for i in ids):
        raise ValueError("ids must be one row, got a batch; decode rows one at a time")
    for i in ids:
        if not 0 <= i < len(symbols):
            raise ValueError(
                f"ids must lie in 0..{len(symbols) - 1}, got {i}; -100 marks a label without "
                "loss: decode input_ids, or leave such positions out"
            )
    return "".join(symbols[i] for i in ids)


def check_whole(
    name: str, value: int, least: int, most: int | None = None, *, way_out: str = ""
) -> None:
    """Raise unless `value` is a whole number from `least` to `most`."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        tail = f"; {way_out}" if way_out else ""
        raise ValueError(f"{name} must be a whole number {bound}, got {value!r}{tail}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {listed}, got {value!r}{hint}")


def check_draw(count: int, seed: int) -> None:
    """Raise unless `count` and `seed` can start a draw."""
    check_whole("count", count, 1)
    check_whole("seed", seed, 0)
