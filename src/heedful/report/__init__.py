"""What is shown of finished runs: summaries, figures, one page."""

from heedful.records import Record, append_record, read_records
from heedful.report.figures import (
    Exhibit,
    HidingExhibit,
    KernelExhibit,
    MapExhibit,
    MixExhibit,
)
from heedful.report.page import write_report
from heedful.report.summary import Row, configurations, findings, overview, summarise, table

__all__ = [
    "Exhibit",
    "HidingExhibit",
    "KernelExhibit",
    "MapExhibit",
    "MixExhibit",
    "Record",
    "Row",
    "append_record",
    "configurations",
    "findings",
    "overview",
    "read_records",
    "summarise",
    "table",
    "write_report",
]
