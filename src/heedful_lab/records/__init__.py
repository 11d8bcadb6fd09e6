"""Records of results: one a run, with its provenance, in whole files."""

from heedful_lab.records.record import (
    HIGHER_IS_BETTER,
    METRICS,
    SHARES,
    WHOLE,
    Record,
    Sample,
    UnderBudget,
    read_records,
)
from heedful_lab.records.store import append, read, read_numbered

__all__ = [
    "HIGHER_IS_BETTER",
    "METRICS",
    "SHARES",
    "WHOLE",
    "Record",
    "Sample",
    "UnderBudget",
    "append",
    "read",
    "read_numbered",
    "read_records",
]
