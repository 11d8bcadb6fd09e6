"""Measure the queries of a model, and write them into a file."""

import hashlib
from pathlib import Path

from heedful.checks import UserError
from heedful.eviction import Calibration
from heedful.hf.calibration import calibrate, write_calibration
from heedful_lab.commands.budget.rows import read_rows
from heedful_lab.commands.calibrate.options import CalibrationRun
from heedful_lab.commands.models import longest, open_model, open_tokenizer
from heedful_lab.records.environment import environment


def calibrate_model(options: CalibrationRun) -> str:
    """Calibrate as `heedful calibrate` does; returns what it wrote.

    Raises:
        ValueError: an option cannot be read, or the model cannot be calibrated.
    """
    if Path(options.out).is_dir():
        raise UserError(f"out must be a file, got the folder {options.out!r}; name a file in it")
    model = open_model(
        options.model,
        options.device,
        dtype=options.dtype,
        adapter=options.adapter,
        budgets=False,
    )
    tokenizer = open_tokenizer(options.tokenizer, options.model, model)
    most = longest(model)
    if most is not None and options.length > most:
        raise UserError(
            f"length must be at most the {most} positions of the model, got {options.length}"
        )
    ids = read_rows(options.data, tokenizer, options.length, options.rows).ids
    calibration = calibrate(model, ids.split(1))
    about = {
        "name": options.model,
        "adapter": options.adapter,
        "data": list(options.data),
        "tokens": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16],
        "length": options.length,
        "rows": options.rows,
        "environment": environment(),
    }
    path = Path(options.out)
    write_calibration(path, calibration, about)
    size = path.stat().st_size / 2**10
    return f"{_concentration(calibration)}\ncalibration: {path} ({size:.1f} KiB)"


def _concentration(calibration: Calibration) -> str:
    """How close to their centres the queries are, in words."""
    shares = []
    for layer in calibration.layers:
        centre = layer.bands.lengths(layer.centre)
        shares.append((centre.sum() / layer.lengths.sum()).item())
    return (
        f"{len(shares)} layers; length of the mean query by the mean length of a query, band by "
        f"band: {min(shares):.2f} to {max(shares):.2f}, on average {sum(shares) / len(shares):.2f}"
    )
