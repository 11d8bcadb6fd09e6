"""Helpers to hold an attention implementation against its definition; used by heedful's own tests.

The rule for a tolerance is derived, never picked: an implementation may err at most twice as much
as the plain definition computed in the same precision, both measured against fp64, plus a rounding
band: what storing the result, and adding its terms in another order, may cost.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor


def assert_matches_oracle(
    name: str, actual: Tensor, same_precision: Tensor, oracle: Tensor, terms: int = 1
) -> None:
    """Raise `AssertionError` unless |actual - oracle| <= 2 (|same_precision - oracle| + band).

    The norm is the largest entry. With m the largest exact entry, the band is one unit in the last
    place of m in the dtype of the result, and sqrt(terms) of them in the accumulating precision,
    fp32 at least: the expected drift of a sum of `terms` numbers taken in another order.

    Arguments:
        name: what is compared, for the message.
        actual: the result under test.
        same_precision: the plain definition's result in the dtype of `actual`'s computation.
        oracle: the definition's result in fp64 from the same (rounded) inputs.
        terms: how many numbers are added up in one entry, such as the number of tokens.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}")
    if not bool(actual.isfinite().all()):
        raise AssertionError(f"{name}: NaN or infinity in the result")
    error, allowed = (x.item() for x in _errors(actual, same_precision, oracle, terms))
    if error > allowed:
        worst = (actual.double() - oracle).abs().flatten().argmax().item()
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), oracle.shape))
        raise AssertionError(
            f"{name}: error {error:.3g} at {place} exceeds {allowed:.3g} ({actual.dtype}); got "
            f"{actual[place].item():.8g}, exact {oracle[place].item():.8g}"
        )


def _errors(
    actual: Tensor, same_precision: Tensor, oracle: Tensor, terms: int
) -> tuple[Tensor, Tensor]:
    accumulating = torch.promote_types(actual.dtype, torch.float32)
    units = torch.finfo(actual.dtype).eps + terms**0.5 * torch.finfo(accumulating).eps
    band = units * oracle.abs().max()
    plain = (same_precision.double() - oracle).abs().max()
    return (actual.double() - oracle).abs().max(), 2 * (plain + band)


def assert_causal(function: Callable[[Tensor], Tensor], tokens: Tensor, dim: int) -> None:
    """Raise `AssertionError` if any output before a changed token changes by a single bit.

    Arguments:
        function: maps `tokens` to an output with the tokens along the same dimension `dim`.
        tokens: the input; every token is perturbed in turn.
        dim: the token dimension of input and output.
    """
    before = function(tokens)
    for t in range(tokens.shape[dim]):
        changed = tokens.clone()
        row = changed.select(dim, t)
        row.copy_(row + 1 if tokens.is_floating_point() else row.roll(1, -1) ^ 1)
        after = function(changed)
        if t and not torch.equal(after.narrow(dim, 0, t), before.narrow(dim, 0, t)):
            moved = (after != before).movedim(dim, 0).flatten(1).any(1).nonzero()[0].item()
            raise AssertionError(f"token {t} changed the output of token {moved}: a leak")
        if torch.equal(after.select(dim, t), before.select(dim, t)):
            raise AssertionError(
                f"token {t} does not change its own output: the probe sees nothing"
            )


def peak_memory_mib(code: str) -> float:
    """Growth of the resident-set peak while `code` runs `run()`, in MiB, in a fresh process.

    Importing torch leaves a peak far above what it keeps, in which a small computation would hide;
    so memory is occupied until the process stands at its peak, and only then `run()` is measured.
    Every tensor above 128 KiB is mapped for itself and unmapped when it goes (glibc): the peak is
    what the computation allocated, to about 1 %. With glibc's own changing threshold it depends on
    where freed tensors left holes, by up to a half from run to run.

    Arguments:
        code: Python source that imports torch, prepares its inputs and defines `run()`.

    Returns:
        The peak in MiB.
    """
    program = f"{code}\n{_MEASURE}"
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    if process.returncode:
        raise RuntimeError(f"the measured code failed:\n{process.stderr}")
    return float(process.stdout.split()[-1])


_MEASURE = """
from heedful.testing import process_peak_mib
ballast, start = [], process_peak_mib()
while process_peak_mib() < start + 2:
    ballast.append(torch.ones(2**18))
before = process_peak_mib()
run()
print(process_peak_mib() - before)
"""


def process_peak_mib() -> float:
    """The resident-set peak of this process so far, in MiB; NaN where the system gives none."""
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
