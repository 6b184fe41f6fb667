"""The runs under outputs/: found, listed, and in an index that runs ending at the same time leave whole."""

import json
import multiprocessing

import pytest

from distlab.notebook import runs
from distlab.report import write_json
from launch import notebook
from launch.__main__ import main
from tests.notebook.cases import record, saved
from tests.report.browser import chromium, visit


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


def test_the_index_reads_again_only_what_changed(two, monkeypatch):
    runs.write_index(two, none)
    read, original = [], runs.read_json
    monkeypatch.setattr(runs, "read_json", lambda path: read.append(path) or original(path))
    saved(two, "new", record("naive", 1.0))
    runs.write_index(two, none)
    assert [path.parent.name for path in read] == ["new"]
    (two / runs.CACHE).write_text("broken")
    assert "naive 1 ms" in runs.write_index(two, none).read_text()


def test_a_run_that_ends_while_the_index_is_written_is_in_it(two, monkeypatch):
    """The one that writes last may have looked first."""
    original, late = runs.rendered, []

    def rendered(*args, **values):
        if (
            not late
        ):  # another process ends a run, and writes the index, between this one's look and its writing
            late.append(saved(two, "late", record("naive", 1.0)))
            runs.write_index(two, none)
        return original(*args, **values)

    monkeypatch.setattr(runs, "rendered", rendered)
    assert "bench/late" in runs.write_index(two, none).read_text()


def test_many_runs_that_end_at_once(tmp_path):
    def end(number):
        saved(tmp_path, f"run{number}", record("naive", 1.0))
        runs.write_index(tmp_path, none)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=end, args=(number,)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    text = (tmp_path / "index.html").read_text()
    assert all(f"bench/run{number}<" in text for number in range(6))
    json.loads((tmp_path / runs.CACHE).read_text())


def test_an_index_that_cannot_be_made_does_not_fail_the_run(tmp_path, capsys):
    (tmp_path / "index.html").mkdir()
    notebook.refresh_index(tmp_path)
    assert "index.html could not be made" in capsys.readouterr().err


@pytest.mark.skipif(chromium() is None, reason="needs Chromium, and none of its usual names is on the PATH")
def test_the_index_in_a_browser(two):
    from distlab.report.charts import stacked_bars

    folder = two / "bench" / "later"
    stacked_bars(folder / "a picture.png", ["a"], {"compute": [1.0]}, title="t", unit="ms")
    (folder / "report.html").write_text("<title>t</title>")
    page = runs.write_index(two, none)
    seen = visit(
        page,
        """(() => {
      const rows = () => [...document.querySelector("table").tBodies[0].rows];
      const address = document.querySelector("td a").getAttribute("href");
      const width = document.images[0].naturalWidth;
      [...document.querySelectorAll("th button")].at(-1).click();
      const sorted = rows().map(row => row.cells[2].textContent);
      const input = document.querySelector("input");
      input.value = "LATER"; input.dispatchEvent(new Event("input"));
      return {address, width, sorted, left: rows().filter(row => !row.hidden).length};
    })()""",
    )
    assert (seen.problems, seen.console) == ([], [])
    assert seen.answer == {
        "address": "bench/later/report.html",
        "width": 1200,
        "left": 1,
        "sorted": ["bench/later", "bench/20261101-120000"],
    }


def test_defaults_come_from_the_experiment():
    assert notebook.defaults_of(record("a", 1.0)) == {}
    found = notebook._defaults("ddp_bench", False)
    assert found["size"] == "tiny" and found["bucket_sizes_mb"] == [4.0]


def test_rows_of_something_else(tmp_path):
    with pytest.raises(ValueError, match=r"has no records\.json: give the folder of a run"):
        runs.rows_of(tmp_path)
    with pytest.raises(ValueError, match="is no folder and no file"):
        runs.rows_of(tmp_path / "gone")
    write_json([record("a", 1.0)], tmp_path / "case.json")
    assert runs.rows_of(tmp_path / "case.json") == tmp_path / "case.json"
