"""Output of a run in a terminal: headline, short table, findings, and the place of its report."""

import os
import shutil
import stat
import sys
import textwrap
from pathlib import Path

from distlab.report.record import Records, json_line
from distlab.report.table import render_for_terminal
from distlab.report.view import View
from distlab.text import for_terminal

MOST_ROWS = 16  # rows of a table that are printed
WIDTH = 100  # characters of a line, where the terminal is not narrower


def stdout_is_file() -> bool:
    """Return whether stdout is a regular file, which a program may read later.

    A terminal and a pipe are not.
    """
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):
        # stdout is closed, or an object that is not a file has replaced it.
        return False


def width() -> int:
    """Characters of a line on stdout."""
    # A line longer than 100 characters is hard to read, also on a wide terminal.
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def short_table(view: View, records: Records) -> str:
    """Return the table for a terminal: the `terminal` columns that fit, of the first rows."""
    texts = []
    tables = view.tables(records)
    for part, group, columns in tables:
        # The name of the row is always shown, although the view need not list it.
        wanted = [c for c in columns if not view.terminal or c.name in ("variant", *view.terminal)]
        columns = [c for c in wanted if not c.is_empty(group)]
        text = render_for_terminal(group[:MOST_ROWS], columns, width())
        hidden = (
            f"\n{len(group) - MOST_ROWS} more rows in the page" if len(group) > MOST_ROWS else ""
        )
        texts.append((f"{for_terminal(part)}:\n" if len(tables) > 1 else "") + text + hidden)
    return "\n\n".join(texts)


def say_table(view: View, records: Records) -> None:
    """Print the headline and the short table."""
    print(f"{_filled(view.headline_of(records))}\n\n{short_table(view, records)}\n", flush=True)


def say(
    view: View,
    records: Records,
    page: Path,
    *,
    table: bool = True,
    quiet: bool = False,
    line: bool = True,
) -> None:
    """Print the end of a run: headline and short table, findings, report and the line of JSON.

    Args:
        table: True if headline and table are still to be printed.
        quiet: True to print only the line of JSON.
        line: True to print the line of JSON. Without `quiet` it is only printed if stdout is a
            file.
    """
    if table and not quiet:
        say_table(view, records)
    findings = view.findings_of(records)
    if not quiet:
        for finding in findings:
            print(highlighted(finding))
        print(f"report: {page}")
    # A program that reads the file wants the JSON, and a person does not.
    if line and (quiet or stdout_is_file()):
        print(json_line(view.name, records, page.parent, findings), flush=True)


def highlighted(text: str) -> str:
    """Format a finding for a terminal: `WRONG: …` in red, an aside in parentheses in grey."""
    text = _filled(text)
    # 31 is red and 90 grey, among the codes that every terminal knows.
    colour = 31 if text.startswith("WRONG") else 90 if text.startswith("(") else None
    return f"\033[{colour}m{text}\033[0m" if colour and sys.stdout.isatty() else text


def _filled(text: str) -> str:
    # Long words stay whole, since a path that is broken cannot be copied.
    return textwrap.fill(
        for_terminal(text), width(), break_long_words=False, break_on_hyphens=False
    )
