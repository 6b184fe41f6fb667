"""The runs under outputs/: found, listed, and linked."""

import pytest

from distlab import runs
from distlab.kernel_check import Report
from distlab.report import Record, read_json, view, write_json
from launch import kernel_page
from launch import runs as commands
from launch.__main__ import main
from launch.kernel_timing import Timing
from tests.runs.cases import record, saved


def none(record):
    return {}


@pytest.fixture
def two(tmp_path):
    saved(
        tmp_path,
        "20261101-120000",
        record("local", 9.0, date="2026-11-01T12:00:00+00:00"),
        record("bucketed", 10.0),
        record("naive", 12.0),
    )
    saved(
        tmp_path,
        "later",
        record("local", 9.0),
        record("bucketed", 8.0, date="2026-11-02T10:00:00+00:00"),
    )
    return tmp_path


def test_a_line_says_what_a_run_was_about(two):
    lines = runs.listed(runs.files_of([two]), lambda row: {"batch": 1, "dtype": "fp32", "gone": 3})
    newest, older = lines
    assert (
        older["run"].endswith("bench/20261101-120000")
        and older["when (UTC)"] == "2026-11-01 12:00:00"
    )
    assert (newest["result"], older["result"]) == (
        "bucketed 8 ms",
        "bucketed 10 ms",
    )  # local is what one compares with
    assert older["differs from the default"] == "batch 4" and older["machine"] == "2 × H200"
    assert older["commit"] == "abcdef01"


def test_results_of_other_kinds_of_rows():
    assert (
        runs.main_metric([record("a", None, peak_bytes=3, busbw_gb_per_s=1.5)]) == "busbw_gb_per_s"
    )
    assert runs.main_metric([record("a", 2.0, predicted_step_ms=3.0)]) == "step_p50_ms"
    fast = [record("a", None, busbw_gb_per_s=1.5), record("b", None, busbw_gb_per_s=2.5)]
    assert runs.result_of(fast) == "b 2.5 GB/s"
    assert runs.result_of([record("a", 1.0), record("a", 2.0)]) == "2 rows"
    assert runs.result_of([record("a", "OOM")]) == "1 rows without a number"


