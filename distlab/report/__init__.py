"""Results for a reader, made from measurements: records, tables, pictures and a page.

Knows nothing of what was measured.
"""

from distlab.report.charts import (
    Panel,
    Series,
    lines,
    memory_areas,
    overlaid,
    stacked_bars,
    step_bars,
    timeline,
)
from distlab.report.derived import (
    NOISE,
    PEAK,
    TIE,
    Ratio,
    clearly_longer,
    fastest,
    host_bound,
    noise_by_row,
    noise_of,
    prediction_error,
    row_of,
    waiting,
)
from distlab.report.findings import (
    FASTER,
    SLOWER,
    UNCLEAR,
    interval_of,
    verdict_of,
    why_unclear,
    with_interval,
)
from distlab.report.provenance import commit, environment
from distlab.report.record import (
    Metrics,
    Record,
    Records,
    json_line,
    read_json,
    reading,
    write_json,
)
from distlab.report.table import Column, gib_column, grouped, is_number, sparse_column, text_column
from distlab.report.view import View, write

__all__ = [
    "FASTER",
    "NOISE",
    "PEAK",
    "SLOWER",
    "TIE",
    "UNCLEAR",
    "Column",
    "Metrics",
    "Panel",
    "Ratio",
    "Record",
    "Records",
    "Series",
    "View",
    "clearly_longer",
    "commit",
    "environment",
    "fastest",
    "gib_column",
    "grouped",
    "host_bound",
    "interval_of",
    "is_number",
    "json_line",
    "lines",
    "memory_areas",
    "noise_by_row",
    "noise_of",
    "overlaid",
    "prediction_error",
    "read_json",
    "reading",
    "row_of",
    "sparse_column",
    "stacked_bars",
    "step_bars",
    "text_column",
    "timeline",
    "verdict_of",
    "waiting",
    "why_unclear",
    "with_interval",
    "write",
    "write_json",
]
