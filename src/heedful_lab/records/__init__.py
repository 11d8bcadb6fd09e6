"""Records of results: one a run, with its provenance, in whole files."""

from heedful_lab.records.record import (
    HIGHER_IS_BETTER,
    METRICS,
    SHARES,
    Record,
    append_record,
    read_numbered,
    read_records,
)

__all__ = [
    "HIGHER_IS_BETTER",
    "METRICS",
    "SHARES",
    "Record",
    "append_record",
    "read_numbered",
    "read_records",
]
