"""From measurements to something a person reads: records, tables, pictures, a page. Knows nothing of what was
measured.
"""

from distlab.report.output import OutputFolder
from distlab.report.provenance import commit, environment
from distlab.report.record import Record, json_line, read_json, reading, write_csv, write_json
from distlab.report.table import Column, render, render_for_terminal
from distlab.report.view import View, say, write

__all__ = [
    "Column",
    "OutputFolder",
    "Record",
    "View",
    "commit",
    "environment",
    "json_line",
    "read_json",
    "reading",
    "render",
    "render_for_terminal",
    "say",
    "write",
    "write_csv",
    "write_json",
]
