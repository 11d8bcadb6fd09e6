"""Grouping of a layer's tokens: by count, by closing tokens, or learned from its input."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.nn.layer import GroupingReport, LayerInputs
from heedful.nn.shape import HeadShape, WideLinear
from heedful.ops.grouped.groups import Groups, Places, closed_groups, fixed_from, sliding_from
from heedful.ops.grouped.learned import cif_from

Kind = Literal["fixed", "sliding", "sentence", "cif"]
KINDS = ("fixed", "sliding", "sentence", "cif")

_WIDTH = 32  # of what weights are predicted from


def longest_span(kind: Kind, size: int, longest: int) -> int:
    """The most tokens that a group spans."""
    return {"sentence": longest, "cif": longest + 1}.get(kind, size)


class Grouping(nn.Module):
    """Makes the groups of a row from one feature vector per token.

    Features depend on tokens up to theirs, and are made once; groups are made of the features of
    any run of tokens that starts with the oldest open group. So a cache need keep no others.

    Arguments:
        kind: one of `KINDS`.
        shape: of the layer.
        size: tokens of a group, or how many there should be.
        stride: from one sliding group to the next.
        shortest, longest: tokens of a group, where the text or the model decides.
        closing: ids of the tokens that close a group.
    """

    def __init__(
        self, kind: Kind, shape: HeadShape, size: int, stride: int, shortest: int, longest: int,
        closing: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind, self.size, self.stride = kind, size, stride
        self.shortest, self.longest, self.closing = shortest, longest, closing
        self.longest_span = longest_span(kind, size, longest)
        self.inner = self.outer = None
        if kind == "cif":
            self.inner = WideLinear(shape.hidden, _WIDTH)
            self.outer = WideLinear(_WIDTH, 1)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights of mean 1/size."""
        if self.kind != "cif":
            return
        nn.init.normal_(self.inner.weight, std=self.inner.in_features**-0.5)
        self.inner.bias.zero_()
        # Not zero: with weights all alike no token stands on a border, and none learns.
        nn.init.normal_(self.outer.weight, std=self.outer.in_features**-0.5)
        least = 1 / self.longest
        share = (1 / self.size - least) / (1 - least)
        self.outer.bias.fill_(math.log(share / (1 - share)))

    def features(self, inputs: LayerInputs) -> Float[Tensor, "B T F"] | None:
        """Features that the groups of these tokens are made of; `None` where counting is enough.

        Arguments:
            inputs: the layer's input, or token ids.
        """
        match self.kind:
            case "sentence":
                closing = torch.tensor(self.closing, device=inputs.token_ids.device)
                return torch.isin(inputs.token_ids, closing).float()[..., None]
            case "cif":
                least = 1 / self.longest
                raw = self.outer(nn.functional.gelu(self.inner(inputs.input)))
                return least + (1 - least) * raw.sigmoid()
        return None

    def groups(
        self,
        features: Float[Tensor, "B T F"] | None,
        places: Places,
        begun: Float[Tensor, "#B T"] | Int[Tensor, "#B T"] | None = None,
    ) -> Groups:
        """The groups of these tokens.

        Arguments:
            features: of these tokens.
            places: where they stand; the first real one of each row starts a group.
            begun: of every token, what came of its document before these: sliding, how many groups
                it has begun; cif, how full its open group is.
        """
        match self.kind:
            case "fixed":
                return fixed_from(places, self.size)
            case "sliding":
                return sliding_from(places, self.size, self.stride, 0 if begun is None else begun)
            case "sentence":
                return closed_groups(features[..., 0] > 0, places, self.shortest, self.longest)
        return cif_from(places, features[..., 0], self.longest, begun)

    def report(
        self, features: Float[Tensor, "B T F"] | None, groups: Groups, places: Places
    ) -> GroupingReport | None:
        r"""Distance of the groups from the target size $g$, $(g\,\overline{\alpha} - 1)^2$.

        `None` where that cannot change.
        """
        if self.kind != "cif":
            return None
        real = places.real.expand(features.shape[:2])
        count = real.sum().clamp(min=1)
        mean = features[..., 0].where(real, 0).sum() / count
        closed = groups.there.sum().to(mean.dtype) / count
        return GroupingReport((self.size * mean - 1).square(), 1 / closed, self.size)
