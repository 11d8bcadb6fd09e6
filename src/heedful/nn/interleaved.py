"""Interleaved heads: every head attends with several mixtures of all heads, in a longer row."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checks import is_whole
from heedful.nn.layer import (
    ALONE,
    NOTHING,
    TERMS,
    Given,
    LayerOutput,
    Maps,
    Projection,
    Rotation,
    Tokens,
)
from heedful.nn.layer import parameter as empty_parameter
from heedful.nn.shape import HeadShape
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility


@dataclass(frozen=True)
class InterleavedHeads:
    """P pseudo-heads per head, each a learned mixture of all heads' queries, keys and values.

    ```text
    q'[h, p] = sum over heads m of a_q[m, h, p] q[m]      and so k', v', of the key heads
    row of head h: (token 0, p 0), (token 0, p 1), ..., (token 1, p 0), ...   with causal order
    out[h] = sum over heads m and pseudo-heads p of r[h, m, p] attended[m, p]
    ```

    Every place of the longer row has a rotary position of its own, n P + p. So P pseudo-heads cost
    P ** 2 times the attention and P times the cache. With one pseudo-head it is a mixing of heads
    before and after attention, and the identity at first; with more, every pseudo-head starts as
    its own head and the output as their mean, which is not what the model computed.

    Arguments:
        pseudo: P; the paper takes as many as heads.
        window: how many tokens a query sees, itself included; `None` is the model's own choice.

    Source: Duvvuri et al., "Interleaved Head Attention", arXiv 2602.21371, section 4. How the
    mixtures start, and grouped queries, are not in it; both are ours.
    """

    pseudo: int = 2
    window: int | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.pseudo, 1):
            raise ValueError(
                f"pseudo must be a whole number of pseudo-heads of at least 1, got {self.pseudo!r}"
            )
        Standard(self.window)  # refuses a window that is none

    def build(self, shape: HeadShape) -> "InterleavedHeadsAttention":
        """The layer for one attention module."""
        return InterleavedHeadsAttention(self, shape)


class InterleavedHeadsAttention(StandardAttention):
    """The mixtures of one layer. Causal, and so of a decoder's self-attention alone."""

    any_shape = False
    takes = TERMS - {"bias"}

    def __init__(self, config: InterleavedHeads, shape: HeadShape) -> None:
        super().__init__(Standard(config.window), shape)
        self.config = config
        self.roles = frozenset({"decoder"})
        self.needs = frozenset({"unrotated", "rotation"} if config.pseudo > 1 else {"unrotated"})
        self.queries_per_head = self.keys_per_head = config.pseudo
        heads = {"q": shape.heads, "k": shape.key_heads, "v": shape.key_heads}
        self.mixing = nn.ParameterDict(
            {part: empty_parameter(n, n, config.pseudo) for part, n in heads.items()}
        )
        self.collapse = empty_parameter(shape.heads, shape.heads, config.pseudo)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every pseudo-head its own head, the output their mean."""
        for mixing in (*self.mixing.values(), self.collapse):
            mixing.copy_(torch.eye(len(mixing))[..., None].expand_as(mixing))
        self.collapse.div_(self.config.pseudo)

    def before_rotation(
        self, part: Projection, x: Float[Tensor, "B T H D"], tokens: Tokens = ALONE
    ) -> Float[Tensor, "B T n*H D"]:
        """The pseudo-heads, those of one head side by side."""
        mixing = self.mixing[part]
        wide = torch.promote_types(x.dtype, mixing.dtype)
        mixed = torch.einsum("btmd,mhp->bthpd", x.to(wide), mixing.to(wide))
        return mixed.flatten(2, 3).to(x.dtype)

    def forward(
        self,
        q: Float[Tensor, "B P*H Tq D"],
        k: Float[Tensor, "B P*Hk Tk D"],
        v: Float[Tensor, "B P*Hk Tk D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        given: Given = NOTHING,
    ) -> LayerOutput:
        """Attention over the longer row, and its collapse."""
        longer = self._longer(visibility, k.shape[2])
        q, k = self._placed(q, k, given.rotation)
        out = (
            super()
            .forward(q, k, self._interleaved(v), visibility=longer, scale=scale, given=given)
            .output
        )
        attended = out.unflatten(2, (-1, self.config.pseudo))
        wide = torch.promote_types(out.dtype, self.collapse.dtype)
        collapse = self.collapse.to(wide)
        return LayerOutput(torch.einsum("bmtpd,hmp->bhtd", attended.to(wide), collapse).to(q.dtype))

    def maps(self, q, k, *, visibility=None, scale=None, given: Given = NOTHING) -> Maps:
        """What each head's pseudo-queries give a token's pseudo-keys together, their mean."""
        longer = self._longer(visibility, k.shape[2])
        q, k = self._placed(q, k, given.rotation)
        weights = super().maps(q, k, visibility=longer, scale=scale, given=given).weights
        pseudo = self.config.pseudo
        return Maps(weights.unflatten(2, (-1, pseudo)).unflatten(4, (-1, pseudo)).sum(5).mean(3))

    def _interleaved(self, x: Float[Tensor, "B P*H T D"]) -> Float[Tensor, "B H P*T D"]:
        return x.unflatten(1, (-1, self.config.pseudo)).transpose(2, 3).flatten(2, 3)

    def _placed(
        self, q: Tensor, k: Tensor, rotation: Rotation | None
    ) -> tuple[Float[Tensor, "B H P*Tq D"], Float[Tensor, "B Hk P*Tk D"]]:
        """Queries and keys in the longer row, rotated on from n to n P + p."""
        pseudo, tokens = self.config.pseudo, k.shape[2]
        rows, keys = self._interleaved(q), self._interleaved(k)
        if rotation is None or pseudo == 1:
            return rows, keys
        # Angles of two rotations add up, and only differences of places count: places of the row.
        token = torch.arange(tokens, device=k.device)
        further = token[:, None] * (pseudo - 1) + torch.arange(pseudo, device=k.device)
        further = further.flatten().to(torch.float32)[None]
        return rotation(rows, further[:, -rows.shape[2] :]), rotation(keys, further)

    def _longer(self, visibility: Visibility | None, tokens: int) -> Visibility:
        """Who sees whom in the longer row: never a token that no query of the window sees."""
        visibility = Visibility() if visibility is None else visibility
        if not visibility.in_place:
            raise ValueError(
                "visibility must have keys in place for interleaved heads, whose rotary positions "
                "are counted along the row"
            )
        pseudo = self.config.pseudo
        windows = [w for w in (visibility.window, self.config.window) if w is not None]
        per_token = {
            name: x.repeat_interleave(pseudo, dim=1)
            for name in ("documents", "padding", "mutual")
            if (x := getattr(visibility, name)) is not None
        }
        window = min(windows) * pseudo - pseudo + 1 if windows else None
        return replace(visibility, window=window, **per_token)

    def _visibility(self, visibility: Visibility | None, k: Tensor) -> Visibility:
        return visibility  # the window is in it
