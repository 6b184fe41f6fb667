"""From measurements to something a person reads: records, tables, pictures. Knows nothing of what was
measured.
"""

from distlab.report.output import OutputFolder
from distlab.report.provenance import commit, environment
from distlab.report.record import Record, json_line, read_json, write_csv, write_json
from distlab.report.table import Column, render

__all__ = [
    "Column",
    "OutputFolder",
    "Record",
    "commit",
    "environment",
    "json_line",
    "read_json",
    "render",
    "write_csv",
    "write_json",
]
