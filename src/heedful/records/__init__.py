"""How a result is written: one record a run, where and with what it was made, whole files."""

from heedful.records.record import METRICS, Record, append_record, read_numbered, read_records

__all__ = ["METRICS", "Record", "append_record", "read_numbered", "read_records"]
