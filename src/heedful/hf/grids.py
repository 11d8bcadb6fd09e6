"""Grids of quantised weights: the step between the values that a block of weights can have.

Weights of a GGUF file are quantised in blocks of 16 or 32 along a row: every value of a block is
an integer times its step, from an offset on. Dequantised weights still lie on that grid, so the
step is read from the weights themselves.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_RUN, _BLOCK, _BLOCKS = 16, 32, 4  # values of a short run; of a block of eight bits; blocks read
_LEVELS = 63  # of six bits; more are found as eight bits without an offset
_OFF = 0.01  # of a step, that a value may be off its grid beside the rounding of its precision
_SMALL, _MEAN_OFF = 16, 0.1  # steps from zero where bfloat16 still shows a grid of eight bits


def steps(weights: Float[Tensor, "..."], places: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Steps of the grids on which weights lie, at chosen places.

    Arguments:
        weights: a parameter.
        places: indices into the flattened parameter.

    Returns:
        The step of the block around each place, in float64; 0 where there is no grid, and for
        vectors, which no format quantises.
    """
    none = torch.zeros(len(places), dtype=torch.float64)
    if weights.ndim < 2 or weights.shape[-1] < _BLOCK:
        return none
    rows = weights.detach().flatten(0, -2)
    columns = rows.shape[1]
    row, column = places.div(columns, rounding_mode="floor"), places % columns
    run = _step_of_run(_taken(rows, row, column // _RUN * _RUN, _RUN))
    blocks = min(_BLOCKS, columns // _BLOCK)
    block = (column // _BLOCK).clamp_max(columns // _BLOCK - 1)
    first = block.clamp_max(columns // _BLOCK - blocks)
    values = _taken(rows, row, first * _BLOCK, blocks * _BLOCK)
    eight = _step_of_eight_bits(values.unflatten(1, (blocks, _BLOCK)), block - first)
    return torch.where(run > 0, run, eight)


def _taken(
    rows: Float[Tensor, "r c"], row: Int[Tensor, " n"], first: Int[Tensor, " n"], length: int
) -> Float[Tensor, "n length"]:
    """`length` values of each chosen row from a column on, in float64 on the CPU."""
    columns = (first[:, None] + torch.arange(length)).clamp_max(rows.shape[1] - 1)
    return rows[row[:, None].to(rows.device), columns.to(rows.device)].double().cpu()


def _step_of_run(run: Float[Tensor, "n w"]) -> Float[Tensor, " n"]:
    """The widest step that has all values of a run on one grid of at most 63 steps, or 0."""
    low = run.amin(1, keepdim=True)
    span = run.amax(1, keepdim=True) - low
    count = torch.arange(1, _LEVELS + 1, dtype=run.dtype)
    place = ((run - low) / span.clamp_min(1e-30))[:, None] * count[:, None]
    size = run.abs() + run.abs().amax(1, keepdim=True)
    rounding = (size / span.clamp_min(1e-30))[:, None] * count[:, None] * unit_roundoff(run)
    fits = ((place - place.round()).abs() <= _OFF + rounding).all(-1) & (rounding < 0.2).all(-1)
    step = span[:, 0] / count[fits.int().argmax(1)]
    return torch.where(fits.any(1), step, 0.0)


def unit_roundoff(values: Float[Tensor, "..."]) -> float:
    """The largest relative error of rounding to the narrowest float type that holds all values."""
    for dtype, roundoff in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        if torch.equal(values.to(dtype).double(), values):
            return roundoff
    return 2**-24


def _step_of_eight_bits(
    blocks: Float[Tensor, "n b w"], chosen: Int[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """The step of the chosen block where all are integers of eight bits times a step, or 0."""
    step = blocks.abs().amax(2, keepdim=True) / 127
    place = blocks / step.clamp_min(1e-30)
    small = (place.abs() <= _SMALL) & (blocks != 0)
    off = ((place - place.round()).abs() * small).sum((1, 2)) / small.sum((1, 2)).clamp_min(1)
    own = step[torch.arange(len(blocks)), chosen, 0]
    return torch.where((off < _MEAN_OFF) & (small.sum((1, 2)) >= _BLOCKS), own, 0.0)
