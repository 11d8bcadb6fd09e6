"""Kernels of low rank: queries and keys that are filtered apart, and the logits near the diagonal.

With theta[r, c] = sum_n u[n, r] w[n, c] the convolution before the softmax (MTA eq. 5) is

    C[i, j] = scale sum_n q^n_i . k^n_j,    q^n_i = sum_r u[n, r] q_{i-(cq-1)+r},
                                            k^n_j = sum_c w[n, c] k_{j-h+c},    h = (ck-1)/2:

ordinary attention with heads R times as wide. Documents and padding fit in exactly: a term of
another document is left out of q^n and k^n. The causal edge does not: eq. 5 leaves out the future
of the neighbour's own row, which concerns the distances i - j below cq - 1 + h. The logits of this
band are sums of scores at few distances, computed apart, and *replace* those above. Subtracting the
terms that are left out would leave their rounding, hence a trace of future tokens. Kernels that
look back over keys have no band, and what encoders see has no edge.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common.precision import widen
from heedful.ops.common.tiles import gather_heads, spread_heads
from heedful.ops.visibility import Visibility

BLOCK = 32  # tokens per small matrix product


class LowRank(NamedTuple):
    """The factors of kernels of rank R, one kernel per query head, for `multi_token_attention`.

    Arguments:
        u: over queries, `[H, R, c_q]`; the last number meets the current query.
        w: over keys, `[H, R, c_k]`, or `[Hk, R, c_k]` where the heads of a key head share it, so
            that its filtered keys can be cached for all of them.
        centred: the middle of w meets the key, and c_k is odd. If `False` the last number does:
            such kernels look back over keys, none of their terms is left out (the paper's equation
            4), and with causal order attention is one call of SDPA.
    """

    u: Float[Tensor, "H R cq"]
    w: Float[Tensor, "Hw R ck"]
    centred: bool = True

    @property
    def ahead(self) -> int:
        """Number of keys beyond a token that its filtered key reads."""
        return self.w.shape[2] // 2 if self.centred else 0

    def kernel(self) -> Float[Tensor, "H cq n"]:
        """The kernels as `conv` has them, a look-back one with zeros for the keys ahead."""
        w = self.w.repeat_interleave(self.u.shape[0] // self.w.shape[0], dim=0)
        theta = (self.u[..., None] * w[:, :, None]).sum(1)
        return theta if self.centred else pad(theta, (0, self.w.shape[2] - 1))

    def band(self, causal: bool) -> int:
        """Number of distances between query and key, from 0 on, that the causal edge concerns."""
        return self.u.shape[2] - 1 + self.ahead if self.centred and causal else 0

    @property
    def past_keys(self) -> int:
        """Number of keys before a token that its filtered key and query, or its band, read."""
        rows, columns = self.u.shape[2], self.w.shape[2]
        return max(rows - 1, columns - 1, self.band(causal=True) + self.ahead - 1)

    def filtered(
        self, k: Float[Tensor, "B Hk T D"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B Hw T RD"]:
        """The keys as attention meets them far from the query, the ranks side by side."""
        return key_filter(self, segments).of(k)

    def terms(self, visibility: Visibility) -> Visibility:
        """Pairs of tokens that a convolved logit may be a sum of.

        A window masks keys, and not what their neighbours put into them.
        """
        causal = visibility.causal and self.centred
        return replace(visibility, window=None, causal=causal, mutual=None)


class Filter(NamedTuple):
    """y_t = sum_c weights[c] x_{t-before+c}, over t's own segment, the ranks side by side.

    As products with small bands: a block of outputs is a banded Toeplitz matrix times the tokens
    that it reaches.
    """

    weights: Float[Tensor, "H R n"]
    before: int
    segments: Int[Tensor, "#B T"] | None

    def of(self, x: Float[Tensor, "B Hx T D"]) -> Float[Tensor, "B H T RD"]:
        """Apply the filters: one per head of x, or several."""
        (batch, _, tokens, dim), (heads, ranks, _) = x.shape, self.weights.shape
        y = self._matrix(x) @ self._windows(x)
        return y.view(batch, heads, -1, ranks * dim)[:, :, :tokens].to(x.dtype)

    def backward(
        self, grad: Float[Tensor, "B H T RD"], x: Float[Tensor, "B Hx T D"]
    ) -> tuple[Float[Tensor, "B Hx T D"], Float[Tensor, "H R n"]]:
        """Gradients of x and of the weights, in the precision of the sums."""
        (_, shared, tokens, dim), (_, ranks, _) = x.shape, self.weights.shape
        grad = in_rows(widen(grad), BLOCK).unflatten(1, (shared, -1))  # b h g n t (r d)
        grad = grad.unflatten(-1, (ranks, dim)).flatten(4, 5)  # b h g n (t r) d
        dwindows = (self._matrix(x).mT @ grad).sum(2)
        dx = overlapped(dwindows, BLOCK)[:, :, self.before :][:, :, :tokens]
        dmatrix = grad @ self._windows(x).mT
        if self.segments is not None:
            dmatrix = dmatrix.unflatten(4, (BLOCK, ranks)) * self._same()[:, None, None, :, :, None]
            dmatrix = dmatrix.flatten(4, 5)
        dmatrix = dmatrix.sum((0, 3)).flatten(0, 1).unflatten(1, (BLOCK, ranks)).transpose(1, 2)
        return dx, unbanded(dmatrix).sum(2)

    def _around(self, tokens: int) -> tuple[int, int]:
        width = self.weights.shape[2]
        return self.before, -tokens % BLOCK + width - 1 - self.before

    def _windows(self, x: Tensor) -> Float[Tensor, "B Hx 1 blocks y D"]:
        reach = BLOCK + self.weights.shape[2] - 1
        around = pad(widen(x), (0, 0, *self._around(x.shape[2])))
        return around.unfold(2, reach, BLOCK).mT[:, :, None]

    def _matrix(self, x: Tensor) -> Float[Tensor, "#B Hx g #blocks tr y"]:
        weights = self.weights.to(torch.promote_types(x.dtype, torch.float32))
        matrix = banded(weights[:, :, None].expand(-1, -1, BLOCK, -1)).transpose(1, 2)
        matrix = matrix.unflatten(0, (x.shape[1], -1))[None, :, :, None]  # 1 h g 1 t r y
        if self.segments is not None:
            matrix = matrix * self._same()[:, None, None, :, :, None]
        return matrix.flatten(4, 5)

    def _same(self) -> Bool[Tensor, "#B blocks t y"]:
        """Mark the tokens in an output's reach that are of its segment."""
        tokens, reach = self.segments.shape[1], BLOCK + self.weights.shape[2] - 1
        number = pad(self.segments, self._around(tokens), value=-2).unfold(1, reach, BLOCK)
        return number[:, :, self.before : self.before + BLOCK, None] == number[:, :, None]


