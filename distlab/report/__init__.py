"""From measurements to something a person reads: records, tables, pictures, a page. Knows nothing of what was
measured.
"""

from distlab.report.charts import (
    Panel,
    Series,
    lines,
    measured,
    memory_areas,
    metric_over_length,
    overlaid,
    stacked_bars,
    stream_lanes,
    timeline,
)
from distlab.report.noise import NOISE, TIE, host_bound, interval_ties, noise_by_row, noise_of, tied, waiting
from distlab.report.provenance import commit, environment
from distlab.report.record import Record, json_line, read_json, reading, write_csv, write_json
from distlab.report.style import GREYS, INK, OKABE_ITO, horizontal, picture
from distlab.report.table import Column, grouped, is_number, prediction_error, render, render_for_terminal
from distlab.report.view import View, write

__all__ = [
    "GREYS",
    "INK",
    "NOISE",
    "OKABE_ITO",
    "TIE",
    "Column",
    "Panel",
    "Record",
    "Series",
    "View",
    "commit",
    "environment",
    "grouped",
    "horizontal",
    "host_bound",
    "interval_ties",
    "is_number",
    "json_line",
    "lines",
    "measured",
    "memory_areas",
    "metric_over_length",
    "noise_by_row",
    "noise_of",
    "overlaid",
    "picture",
    "prediction_error",
    "read_json",
    "reading",
    "render",
    "render_for_terminal",
    "stacked_bars",
    "stream_lanes",
    "tied",
    "timeline",
    "waiting",
    "write",
    "write_csv",
    "write_json",
]
