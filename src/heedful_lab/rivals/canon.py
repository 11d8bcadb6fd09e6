"""Canon layers: neighbouring tokens meet in a short convolution before they attend."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from heedful.checks import UserError, check_choice, is_whole
from heedful.nn.layer import parameter
from heedful.nn.shape import HeadShape
from heedful_lab.rivals.edits import EditingLayer, Part

SETS = ("A", "B", "AB")


@dataclass(frozen=True)
class Canon:
    """Standard attention after residual causal convolutions over tokens, one kernel per channel.

    ```text
    x'[t] = x[t] + sum over d = 0 .. kernel - 1 of w[kernel - 1 - d] * x[t - d]
    ```

    Tokens of other documents, padding and what is before the row count as zero.

    Arguments:
        places: `"A"` on the attention module's input, `"B"` on queries, keys and values before
            norms and the rotary embedding, or `"AB"`. The paper's C and D are in the MLP.
        kernel: how many tokens, the current one included.
        start: `"zero"`, so that outputs are unchanged at first, or `"random"`, uniform in plus or
            minus `kernel ** -0.5`, as torch starts a convolution and the authors' code does.

    Source: Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of
    Canon Layers", arXiv 2512.17351.
    """

    places: Literal["A", "B", "AB"] = "AB"
    kernel: int = 4
    start: Literal["zero", "random"] = "zero"

    def __post_init__(self) -> None:
        check_choice("places", self.places, SETS)
        check_choice("start", self.start, ("zero", "random"))
        if not is_whole(self.kernel, 1):
            raise UserError(
                f"kernel must be a whole number of tokens of at least 1, got {self.kernel!r}"
            )

    def build(self, shape: HeadShape) -> "CanonAttention":
        """The layer for one attention module."""
        return CanonAttention(self, shape)


class CanonAttention(EditingLayer):
    """The kernels of one layer. Causal, and so of a decoder's self-attention alone."""

    caches = False

    def __init__(self, config: Canon, shape: HeadShape) -> None:
        super().__init__(shape)
        self.config = config
        widths = {"input": shape.hidden} if "A" in config.places else {}
        if "B" in config.places:
            queries, keys = shape.heads * shape.dim, shape.key_heads * shape.dim
            widths |= {"q": queries, "k": keys, "v": keys}
        self.parts = tuple(widths)
        self.kernels = nn.ParameterDict(
            {part: parameter(width, config.kernel) for part, width in widths.items()}
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Kernels of zeros, or random ones."""
        for kernel in self.kernels.values():
            if self.config.start == "zero":
                kernel.zero_()
            else:
                bound = self.config.kernel**-0.5
                nn.init.uniform_(kernel, -bound, bound)

    def edited(
        self, part: Part, x: Float[Tensor, "B T C"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T C"]:
        """The residual convolution, in the wider precision of both; sums from near to far."""
        kernel = self.kernels[part]
        wide = torch.promote_types(x.dtype, kernel.dtype)
        rows, kernel = x.to(wide), kernel.to(wide)
        out = rows + rows * kernel[:, -1]
        for back in range(1, min(kernel.shape[1], x.shape[1])):
            earlier = rows[:, :-back]
            if segments is not None:
                # Not multiplied by zero: what padding holds need not be finite.
                other = segments[:, back:] != segments[:, :-back]
                earlier = earlier.masked_fill(other[..., None], 0)
            out = out + pad(earlier * kernel[:, -1 - back], (0, 0, back, 0))
        return out.to(x.dtype)
