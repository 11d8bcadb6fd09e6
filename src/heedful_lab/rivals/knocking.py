"""Knocking heads: one transformation for the features of all heads, before they attend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.checks import UserError, check_choice
from heedful.nn.layer import parameter
from heedful.nn.shape import HeadShape
from heedful_lab.rivals.edits import EditingLayer, Part


@dataclass(frozen=True)
class KnockingHeads:
    """Standard attention whose heads share one more transformation; the identity at first.

    ```text
    linear:  x' = x T                                 per head, T shared by all heads
    mlp:     x' = 2 (x W_up * sigmoid(x W_gate)) W_down
    ```

    Arguments:
        parts: what is transformed, of `"q"`, `"k"` and `"v"`, each by a matrix of its own, before
            norms and the rotary embedding.
        form: `"linear"` or, for values alone, `"mlp"`.

    Source: Zhou et al., "Knocking-Heads Attention", arXiv 2510.23052, sections 3.2 and 3.3.
    """

    parts: tuple[Literal["q", "k", "v"], ...] = ("v",)
    form: Literal["linear", "mlp"] = "linear"

    def __post_init__(self) -> None:
        names = ("q", "k", "v")
        several = isinstance(self.parts, Sequence) and not isinstance(self.parts, str)
        if not several or not self.parts or not all(x in names for x in self.parts):
            raise UserError(f"parts must be one or several of 'q', 'k', 'v', got {self.parts!r}")
        if len(set(self.parts)) < len(self.parts):
            raise UserError(f"parts must name each part once, got {self.parts!r}")
        # In one order, so that equal configurations are equal; from JSON it comes as a list.
        object.__setattr__(self, "parts", tuple(x for x in names if x in self.parts))
        check_choice("form", self.form, ("linear", "mlp"))
        if self.form == "mlp" and self.parts != ("v",):
            raise UserError(f"parts must be ('v',) with form='mlp', got {self.parts!r}")

    def build(self, shape: HeadShape) -> "KnockingHeadsAttention":
        """The layer for one attention module."""
        return KnockingHeadsAttention(self, shape)


class KnockingHeadsAttention(EditingLayer):
    """The shared matrices of one layer."""

    def __init__(self, config: KnockingHeads, shape: HeadShape) -> None:
        super().__init__(shape)
        self.config, self.parts = config, config.parts
        names = config.parts if config.form == "linear" else ("up", "gate", "down")
        self.shared = nn.ParameterDict({name: parameter(shape.dim, shape.dim) for name in names})
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every matrix the identity, but that of the gate zero: a sigmoid of one half, doubled."""
        for name, matrix in self.shared.items():
            matrix.zero_() if name == "gate" else nn.init.eye_(matrix)

    def edited(
        self, part: Part, x: Float[Tensor, "B T C"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T C"]:
        """These features of every head through the matrix that all heads share."""
        # Products in the wider of both precisions, so that the identity changes no bit.
        wide = torch.promote_types(x.dtype, torch.float32)
        shared = {name: matrix.to(wide) for name, matrix in self.shared.items()}
        heads = x.to(wide).unflatten(2, (-1, self.shape.dim))
        if self.config.form == "linear":
            return (heads @ shared[part]).flatten(2).to(x.dtype)
        opening = 2 * torch.sigmoid(heads @ shared["gate"])
        return ((heads @ shared["up"] * opening) @ shared["down"]).flatten(2).to(x.dtype)
