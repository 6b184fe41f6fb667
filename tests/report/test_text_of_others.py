"""Records may come from anywhere: nothing that they hold is obeyed by git, a terminal, Markdown or
a picture.
"""

import dataclasses
import os
import re
import subprocess

import pytest

from distlab.cli_errors import message_of
from distlab.report import (
    Column,
    Panel,
    Record,
    Series,
    View,
    lines,
    provenance,
    read_json,
    write,
    write_json,
)
from distlab.report.table import render, render_for_terminal
from distlab.report.terminal import highlighted, short_table
from distlab.runs import as_text, files_of, listed
from distlab.text import for_markdown, for_terminal
from launch.__main__ import main
from tests.commands import ROOT
from tests.runs.cases import record, saved

EVIL = "a\x1b[31mred\x9b\x07\u202e<script>x</script>[b](http://c)$x_{\u2028z"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]")


@pytest.mark.parametrize(
    "commit", ["--output={}", "-o{}", "HEAD", "main", "abc", "0" * 65, "", "abcdef0\n--output={}"]
)
def test_a_commit_that_is_none_never_reaches_git(monkeypatch, tmp_path, commit):
    monkeypatch.setattr(subprocess, "run", lambda *words, **_: pytest.fail(f"called {words}"))
    assert provenance.date_of_commit(commit.format(tmp_path / "victim")) is None


def test_a_commit_is_handed_to_git_behind_the_end_of_options(monkeypatch):
    asked = []
    monkeypatch.setattr(provenance, "git", lambda folder, *words: asked.append(words))
    provenance.date_of_commit("abcdef0123456789")
    assert asked[0][-3:] == ("--end-of-options", "abcdef0123456789", "--")


def test_a_received_record_overwrites_nothing(tmp_path, capsys):
    victim = tmp_path / "victim.txt"
    victim.write_text("precious\n")
    saved(tmp_path, "from_a_friend", record("a", 1.0, commit=f"--output={victim}"))
    assert main(["runs", "--out", str(tmp_path)]) == 0
    assert victim.read_text() == "precious\n" and "from_a_friend" in capsys.readouterr().out


def test_text_is_shown_and_not_obeyed():
    assert for_terminal("2 × H200, 95 % µs\n\tnext") == "2 × H200, 95 % µs\n\tnext"
    assert for_terminal("\x1b[2J\x9b\ud800\u202e") == r"\x1b[2J\x9b\ud800\u202e"
    assert for_markdown("a <b> `c` [d](e)\n| *f* \\") == r"a \<b> \`c\` [d\](e) \| \*f\* \\"


def odd_record():
    where = {"device_name": EVIL, "torch": "2"}
    return Record("bench", EVIL, {"part": EVIL}, {"step_p50_ms": 1.0}, where, EVIL)


def view(**more):
    return View(
        [Column("variant", "row"), Column("config.part", "part"), Column("commit", "commit")],
        headline=lambda records: records[0].environment["device_name"],
        reading="",
        findings=lambda records: [records[0].variant],
        name="bench",
        question="?",
        **more,
    )


def test_whatever_shows_a_record_shows_escapes(tmp_path):
    rows = [odd_record(), dataclasses.replace(odd_record(), config={"part": "other" + EVIL})]
    parted = view(parted_by="config.part")
    shown = [
        render(rows, view().columns),
        render_for_terminal(rows, view().columns),
        short_table(parted, rows),
        parted.table(rows),
        highlighted(EVIL),
        as_text([{"run": EVIL, "when (UTC)": EVIL, "result": EVIL, "machine": EVIL}], 80),
        message_of(ValueError(EVIL)),
        message_of(OSError(2, "No such file", EVIL)),
    ]
    for text in shown:
        assert not UNSAFE.search(text) and r"\x1b" in text, text
    write(parted, rows, tmp_path)
    markdown = (tmp_path / "table.md").read_text()
    assert not UNSAFE.search(markdown) and not re.search(r"(?<!\\)(<|\]\()", markdown)


def test_names_in_pictures_are_no_formulas(tmp_path, recwarn):
    panel = Panel("y $x_{", "x $", "y", [Series(EVIL, [1, 2], [1.0, 2.0])])
    lines(tmp_path / "a.png", [panel], title=EVIL)
    assert (tmp_path / "a.png").is_file() and not [
        each for each in recwarn if "Glyph" in str(each.message)
    ]


