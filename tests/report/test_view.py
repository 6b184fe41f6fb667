"""A run's folder: report.html in a real browser, tables in every form, `--from`, and machines that
are not mixed.
"""

import dataclasses
import json
import math
import os
import pty
import re
import sys

import pytest

from distlab.report import Column, Record, View, read_json, write
from distlab.report.charts import stacked_bars
from distlab.report.page import _parts, _setup
from distlab.report.table import by_machine
from distlab.report.terminal import say
from distlab.report.view import headline_from
from launch import __main__ as command
from tests.report.browser import chromium, visit

MACHINE = {
    "device_name": "NVIDIA H200",
    "torch": "2.11",
    "cpu_cores": 2,
    "command": "python launch/x.py --quick",
}
COLUMNS = [Column("variant", "variant"), Column("metrics.step_p50_ms", "step ms", ".1f")]


def record(variant, step_ms, machine=MACHINE, **metrics):
    metrics = {"step_p50_ms": step_ms} | metrics
    return Record(
        "bench",
        variant,
        {"batch": 4, "world_size": 2, "backend": "nccl"},
        metrics,
        machine,
        "abc123",
    )


def draw(records, path):
    labels = [r.variant for r in records]
    stacked_bars(
        path, labels, {"compute": [r.metrics["step_p50_ms"] for r in records]}, title="t", unit="ms"
    )


def headline(records):
    return f"batch 4 on <b>{records[0].environment['device_name']}</b>"


VIEW = View(
    name="bench",
    question="What does it cost?",
    columns=COLUMNS,
    headline=headline,
    reading="First this.\n\nThen that.",
    pictures={"step_time.png": draw},
    findings=lambda records: [f"{len(records)} rows"],
)
RECORDS = [
    record(
        "naive",
        100.5,
        predicted_step_ms=110.55,
        step_p20_ms=90.0,
        step_p80_ms=110.0,
        noise_floor_pct=3.0,
    ),
    record(
        "flat",
        20.25,
        predicted_step_ms=20.25,
        step_p20_ms=20.0,
        step_p80_ms=21.0,
        noise_floor_pct=5.0,
    ),
    record("bucketed", "OOM"),
    record("zero1", 9.0),
    record("broken <i>", math.nan),
]


