r"""TriAttention: keys are scored by what is known of a layer's queries before they come.

Before the rotary embedding the queries of a head lie close to one centre, whatever the text. A
query at position p and a key at $p_j$ have the logit

$$ \sum_f \mathrm{Re}\big(q_f \, e^{i \omega_f p} \, \overline{\tilde k_f}\big), \qquad
   \tilde k_f = k_f \, e^{i \omega_f p_j} $$

over the bands f of two channels that are rotated together, with frequency $\omega_f$. So a cached
key, which is rotated already, is all that the logit of a later query at the centre takes.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.checks import UserError, check_choice
from heedful.eviction import CachedTokens, Eviction
from heedful.nn import Layer

OFFSETS = tuple(2**i for i in range(17))
"""How many tokens ahead of the next one the queries are that a key is scored for: 1 to 65,536."""


class Bands(NamedTuple):
    """The bands of a rotary embedding: channels that it rotates together, and how fast.

    The channel c at position p is $x_c \\cos(\\omega_c p) - x_{partner(c)} \\sin(\\omega_c p)$; the
    frequencies of two partners differ in sign. A channel that is not rotated is its own partner,
    with frequency zero, and a band of its own.

    partners: of each channel, `[D]`.
    frequencies: of each channel, in fp64, `[D]`.
    first: the first channel of each band, `[F]`.
    """

    partners: Int[Tensor, " D"]
    frequencies: Float[Tensor, " D"]
    first: Int[Tensor, " F"]

    @classmethod
    def of(cls, partners: Int[Tensor, " D"], frequencies: Float[Tensor, " D"]) -> "Bands":
        """Make the bands from what each channel has."""
        channel = torch.arange(len(partners), device=partners.device)
        return cls(partners, frequencies, channel[channel <= partners])

    def rotated(
        self, x: Float[Tensor, "... D"], cos: Float[Tensor, "... D"], sin: Float[Tensor, "... D"]
    ) -> Float[Tensor, "... D"]:
        """Vectors rotated by these cosines and sines of `frequencies * position`."""
        return x * cos.to(x.dtype) - x[..., self.partners] * sin.to(x.dtype)

    def lengths(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        """The length of a vector in each band, which no rotation changes."""
        real, imaginary = x[..., self.first], x[..., self.partners[self.first]]
        alone = self.partners[self.first] == self.first
        return torch.where(alone, real.abs(), torch.hypot(real, imaginary))


class QueryStatistics(NamedTuple):
    """The queries of one layer before the rotation, on average over a text.

    centre: of each head, `[H, D]`.
    lengths: of each head and band, mean of the lengths, `[H, F]`.
    bands: of the layer's rotary embedding.
    """

    centre: Float[Tensor, "H D"]
    lengths: Float[Tensor, "H F"]
    bands: Bands

    def on(self, device: torch.device) -> "QueryStatistics":
        """Copy to another device."""
        bands = Bands(*(x.to(device) for x in self.bands))
        return QueryStatistics(self.centre.to(device), self.lengths.to(device), bands)


class Calibration:
    """The query statistics of a model's layers.

    Arguments:
        layers: of every attention layer of the decoder.
        model: the fingerprint of the model (`heedful.hf.fingerprints.fingerprint`).
    """

    def __init__(self, layers: tuple[QueryStatistics, ...], model: dict) -> None:
        self.layers, self.model = layers, model
        self._on: dict[tuple[int, torch.device], QueryStatistics] = {}

    def __repr__(self) -> str:
        return f"Calibration({len(self.layers)} layers)"

    def of(self, layer: int, device: torch.device) -> QueryStatistics:
        """The statistics of one layer, on a device."""
        if (layer, device) not in self._on:
            self._on[layer, device] = self.layers[layer].on(device)
        return self._on[layer, device]


@dataclass(frozen=True)
class TriAttention(Eviction):
    r"""Evicts the key to which later queries will give the smallest logits, as far as is known.

    With the centre $\bar q_f$ of a head's queries, their mean length $\overline{|q_f|}$ in each
    band, and p the position of the next token, a cached key has the score

    $$ \frac{1}{|\Delta|} \sum_{\delta \in \Delta} \sum_f
       \mathrm{Re}\big(\bar q_f \, e^{i \omega_f (p + \delta)} \, \overline{\tilde k_f}\big)
       + \sum_f (1 - R_f) \, \overline{|q_f|} \, |k_f|, \qquad
       R_f = \frac{|\bar q_f|}{\overline{|q_f|}}, \quad \Delta = \{1, 2, 4, \dots, 2^{16}\} $$

    The first sum is the expected logit at distances to come, a trigonometric series in the
    distance. The second takes over where queries do not concentrate, $R_f$ near 0. Scores of a head
    are standardised over the layer's real tokens (less their mean, by their standard deviation);
    then the heads of a layer, which share their tokens here, are joined.

    The published form prunes every 128 tokens and may keep other tokens per head; its common form
    for all heads keeps those with the highest maximum, over all layers. Here a layer evicts
    whenever it is full, for itself. Channels that a family does not rotate, which the published
    form does not have, are bands of frequency zero.

    Arguments:
        calibration: of the model, by `heedful_lab.rivals.calibration`.
        heads: how a layer's heads are joined: the highest of their scores, or the mean.
        tokens, sinks, recent, keep_prompt: as of every policy.

    Source: Mao et al., "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
        arXiv 2604.04921. Score, offsets, statistics and standardisation are those of the authors'
        code, in which the maximum is the default; the paper's text was not read.
    """

    calibration: Calibration | None = field(default=None, kw_only=True, repr=False)
    heads: Literal["max", "mean"] = field(default="max", kw_only=True)

    needs = ("keys", "positions")

    def __post_init__(self) -> None:
        if not isinstance(self.calibration, Calibration):
            raise UserError(
                "calibration must be that of the model, got "
                f"{self.calibration!r}; heedful_lab.rivals.calibration.calibrate(model, sequences) "
                "measures one"
            )
        check_choice("heads", self.heads, ("max", "mean"))
        super().__post_init__()

    def check(self, layer: Layer) -> None:
        """Raise a `ValueError` unless the calibration has a layer of this one's heads."""
        super().check(layer)
        layers, shape = self.calibration.layers, layer.shape
        own = (shape.heads, shape.dim)
        heads = tuple(layers[shape.layer].centre.shape) if shape.layer < len(layers) else None
        if heads != own:
            there = "no such layer" if heads is None else f"{heads[0]} query heads of {heads[1]}"
            raise UserError(
                f"eviction: {type(self).__name__} has the calibration of another model: layer "
                f"{shape.layer} has {own[0]} query heads of {own[1]} here, and {there} there; "
                "calibrate this one"
            )

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The standardised score, joined over the heads."""
        keys = cached.keys.to(torch.promote_types(cached.keys.dtype, torch.float32))
        centre, lengths, bands = self.calibration.of(cached.layer, keys.device)
        centre, lengths = centre.to(keys.dtype), lengths.to(keys.dtype)
        grouped = (keys.shape[1], len(centre) // keys.shape[1])
        query = _later_queries(centre, bands, cached.next).unflatten(1, grouped)
        spread = (lengths - bands.lengths(centre)).clamp(min=0).unflatten(0, grouped)
        scores = query @ keys.mT + spread @ bands.lengths(keys).mT
        scores = _standardised(scores.flatten(1, 2), cached)
        return scores.amax(1) if self.heads == "max" else scores.mean(1)


def _later_queries(
    centre: Float[Tensor, "H D"], bands: Bands, position: Int[Tensor, " B"]
) -> Float[Tensor, "B H D"]:
    """The mean of the centres rotated to all positions that a key is scored for."""
    wide = bands.frequencies.dtype
    ahead = torch.tensor(OFFSETS, dtype=wide, device=centre.device)
    angles = (position.to(wide)[:, None] + ahead)[..., None] * bands.frequencies
    cos, sin = (x.mean(1, keepdim=True) for x in (angles.cos(), angles.sin()))
    return bands.rotated(centre.expand(len(position), -1, -1), cos, sin)


def _standardised(scores: Float[Tensor, "B H n"], cached: CachedTokens) -> Float[Tensor, "B H n"]:
    """Scores minus the mean of the real tokens, divided by their standard deviation."""
    real = scores.new_ones(1, 1, scores.shape[2])
    if cached.real is not None:
        real = cached.real[:, None].to(scores.dtype)
    share = real / real.sum(2, keepdim=True).clamp(min=1)
    scores = scores - (scores * share).sum(2, keepdim=True)
    deviation = (scores.square() * share).sum(2, keepdim=True).sqrt()
    return scores / deviation.clamp(min=1e-6)
