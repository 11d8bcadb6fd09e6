"""Which tiles the fused kernels visit: those with something to see, less those without weight."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.limits import padded
from heedful.ops.selective.fused_forward import survey


class Field:
    """The selectors of a call and who sees whom, as the kernels take them."""

    def __init__(self, selector_q, selector_k, segments, first, window, scale) -> None:
        self.batch, self.selectors, self.queries, dim = selector_q.shape
        self.keys = selector_k.shape[2]
        segments = None if segments is None else segments.to(torch.int32).contiguous()
        first = None if first is None else first.to(torch.int8).contiguous()
        self.lines = max(1 if x is None else len(x) for x in (segments, first))
        self.sight = segments, first, self.keys if self.lines > 1 else 0
        self.cut = {"queries": self.queries, "keys": self.keys, "WINDOW": window or 0}
        # The first arguments of every kernel that forms a tile of S, and names that all know.
        self.tensors = selector_q.contiguous(), selector_k.contiguous(), *self.sight
        self.sizes = {"scale": scale, "DS": dim, "WDS": padded(dim)} | self.cut
        self._tiles: dict[tuple[int, int], Tensor] = {}

    def tiles(self, rows: int, columns: int) -> Int[Tensor, "B Hs blocks key_blocks"]:
        """What each tile holds: 0 nothing visible, 1 something, 2 no entry to mask."""
        if (rows, columns) not in self._tiles:
            shape = self.lines, -(-self.queries // rows), -(-self.keys // columns)
            tiles = self.tensors[0].new_empty(shape, dtype=torch.int8)
            survey[shape[::-1]](*self.sight, tiles, ROWS=rows, COLUMNS=columns, **self.cut)
            tiles = tiles[:, None].expand(self.batch, self.selectors, -1, -1)
            self._tiles[rows, columns] = tiles
        return self._tiles[rows, columns]


def visits(tiles: Int[Tensor, "*lead n"]) -> tuple[Int[Tensor, "*lead n"], Int[Tensor, "*lead"]]:
    """For every row of tiles, which to visit, last first, and how many; see `fused_tile.visit`."""
    place = torch.arange(tiles.shape[-1], dtype=torch.int32, device=tiles.device)
    order = torch.where(tiles > 0, 2 * place + (tiles == 2), -1)
    order = order.sort(-1, descending=True).values
    return order.contiguous(), (tiles > 0).sum(-1, dtype=torch.int32).contiguous()


def weight_limit(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    state: Float[Tensor, "B Hs Tk"] | None,
    selectors: int,
    scale: float,
) -> Float[Tensor, "B Hs Tq"]:
    """A bound for every query: keys with F above it have a weight of exactly zero in fp32.

    Every logit of query i lies within U = scale |q_i| max|k| of zero. Its own key has F = its
    incoming state (nobody hides a token before it is there), so the softmax's maximum is at least
    -U - state. A key's weight is then at most exp(2 U + state - F), and exp(-104) is zero. One more
    in the exponent and a thousandth of U are for rounding, here and in the kernels.
    """
    norm = {"dim": -1, "dtype": torch.float32}
    longest = torch.linalg.vector_norm(k, **norm).amax(-1, keepdim=True)
    reach = torch.linalg.vector_norm(q, **norm) * longest.repeat_interleave(
        q.shape[1] // k.shape[1], dim=1
    )
    limit = 105 + 2.002 * scale * reach.unflatten(1, (selectors, -1)).amax(2)
    return limit if state is None else limit + state[:, :, k.shape[2] - q.shape[2] :]


def weightless(
    limit: Float[Tensor, "B Hs Tq"], bases: Float[Tensor, "B Hs blocks Tk"], rows: int, columns: int
) -> Bool[Tensor, "B Hs blocks key_blocks"]:
    """Tiles without any weight: F never falls, so that none is below the base of its block."""
    least = _blocks(bases, columns, float("inf")).amin(-1)
    return least > _blocks(limit, rows, float("-inf")).amax(-1)[..., None]


def _blocks(x: Tensor, size: int, fill: float) -> Tensor:
    """`[..., T] -> [..., blocks, size]`, the last one filled up."""
    return pad(x, (0, -x.shape[-1] % size), value=fill).unflatten(-1, (-1, size))