# Each heading is pressed twice; the picture has a width only once it was decoded; nothing else was
# fetched.
PRESS = """
[...document.querySelectorAll("table")[0].tHead.rows[0].cells].map(heading => [1, 2].map(() => {
  heading.querySelector("button").click();
  const rows = [...document.querySelectorAll("table")[0].tBodies[0].rows];
  return [heading.getAttribute("aria-sort"), rows.map(row => row.cells[0].textContent)];
}))"""
LOOK = f"""({{
  sorted: {PRESS},
  pictures: [...document.images].map(image => image.naturalWidth),
  wider: document.documentElement.scrollWidth > innerWidth,
  fetched: performance.getEntriesByType("resource").map(entry => entry.name),
  width: document.querySelector(".scroll").getBoundingClientRect().width,
  paper: getComputedStyle(document.body).backgroundColor,
  headings: [...document.querySelectorAll("h2")].map(heading => heading.textContent),
}})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write(VIEW, RECORDS, tmp_path_factory.mktemp("run"))


@pytest.mark.skipif(
    chromium() is None, reason="needs Chromium, and none of its usual names is on the PATH"
)
def test_the_report_in_a_browser(page):
    seen = visit(page, LOOK)
    assert (seen.problems, seen.console) == ([], [])
    names, steps = seen.answer["sorted"]
    assert names[0] == ["ascending", ["broken <i>", "bucketed", "flat", "naive", "zero1"]]
    assert names[1] == ["descending", ["zero1", "naive", "flat", "bucketed", "broken <i>"]]
    # As numbers (9 before 20), texts behind them in either direction.
    assert steps[0][1][:3] == ["zero1", "flat", "naive"] and steps[1][1][:3] == [
        "naive",
        "flat",
        "zero1",
    ]
    assert {*steps[0][1][3:]} == {*steps[1][1][3:]} == {"bucketed", "broken <i>"}
    assert (
        seen.answer["pictures"] == [1200]
        and not seen.answer["wider"]
        and not seen.answer["fetched"]
    )
    assert seen.answer["width"] > 1100  # of a window of 1200
    assert seen.answer["headings"] == ["Result", "Reading", "Noise", "Set-up", "Files"]
    dark = visit(page, "getComputedStyle(document.body).backgroundColor", dark=True)
    brightness = [
        sum(map(int, re.findall(r"\d+", colour))) for colour in (seen.answer["paper"], dark.answer)
    ]
    assert brightness[0] > 700 and brightness[1] < 100 and not dark.problems


def test_the_page_says_what_was_run_on_what(page):
    text = page.read_text()
    for words in (
        "What does it cost?",
        "2 × NVIDIA H200 (nccl)",
        "abc123",
        "python launch/x.py --quick",
        "5 rows",
        "torch 2.11",
        "First this.",
        "<p>Then that.</p>",
        "noise by row 5.0 to 10.0 %",
    ):
        assert words in text, words
    assert "batch 4 on &lt;b&gt;NVIDIA H200" in text and "<i>" not in text
    outside = re.findall(r"(?:src|href)=\"(?!data:)([^\"]*)\"|url\(|@import", text)
    assert outside == ["records.json", "records.csv", "../../index.html"]
    other = dataclasses.replace(RECORDS[0], config={"batch": 8, "world_size": 2})
    assert _setup("a GPU", [RECORDS[0], other])["options"] == {"world_size": "2"}  # what all have


def test_the_page_leads_with_the_answer_and_to_what_lies_beside_it(tmp_path):
    run, older = tmp_path / "bench" / "mine", tmp_path / "bench" / "mine-old-1"
    for folder in (run, older, run / "parts" / "model"):
        folder.mkdir(parents=True)
        (folder / "report.html").touch()
    (run / "trace_a b_rank0.json.gz").touch()
    about = dataclasses.replace(COLUMNS[1], about="of `distlab` <alone>")
    columns = [COLUMNS[0], about]
    text = write(dataclasses.replace(VIEW, columns=columns), RECORDS, run).read_text()
    parts = ("5 rows", "<img", "<table", "First this.", "abc123", "records.csv")
    order = [text.index(part) for part in parts]
    assert order == sorted(order)
    links = re.findall(r'href="([^"]*(?:trace|parts|mine-old)[^"]*)"', text)
    assert links == [
        "trace_a%20b_rank0.json.gz",
        "parts/model/report.html",
        "../mine-old-1/report.html",
    ]
    assert "ui.perfetto.dev" in text and "<dd>of <code>distlab</code> &lt;alone&gt;</dd>" in text
    assert "Prediction" not in text  # the view has none
    said = dataclasses.replace(VIEW, headline=lambda rows: "quiet: noise by row 5.0 to 10.0 %")
    assert "Noise" not in write(said, RECORDS, run).read_text()  # the headline has it


@pytest.mark.skipif(
    chromium() is None, reason="needs Chromium, and none of its usual names is on the PATH"
)
def test_a_table_of_many_columns_is_not_cut(tmp_path):
    many = [Column(f"metrics.number_{i}", f"figure {i} ms", ",.1f") for i in range(30)]
    rows = [record("a strategy", 1.0, **{f"number_{i}": 12345.6 for i in range(30)})]
    page = write(dataclasses.replace(VIEW, columns=[*COLUMNS, *many]), rows, tmp_path)
    script = """[...document.querySelectorAll(".scroll")].map(each =>
      [each.scrollWidth <= each.clientWidth, each.querySelectorAll("th").length])"""
    assert visit(page, script, width=1400).answer == [[True, 15], [True, 15], [True, 4]]


# Regression: below the first part of a table, rows that differed in dtype and variant had one name.
def test_each_part_of_a_table_names_its_rows():
    values = [Column(f"metrics.m{number}", f"m{number}") for number in range(30)]
    named = [Column("shape", "shape"), Column("dtype", "dtype"), Column("variant", "variant")]
    parts = _parts([*named, *values])
    assert len(parts) == 3 and all(part[:3] == named for part in parts)
    assert [column for part in parts for column in part[3:]] == values
    assert [part[0] for part in _parts(values)] == [values[0]] * len(_parts(values))


def test_saved_records_are_drawn_anew_without_measuring(page, tmp_path, capsys, monkeypatch):
    (page.parent / "timeline.png").write_bytes(
        (page.parent / "step_time.png").read_bytes()
    )  # only the run could
    monkeypatch.setattr(command, "view_of", lambda name: VIEW)
    assert (
        command.main(["show", str(page.parent / "records.json"), "--out", str(tmp_path), "--json"])
        == 0
    )
    (again,) = (tmp_path / "bench").iterdir()
    assert "report.html" in (tmp_path / "index.html").read_text()  # to which the page links
    assert repr(read_json(again / "records.json")) == repr(RECORDS)
    text = (again / "report.html").read_text()
    assert text.count("<img") == 2 and "timeline" in text
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["out"] == str(again)
    with pytest.raises(SystemExit):
        command.main(["show", str(page.parent / "records.json"), "--json", "--table", "text"])
    assert "not allowed with argument" in capsys.readouterr().err
    (page.parent / "timeline.png").unlink()


def test_machines_are_never_mixed(tmp_path):
    other = MACHINE | {"device_name": "AMD EPYC"}
    records = [*RECORDS[:2], record("naive", 300.0, other)]
    text = write(VIEW, records, tmp_path).read_text()
    assert (
        text.count("<img") == 2
        and "step time, AMD EPYC" in text
        and "step time, NVIDIA H200" in text
    )
    assert "2 × AMD EPYC" in text and "| AMD EPYC" in (tmp_path / "table.md").read_text()
    newer = record("naive", 1.0, MACHINE | {"torch": "2.13"})
    assert list(by_machine([*records, newer])) == [
        "NVIDIA H200, torch 2.11",
        "AMD EPYC",
        "NVIDIA H200, torch 2.13",
    ]


def test_a_headline_is_filled_with_environment_configuration_and_what_follows_from_all_records():
    line = headline_from(
        "batch {batch} on {device_name}, {num:M}, {num:N} of {rows}",
        num=lambda rs: 3.21e9,
        rows=len,
    )
    assert (
        line([record("a", 1.0), record("b", 2.0)])
        == "batch 4 on NVIDIA H200, 3,210.0 M, 3.2 B of 2"
    )


@pytest.mark.parametrize("kind, lines_of_json", [("file", 1), ("pipe", 0), ("terminal", 0)])
def test_json_is_printed_where_it_is_kept(tmp_path, monkeypatch, kind, lines_of_json):
    """Without --json, only into a file: a pipe or a terminal is for a person."""
    path = tmp_path / "stdout"
    reader, writer = None, None
    if kind == "pipe":
        reader, writer = os.pipe()
    elif kind == "terminal":
        reader, writer = pty.openpty()
    stdout = open(path if writer is None else writer, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stdout)
    say(VIEW, RECORDS, tmp_path / "report.html")
    monkeypatch.undo()
    stdout.close()
    said = path.read_text() if reader is None else os.read(reader, 100_000).decode()
    assert [line[:1] for line in said.splitlines()].count("{") == lines_of_json
