"""How a result is written: one record a run, where and with what it was made, whole files."""

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