def nested(depth):
    found = [1]
    for _ in range(depth):
        found = [found]
    return found


ODD_TRAININGS = {
    "no_steps": ({"steps": 3}, {"final_loss": 1.0}),
    "steps_in_words": ({"steps": 3}, {"steps": "3"}),
    "steps_in_a_list": ({"steps": [3]}, {"steps": 3, "final_loss": 1.0}),
    "huge": ({"steps": 3}, {"steps": 3, "final_loss": 10**400}),
    "half_a_pair": ({"steps": 3, "name": "\ud800"}, {"steps": 3, "final_loss": 1.0}),
}


def test_one_odd_run_is_a_line_with_its_file_and_its_reason(tmp_path, capsys):
    saved(tmp_path, "good", record("a", 1.0))
    for name, (config, metrics) in ODD_TRAININGS.items():
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        write_json([Record("train", "v", config, metrics, {}, None)], folder / "records.json")
    (tmp_path / "bench" / "pipe").mkdir()
    os.mkfifo(tmp_path / "bench" / "pipe" / "records.json")  # would be waited for
    (tmp_path / "bench" / "header").mkdir()
    write_json([record("a", 1.0)], tmp_path / "bench" / "header" / "records.json")
    (tmp_path / "bench" / "header" / "run.json").write_text("[]")
    (tmp_path / "bench" / "deep").mkdir()
    (tmp_path / "bench" / "deep" / "records.json").write_text('{"a":' + "[" * 990 + "]" * 990 + "}")
    results = {
        row["run"].split("/")[-1]: row["result"]
        for row in listed(files_of([tmp_path]), lambda row: {})
    }
    assert results.pop("good") == "a 1 ms"
    assert set(results) == {*ODD_TRAININGS, "pipe", "header", "deep"}
    for name, result in results.items():
        assert result.startswith("cannot be read: ") and f"/{name}/" in result, result
    assert main(["runs", "--out", str(tmp_path)]) == 0
    assert "good" in capsys.readouterr().out


def test_a_date_that_is_none_is_the_files_time(tmp_path):
    saved(tmp_path, "odd", record("a", 1.0, date={"year": 2026}))
    saved(tmp_path, "words", record("a", 1.0, date="zzz"))
    for row in listed(files_of([tmp_path]), lambda row: {}):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row["when (UTC)"])


ODD_ROWS = {
    "zero_samples": {"step_samples_ms": [0.0] * 10},
    "nan_samples": {"step_samples_ms": [float("nan")] * 10},
    "words": {"step_samples_ms": "not a list of numbers"},
    "list": {"exposed_ms": [1, 2]},
    "dictionary": {"comm_ms": {"a": 1}},
    "huge": {"exposed_ms": 10**400},
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_an_odd_row_is_refused_with_its_files_name(tmp_path, capsys, name):
    good = read_json(ROOT / "records/ddp_bench/h200x2-large-compiled.json")
    path = tmp_path / f"{name}.json"
    write_json(
        [dataclasses.replace(row, metrics=row.metrics | ODD_ROWS[name]) for row in good], path
    )
    assert main(["show", str(path), "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{name}.json" in line


def test_a_row_of_0_ms_is_shown(tmp_path, capsys):
    """It divided by zero."""
    good = read_json(ROOT / "records/ddp_bench/h200x2-large-compiled.json")
    zero = {"step_p50_ms": 0.0, "step_samples_ms": None}
    write_json(
        [dataclasses.replace(row, metrics=row.metrics | zero) for row in good],
        tmp_path / "zero.json",
    )
    assert main(["show", str(tmp_path / "zero.json"), "--out", str(tmp_path)]) == 0
    assert "bucketed" in capsys.readouterr().out


def test_a_folder_whose_name_is_no_text_is_in_the_index(tmp_path, capsys):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/bench/bad\xff\x1b[31m")
    os.makedirs(folder)
    write_json([record("a", 1.0)], folder + "/records.json")
    with open(folder + "/report.html", "w"):
        pass
    assert main(["runs", "--out", str(tmp_path)]) == 0
    assert "bench/bad%FF%1B" in (tmp_path / "index.html").read_text()
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["1", "2", "5"])
def test_a_terminal_of_one_column_gets_a_list(tmp_path, capsys, monkeypatch, columns):
    saved(tmp_path, "good", record("a", 1.0))
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["runs", "--out", str(tmp_path)]) == 0
    assert "good" in capsys.readouterr().out
