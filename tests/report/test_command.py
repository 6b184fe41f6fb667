"""What every command of one process does around its work."""

from argparse import Namespace

import pytest

from distlab.report import Record, View, run_command
from distlab.report.table import Column

VIEW = View(name="asked", question="What?", columns=[Column("variant", "variant")], headline=lambda records: "here",
            reading="")  # fmt: skip
RECORDS = [Record("asked", "one", {}, {"time_p50_ms": 1.0}, {}, "unknown")]


def refuse(*_):
    raise ValueError("--size 0: at least one")


def command(tmp_path, prepare, **options):
    return run_command(VIEW, Namespace(source=None, out=str(tmp_path / "out"), stamp="run"), prepare, **options)


def test_a_run_leaves_its_report_and_says_where(tmp_path, capsys):
    assert command(tmp_path, lambda: lambda folder: RECORDS) == 0
    assert (tmp_path / "out" / "asked" / "run" / "report.html").exists()
    out = capsys.readouterr().out
    assert "report.html" in out and out.splitlines()[-1].startswith('{"experiment"')


def test_a_run_that_did_not_pass_is_shown_and_ends_with_one(tmp_path, capsys):
    assert command(tmp_path, lambda: lambda folder: RECORDS, passed=lambda records: len(records) > 1) == 1
    assert "report.html" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["options", "work"])
def test_a_users_mistake_is_one_line(tmp_path, capsys, where):
    assert command(tmp_path, refuse if where == "options" else lambda: refuse) == 2
    assert capsys.readouterr().err == "asked: error: --size 0: at least one\n"
    assert (where == "options") is not (tmp_path / "out").exists()  # wrong options leave no folder


def test_another_mistake_keeps_its_traceback(tmp_path):
    with pytest.raises(KeyError):
        command(tmp_path, lambda: lambda folder: {}["missing"])
