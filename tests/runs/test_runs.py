"""The runs under outputs/: found, listed, and linked."""

import pytest

from distlab import runs
from distlab.report import write_json
from launch import runs as commands
from launch.__main__ import main
from tests.runs.cases import record, saved


def none(record):
    return {}


@pytest.fixture
def two(tmp_path):
    saved(tmp_path, "20261101-120000", record("local", 9.0), record("bucketed", 10.0), record("naive", 12.0))
    saved(tmp_path, "later", record("local", 9.0), record("bucketed", 8.0, date="2026-11-02T10:00:00+00:00"))
    return tmp_path


def test_a_line_says_what_a_run_was_about(two):
    lines = runs.listed(runs.files_of([two]), lambda row: {"batch": 1, "dtype": "fp32", "gone": 3})
    newest, older = lines
    assert older["run"].endswith("bench/20261101-120000") and older["when (UTC)"] == "2026-11-01 12:00:00"
    assert (newest["result"], older["result"]) == (
        "bucketed 8 ms",
        "bucketed 10 ms",
    )  # local is what one compares with
    assert older["differs from the default"] == "batch 4" and older["machine"] == "2 × H200"
    assert older["commit"] == "abcdef01"


def test_results_of_other_kinds_of_rows():
    assert runs.main_metric([record("a", None, peak_bytes=3, busbw_gb_per_s=1.5)]) == "busbw_gb_per_s"
    assert runs.main_metric([record("a", 2.0, predicted_step_ms=3.0)]) == "step_p50_ms"
    fast = [record("a", None, busbw_gb_per_s=1.5), record("b", None, busbw_gb_per_s=2.5)]
    assert runs.result_of(fast) == "b 2.5 GB/s"
    assert runs.result_of([record("a", 1.0), record("a", 2.0)]) == "2 rows"
    assert runs.result_of([record("a", "OOM")]) == "1 rows without a number"


def test_the_command_filters_and_shows_at_most_a_hundred_columns(two, capsys):
    assert main(["runs", "--outputs-only", "--out", str(two), "BENCH", "later"]) == 0
    shown = capsys.readouterr().out
    assert "bench/ later" in shown and "20261101" not in shown
    assert max(map(len, shown.split("page:")[0].splitlines())) <= 100
    main(["runs", "--outputs-only", "--out", str(two), "--since", "2026-11-02"])
    assert "20261101" not in capsys.readouterr().out
    main(["runs", "--outputs-only", "--out", str(two), "nothing of the kind"])
    assert capsys.readouterr().out.startswith("no runs with nothing of the kind")


def test_a_run_that_cannot_be_read_is_listed_as_such(two):
    (two / "bench" / "later" / "records.json").write_text("{")
    assert any(
        line["result"].startswith("cannot be read: ") for line in runs.listed(runs.files_of([two]), none)
    )


def test_the_index_links_the_page_of_every_run(two):
    (two / "bench" / "later" / "report.html").write_text("")
    (two / "bench" / "a & b").mkdir()
    (two / "bench" / "a & b" / "report.html").write_text("")
    links = runs.write_index(two).read_text().splitlines()[3:-1]
    assert links[::-1] == [
        '<li><a href="bench/later/report.html">bench/later/report.html</a></li>',
        '<li><a href="bench/a%20%26%20b/report.html">bench/a &amp; b/report.html</a></li>',
    ]


def test_an_index_that_cannot_be_made_does_not_fail_the_run(tmp_path, capsys):
    (tmp_path / "index.html").mkdir()
    commands.refresh_index(tmp_path)
    assert "index.html could not be made" in capsys.readouterr().err


def test_defaults_come_from_the_experiment():
    assert commands.defaults_of(record("a", 1.0)) == {}
    found = commands._defaults("ddp_bench", False)
    assert found["size"] == "tiny" and found["bucket_sizes_mb"] == [4.0]


def test_rows_of_something_else(tmp_path):
    with pytest.raises(ValueError, match=r"has no records\.json: give the folder of a run"):
        runs.rows_of(tmp_path)
    with pytest.raises(ValueError, match="is no folder and no file"):
        runs.rows_of(tmp_path / "gone")
    write_json([record("a", 1.0)], tmp_path / "case.json")
    assert runs.rows_of(tmp_path / "case.json") == tmp_path / "case.json"
    (tmp_path / "compare" / "two").mkdir(parents=True)
    write_json([record("a", 1.0)], tmp_path / "compare" / "two" / "records.json")
    assert runs.files_of([tmp_path]) == []
