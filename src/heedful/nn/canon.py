"""Canon layers: neighbouring tokens meet in a short convolution before they attend."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from heedful.checks import UserError, check_choice, is_whole
from heedful.nn.layer import ALONE, Projection, ProjectionContext, parameter
from heedful.nn.shape import HeadShape
from heedful.nn.standard import Standard, StandardAttention

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


class CanonAttention(StandardAttention):
    """The kernels of one layer. Causal, and so of a decoder's self-attention alone."""

    any_heads = False

    def __init__(self, config: Canon, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config = config
        self.roles = frozenset({"decoder"})
        self.past_inputs = config.kernel - 1
        widths = {"input": shape.hidden} if "A" in config.places else {}
        needs = {"unprojected"} if "A" in config.places else set()
        if "B" in config.places:
            queries, keys = shape.heads * shape.dim, shape.key_heads * shape.dim
            widths |= {"q": queries, "k": keys, "v": keys}
            needs.add("unrotated")
        self.needs = frozenset(needs)
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

    def before_projection(
        self, x: Float[Tensor, "B T E"], tokens: ProjectionContext = ALONE
    ) -> Float[Tensor, "B T E"]:
        """Canon-A."""
        return _convolved(x, self.kernels["input"], tokens)

    def before_rotation(
        self, part: Projection, x: Float[Tensor, "B T H D"], tokens: ProjectionContext = ALONE
    ) -> Float[Tensor, "B T H D"]:
        """Canon-B."""
        past = None if tokens.past is None else tokens.past.flatten(2)
        flat = _convolved(x.flatten(2), self.kernels[part], tokens._replace(past=past))
        return flat.unflatten(2, x.shape[2:])


def _convolved(
    x: Float[Tensor, "B T C"], kernel: Float[Tensor, "C w"], tokens: ProjectionContext
) -> Float[Tensor, "B T C"]:
    """The residual convolution, in the wider precision of both; sums from near to far."""
    length, width = x.shape[1], kernel.shape[1]
    wide = torch.promote_types(x.dtype, kernel.dtype)
    rows = x if tokens.past is None else torch.cat([tokens.past.to(x.dtype), x], dim=1)
    rows, kernel = rows.to(wide), kernel.to(wide)
    out = rows[:, -length:] + rows[:, -length:] * kernel[:, -1]
    for back in range(1, min(width, rows.shape[1])):
        # Where too little is known before the new tokens, the first of them have no such row.
        earlier = rows[:, max(0, rows.shape[1] - length - back) : rows.shape[1] - back]
        if tokens.segments is not None:
            own = tokens.segments[:, -earlier.shape[1] :]
            other = tokens.segments[:, tokens.segments.shape[1] - back - earlier.shape[1] : -back]
            # Not multiplied by zero: what padding holds need not be finite.
            earlier = earlier.masked_fill((own != other)[..., None], 0)
        product = earlier * kernel[:, -1 - back]
        out = out + pad(product, (0, 0, length - earlier.shape[1], 0))
    return out.to(x.dtype)
