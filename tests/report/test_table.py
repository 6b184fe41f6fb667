"""Tables show what was measured, say what was not, and stay valid in each style."""

import math
from dataclasses import replace

import pytest

from distlab.report import Column, Record, prediction_error
from distlab.report.table import render, render_for_terminal

COLUMNS = [
    Column("variant", "variant"),
    Column("metrics.step_p50_ms", "step p50 (ms)", ".2f"),
    Column("metrics.peak_alloc_bytes", "peak (GiB)", ".1f", scale=2**-30),
    Column("config.batch", "batch"),
]


def record(variant, step, peak=None):
    metrics = {"step_p50_ms": step, "peak_alloc_bytes": peak}
    return Record("e", variant, {"batch": 4}, metrics, {}, None)


def cells(text):
    return [cell.strip() for cell in text.strip().strip("|").split("|")]


def test_numbers_are_formatted_and_gaps_are_said():
    rows = [record("naive", 1.5, 3 * 2**30), record("flat", "OOM"), record("nan", math.nan)]
    lines = render(rows, COLUMNS, "markdown").splitlines()
    assert cells(lines[0]) == ["variant", "step p50 (ms)", "peak (GiB)", "batch"]
    assert [cells(line) for line in lines[2:]] == [
        ["naive", "1.50", "3.0", "4"],
        ["flat", "OOM", "n/a", "4"],
        ["nan", "nan", "n/a", "4"],
    ]


def test_an_absent_metric_is_not_measured():
    assert "n/a" in render([record("naive", 1.0)], [Column("metrics.mfu_pct", "MFU")])


def test_markdown_escapes_what_would_break_the_row():
    text = render(
        [record("a|b\nc*", 1.0)], [*COLUMNS[:1], Column("config.batch", "max |Δ|")], "markdown"
    )
    assert r"a\|b c\*" in text and r"max \|Δ\|" in text
    assert len(text.splitlines()) == 3


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="at least one column"):
        render([], [])
    with pytest.raises(ValueError, match=r"step_p50_ms.*naive"):
        render([record("naive", [1])], COLUMNS)


def test_a_terminal_gets_the_first_columns_and_is_told_of_the_rest():
    short = render_for_terminal([record("naive", 1.5)], COLUMNS)
    assert short == render([record("naive", 1.5)], COLUMNS)  # it fits
    many = [
        *COLUMNS,
        *(Column(f"config.option_{n}", f"a long heading number {n}") for n in range(20)),
    ]
    text = render_for_terminal([record("naive", 1.5)], many, 60)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60 and "1.50" in text and "heading" in lines[1]
    shown = len(lines[-2].split())
    assert shown >= 5 and lines[-1] == f"{len(many) - shown} more columns in the page"


def test_a_long_name_keeps_its_end_and_a_long_sentence_its_beginning():
    names = [f"my_package.my_wrappers_of_this_year:wrapper_{number}" for number in range(2)]
    rows = [record(name, "RuntimeError: the wrapper did not return in 60 s") for name in names]
    text = render_for_terminal(rows, COLUMNS[:2], width=100)
    for number in range(2):
        assert f"_of_this_year:wrapper_{number} " in text
    assert "RuntimeError: the wrapper did not" in text and "in 60 s" not in text


def test_what_is_counted_is_never_shown_as_zero():
    column = Column("metrics.step_p50_ms", "peak GiB", ".2f", scale=2**-30)
    texts = [column.text(record("a", value)) for value in (2.0**29, 2.0**20, 0.0)]
    assert texts == ["0.50", "0.001", "0.00"]


def test_how_far_a_prediction_is_off():
    rows = [record("near", 100.0), record("far", 50.0), record("none", "OOM")]
    rows = [replace(row, metrics=row.metrics | {"predicted_step_ms": 90.0}) for row in rows]
    column = prediction_error("predicted_step_ms", "step_p50_ms")
    assert [column.text(row) for row in rows] == ["-10", "+80", ""]


def test_headings_are_broken_only_as_far_as_the_width_asks():
    columns = [
        Column("variant", "strategy"),
        *(Column("metrics.step_ms", "a heading of words", ".1f") for _ in range(3)),
    ]
    rows = [record("naive", 1.5)]
    wide = render_for_terminal(rows, columns, 100).splitlines()[0]
    assert wide.count("a heading of words") == 3
    lines = render_for_terminal(rows, columns, 50).splitlines()
    assert "more column" not in lines[-1] and max(map(len, lines)) <= 50
    assert lines[2].startswith("---"), "two lines of headings are enough here"
