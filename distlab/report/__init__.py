"""From measurements to something a person reads: records, tables, pictures, a page. Knows nothing of what was
measured.
"""

from distlab.report.command import (
    Work,
    add_device_option,
    add_from_option,
    add_output_options,
    device_of,
    progress,
    redraw,
    run_command,
    run_to_end,
)
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
    "Work",
    "add_device_option",
    "add_from_option",
    "add_output_options",
    "commit",
    "device_of",
    "environment",
    "json_line",
    "progress",
    "read_json",
    "reading",
    "redraw",
    "render",
    "render_for_terminal",
    "run_command",
    "run_to_end",
    "say",
    "write",
    "write_csv",
    "write_json",
]
