"""Knocking heads: one transformation for the features of all heads, before they attend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checks import UserError, check_choice
from heedful.nn.layer import ALONE, Projection, ProjectionContext, parameter
from heedful.nn.shape import HeadShape
from heedful.nn.standard import Standard, StandardAttention


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

    parts: tuple[Projection, ...] = ("v",)
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


class KnockingHeadsAttention(StandardAttention):
    """The shared matrices of one layer."""

    any_heads = False
    needs = frozenset({"unrotated"})

    def __init__(self, config: KnockingHeads, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config = config
        names = config.parts if config.form == "linear" else ("up", "gate", "down")
        self.shared = nn.ParameterDict({name: parameter(shape.dim, shape.dim) for name in names})
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every matrix the identity, but that of the gate zero: a sigmoid of one half, doubled."""
        for name, matrix in self.shared.items():
            matrix.zero_() if name == "gate" else nn.init.eye_(matrix)

    def before_rotation(
        self, part: Projection, x: Float[Tensor, "B T H D"], tokens: ProjectionContext = ALONE
    ) -> Float[Tensor, "B T H D"]:
        """These features of every head through the matrix that all heads share."""
        if part not in self.config.parts:
            return x
        # Products in the wider of both precisions, so that the identity changes no bit.
        wide = torch.promote_types(x.dtype, torch.float32)
        shared = {name: matrix.to(wide) for name, matrix in self.shared.items()}
        if self.config.form == "linear":
            return (x.to(wide) @ shared[part]).to(x.dtype)
        opening = 2 * torch.sigmoid(x.to(wide) @ shared["gate"])
        return ((x.to(wide) @ shared["up"] * opening) @ shared["down"]).to(x.dtype)