@pytest.mark.parametrize("columns", [80, 140])
def test_the_command_filters_and_shows_whole_names_in_the_terminals_width(
    two, capsys, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    long = "a-name-of-many-words-that-stays-whole"
    many = [record("bucketed", 8.0, config={f"option_{n}": n for n in range(40)})]
    saved(two, long, *many)
    monkeypatch.setattr(commands, "defaults_of", lambda row: {f"option_{n}": 0 for n in range(40)})
    assert main(["runs", "--out", str(two), "BENCH", long]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"bench/{long}  2026-") and "20261101" not in shown
    assert columns - 16 < max(map(len, shown.split("page:")[0].splitlines())) <= columns
    main(["runs", "--out", str(two), "--since", "2026-11-02"])
    assert "20261101" not in capsys.readouterr().out
    # Another text would be compared as one, and hide every run.
    assert main(["runs", "--out", str(two), "--since", "yesterday"]) == 2
    assert "--since yesterday: give a date such as" in capsys.readouterr().err


def test_committed_records_are_listed_apart_by_names_that_show_takes(two, capsys, monkeypatch):
    main(["runs", "--out", str(two)])
    assert "records/" not in capsys.readouterr().out
    main(["runs", "--out", str(two), "--records", "h200x2-medium-batch8.json"])
    name = "records/ddp_bench/h200x2-medium-batch8.json"
    assert name in capsys.readouterr().out.split()
    monkeypatch.chdir(two)
    assert main(["show", name, "--table", "text"]) == 0


def test_runs_that_failed_or_were_stopped_are_marked(two, capsys):
    stopped = runs.Run(runs.Header("bench", {}, 1, {}, None), two / "bench" / "stopped")
    trained = two / "train" / "short"
    for folder in (stopped.path, trained, two / "train" / "killed"):
        folder.mkdir(parents=True)
    stopped.add("a", {"step_p50_ms": 1.5})
    rows = Record(
        "train",
        "zero1",
        {"steps": 9},
        {"steps": 3, "step_p50_ms": 2.0, "validation_loss": 2.5},
        {},
        None,
    )
    write_json([rows], trained / "records.json")
    (two / "train" / "killed" / "config.json").write_text("{}")
    results = {
        line["run"].split("/")[-1]: line["result"]
        for line in runs.listed(runs.files_of([two]), none)
    }
    assert results["stopped"] == "stopped; a 1.5 ms"
    assert results["short"] == "stopped; zero1 2.5 nats"
    assert results["killed"] == "failed, without a row"
    stopped.complete()
    assert runs.described(stopped.path / "records.json", none)["result"] == "a 1.5 ms"


def test_a_run_that_cannot_be_read_is_listed_as_such(two):
    (two / "bench" / "later" / "records.json").write_text("{")
    assert any(
        line["result"].startswith("cannot be read: ")
        for line in runs.listed(runs.files_of([two]), none)
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


def test_the_index_says_what_the_list_says(two):
    for folder in (two / "bench").iterdir():
        (folder / "report.html").write_text("")
    commands.refresh_index(two)
    page = (two / "index.html").read_text()
    for line in runs.listed(runs.files_of([two]), none):
        about = "; ".join((line["when (UTC)"], line["machine"], line["commit"], line["result"]))
        assert f"report.html</a> {about}</li>" in page


def test_the_list_has_the_result_that_an_experiment_states():
    rows = [
        Record("sabotage", name, {}, {"caught": caught, "final_loss": 1.5}, {}, None)
        for name, caught in (("one", True), ("two", False), ("three", True))
    ]
    assert commands.result_for(rows) == "2 of 3 caught"
    assert commands.result_for([record("a", 2.0)]) == runs.result_of([record("a", 2.0)]) == "a 2 ms"


@pytest.mark.parametrize(
    "status, words", [("ok", ""), ("WRONG after timing: error 1e+00", ", WRONG when timed")]
)
def test_the_list_has_the_verdict_on_a_kernel(status, words, tmp_path):
    report = Report("rms_norm", right=45, refused=5)
    yours = Record("kernel_roofline", "yours", {"label": "64x64"}, {"status": status}, {}, None)
    timing = Timing(records=[yours])
    page = kernel_page.write_page(tmp_path, "mine:norm", "cpu", 0, report, timing)
    saved_rows = read_json(page.with_name("records.json"))
    assert commands.result_for(saved_rows) == f"45 right, 5 refused, 0 wrong{words}"


def shown_records():
    """A committed file of records that can be shown."""
    return str(next((commands.ROOT / "records" / "ddp_bench").glob("*.json")))


def test_a_redrawn_run_is_marked(tmp_path, capsys):
    assert main(["show", shown_records(), "--out", str(tmp_path)]) == 0
    (line,) = runs.listed(runs.files_of([tmp_path]), none)
    assert line["result"].startswith("redrawn; ")


@pytest.mark.parametrize("command", ["show", "compare"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, command, earlier):
    def fails(*arguments):
        raise ValueError("a row cannot be drawn")

    monkeypatch.setattr(view, "write_csv", fails)  # records.json is in the folder by then
    out = tmp_path / "out"
    if earlier:
        (out / "ddp_bench" / "kept").mkdir(parents=True)
        (out / "ddp_bench" / "kept" / "note.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    files = [shown_records()] * (1 if command == "show" else 2)
    assert main([command, *files, "--out", str(out)]) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_defaults_come_from_the_experiment():
    assert commands.defaults_of(record("a", 1.0)) == {}
    found = commands._defaults("ddp_bench", False)
    assert found["size"] == "tiny" and found["bucket_sizes_mb"] == [4.0]


def test_rows_of_something_else(tmp_path):
    with pytest.raises(ValueError, match=r"has no records\.json: give a run"):
        runs.rows_of(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        runs.rows_of(tmp_path / "gone")
    write_json([record("a", 1.0)], tmp_path / "case.json")
    assert runs.rows_of(tmp_path / "case.json") == tmp_path / "case.json"
    (tmp_path / "compare" / "two").mkdir(parents=True)
    write_json([record("a", 1.0)], tmp_path / "compare" / "two" / "records.json")
    assert runs.files_of([tmp_path]) == []