def query_filter(
    low_rank: LowRank, segments: Int[Tensor, "#B Tq"] | None, *, two_sided: bool = False
) -> Filter:
    """Filter that makes wide queries."""
    rows = low_rank.u.shape[2]
    return Filter(low_rank.u, rows // 2 if two_sided else rows - 1, segments)


def key_filter(low_rank: LowRank, segments: Int[Tensor, "#B Tk"] | None) -> Filter:
    """Filter that makes wide keys."""
    return Filter(low_rank.w, low_rank.w.shape[2] - 1 - low_rank.ahead, segments)


class Band(NamedTuple):
    """Conv(Mask_0(S))[i, i-d] for every distance d below `width`, times `scale`."""

    low_rank: LowRank
    width: int
    scale: float
    segments: Int[Tensor, "#B Tk"] | None

    def logits(
        self, q: Float[Tensor, "B H Tq D"], k: Float[Tensor, "B Hk Tk D"]
    ) -> Float[Tensor, "B H Tq m"]:
        """The logits, fp32 at least.

        Entries with i - d before the first key or in another segment are finite and mean nothing.
        """
        return self._around(q, k).flatten(-2) @ self._taps(q)

    def backward(
        self, grad: Float[Tensor, "B H Tq m"], q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k and the kernels `LowRank.kernel()`."""
        rows, queries = self._rows, q.shape[2]
        taps = self._taps(q)
        daround = (grad @ taps.mT).unflatten(-1, (-1, rows))
        if self.segments is not None:
            daround = daround * self._same_rows(queries)
        dscores = torch.zeros_like(daround[..., 0])
        for r in range(rows):  # row i - (cq-1) + r
            own = daround[:, :, rows - 1 - r :, :, r]
            dscores[:, :, : own.shape[2]] += own
        if self.segments is not None:
            dscores = dscores * _same_segment(self.segments, queries, self._reach)[:, None]
        dtaps = (self._around(q, k).flatten(-2).mT @ grad).sum(0) * self.scale
        theta = self.low_rank.kernel()
        row, column = self._places(theta.device)
        place = (row * (theta.shape[2] + 1) + column).flatten()
        whole = torch.arange(theta.shape[1] * (theta.shape[2] + 1), device=theta.device)
        # A product, as adding up by index has another order in every run on a GPU.
        dtheta = dtaps.flatten(1) @ (place[:, None] == whole).to(dtaps.dtype)
        dtheta = dtheta.unflatten(1, (theta.shape[1], -1))
        dk = dscores.new_zeros(*q.shape[:2], *k.shape[2:])
        add_near_values(dk, dscores, widen(q))
        dq = near_outputs(dscores, spread_heads(widen(k), q.shape[1]))
        return dq, gather_heads(dk, k.shape[1]), dtheta[..., :-1]

    @property
    def _rows(self) -> int:
        return self.low_rank.u.shape[2]

    @property
    def _reach(self) -> int:
        return self.width + self.low_rank.ahead

    def _around(self, q: Tensor, k: Tensor) -> Float[Tensor, "B H Tq e r"]:
        """Scores of row i - (cq-1) + r with the keys at a distance e from it."""
        scores, queries = diagonals(q, k, self._reach), q.shape[2]
        if self.segments is not None:
            scores = scores * _same_segment(self.segments, queries, self._reach)[:, None]
        around = pad(scores, (0, 0, self._rows - 1, 0)).unfold(2, self._rows, 1)
        return around if self.segments is None else around * self._same_rows(queries)

    def _same_rows(self, queries: int) -> Bool[Tensor, "#B 1 Tq 1 r"]:
        return _same_segment(self.segments, queries, self._rows).flip(-1)[:, None, :, None]

    def _taps(self, q: Tensor) -> Float[Tensor, "H er m"]:
        """Weight of each score in the logit at a distance d."""
        theta = self.low_rank.kernel().to(torch.promote_types(q.dtype, torch.float32)) * self.scale
        row, column = self._places(theta.device)
        return pad(theta, (0, 1))[:, row, column].flatten(1, 2)

    def _places(self, device: torch.device) -> tuple[Int[Tensor, "e r m"], Int[Tensor, "e r m"]]:
        """Row and column of the kernel by which a score at distance e of row r enters at d.

        The key i - d + (c - h) of row i - a lies at distance e = d - (c - h) - a from it.
        """
        columns = self.low_rank.w.shape[2]
        sizes = (self._reach, self._rows, self.width)
        e, r, d = (torch.arange(n, device=device) for n in sizes)
        c = d - e[:, None, None] - (self._rows - 1 - r[:, None]) + columns // 2
        c = c.masked_fill((c < 0) | (c >= columns), columns)  # a column of zeros
        return r[:, None].expand_as(c), c


def factor_gradients(
    low_rank: LowRank, dtheta: Float[Tensor, "H cq ck"]
) -> tuple[Float[Tensor, "H R cq"], Float[Tensor, "Hw R ck"]]:
    """Gradients of the kernels' factors, from that of the kernels."""
    u, w = low_rank.u.to(dtheta.dtype), low_rank.w.to(dtheta.dtype)
    heads = u.shape[0]
    du = (w.repeat_interleave(heads // w.shape[0], dim=0)) @ dtheta.mT
    return du, (u @ dtheta).unflatten(0, (w.shape[0], -1)).sum(1)


def banded(weights: Float[Tensor, "*lead n w"]) -> Float[Tensor, "*lead n n+w-1"]:
    """Row t holds its weights from column t on."""
    rows, width = weights.shape[-2:]
    reach = rows + width - 1
    # Lines one longer than a row shift by one from row to row.
    lines = pad(weights, (0, rows)).flatten(-2)[..., : rows * reach]
    return lines.unflatten(-1, (rows, reach))


def unbanded(matrix: Float[Tensor, "*lead n y"]) -> Float[Tensor, "*lead n w"]:
    """Of row t what stands from column t on."""
    rows, reach = matrix.shape[-2:]
    lines = pad(matrix.flatten(-2), (0, rows)).unflatten(-1, (rows, reach + 1))
    return lines[..., : reach - rows + 1]


def in_rows(x: Float[Tensor, "B H T n"], block: int) -> Float[Tensor, "B H blocks t n"]:
    """The rows in blocks, the last one filled up with zeros."""
    return pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))


def overlapped(parts: Float[Tensor, "B H blocks y D"], block: int) -> Float[Tensor, "B H T D"]:
    """The sum of windows that overlap: each has a block of tokens, and some of the next."""
    beyond = parts.shape[3] - block
    whole = pad(parts[:, :, :, :block], (0, 0, 0, 0, 0, -(-beyond // block)))
    for n, first in enumerate(range(block, block + beyond, block), 1):
        rest = parts[:, :, :, first : first + block]
        whole[:, :, n : n + parts.shape[2], : rest.shape[3]] += rest
    return whole.flatten(2, 3)


def near_windows(
    x: Float[Tensor, "B H Tk D"], queries: int, width: int
) -> Float[Tensor, "B H blocks y D"]:
    """Per block of the last `queries` tokens these, after the `width` - 1 tokens before them."""
    first = x.shape[2] - queries - width + 1
    x = pad(x[:, :, max(0, first) :], (0, 0, max(0, -first), -queries % BLOCK))
    return x.unfold(2, BLOCK + width - 1, BLOCK).mT


def diagonals(
    q: Float[Tensor, "B H Tq D"], k: Float[Tensor, "B Hk Tk D"], width: int
) -> Float[Tensor, "B H Tq n"]:
    """q_i . k_{i-e} for every distance e below `width`, widened, 0 where there is no such key."""
    rows = in_rows(widen(q), BLOCK).unflatten(1, (k.shape[1], -1))
    windows = near_windows(widen(k), q.shape[2], width)[:, :, None]
    lines = unbanded(rows @ windows.mT).flip(-1)
    return lines.flatten(1, 2).flatten(2, 3)[:, :, : q.shape[2]]


def near_outputs(
    p: Float[Tensor, "B H Tq n"], v: Float[Tensor, "B H Tk Dv"]
) -> Float[Tensor, "B H Tq Dv"]:
    """sum_e p[i, e] v[i - e] over the distances e below n."""
    matrix = banded(in_rows(p.flip(-1), BLOCK))  # b h blocks t y
    return (matrix @ near_windows(v, *p.shape[2:])).flatten(2, 3)[:, :, : p.shape[2]]


def add_near_values(
    dv: Float[Tensor, "B H Tk Dv"], p: Float[Tensor, "B H Tq n"], grad: Float[Tensor, "B H Tq Dv"]
) -> None:
    """dv[i - e] += p[i, e] grad[i]: the transpose of `near_outputs`."""
    parts = banded(in_rows(p.flip(-1), BLOCK)).mT @ in_rows(grad, BLOCK)
    tokens = p.shape[2] + p.shape[3] - 1
    before = max(0, tokens - dv.shape[2])  # what stands before the first key
    dv[:, :, dv.shape[2] - tokens + before :] += overlapped(parts, BLOCK)[:, :, before:tokens]


def _same_segment(
    segments: Int[Tensor, "B Tk"], queries: int, width: int
) -> Bool[Tensor, "B Tq n"]:
    """Query token i and token i - e are of the same segment, for every e below `width`."""
    first = segments.shape[1] - queries - width + 1
    near = pad(segments[:, max(0, first) :], (max(0, -first), 0), value=-2)
    return near.unfold(1, width, 1).flip(-1) == segments[:, -queries:, None]
