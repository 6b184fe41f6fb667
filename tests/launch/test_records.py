"""`distlab records`: the manifest's commands exist, a record is its run's rows, and no work is done
twice.
"""

import itertools
import json
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
import torch

from distlab.options import given
from distlab.report import read_json, write_json
from launch import __main__ as command_line
from launch import records, registry
from launch.__main__ import main
from launch.registry import ROOT, load
from tests.runs.cases import MACHINE, record

SMALL = """
[here]
ranks = 1
[here.predict]
first = { minutes = 1, options = "--preset published" }
long = { minutes = 30, options = "--preset published" }
"""
MACHINES = tuple(tomllib.loads(records.MANIFEST.read_text()))
CASES = [*itertools.chain.from_iterable(map(records.cases, MACHINES))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.experiment}-{case.run}")
def test_a_command_of_the_manifest_is_one(case):
    experiment = load(case.experiment).EXPERIMENT
    args = experiment.parser().parse_args(shlex.split(case.options))
    preset = experiment.preset(getattr(args, "preset", None) or "", on_gpu=case.machine != "cpu")
    experiment.config(**preset | given(experiment.config, args))


def test_every_record_is_one_that_a_case_makes_again():
    made = set()
    for case in CASES:
        for view in load(case.experiment).EXPERIMENT.views():
            made.add(f"{view}/{case.run}")
    there = set()
    for path in records.MANIFEST.parent.rglob("*.json"):
        there.add(path.relative_to(records.MANIFEST.parent).with_suffix("").as_posix())
    assert there - made == set()


def has_gpus(monkeypatch, *names):
    """Let this host have GPUs of these names."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])


@pytest.fixture
def small_manifest(tmp_path, monkeypatch):
    manifest = tmp_path / "manifest.toml"
    manifest.write_text(SMALL)
    has_gpus(monkeypatch)
    monkeypatch.setattr(records, "MANIFEST", manifest)
    monkeypatch.setattr(
        records, "cases", lambda machine, known=records.cases: known(machine, manifest)
    )


# Regression: the line said "nothing was saved" of a run that the same command resumes.
def test_a_stop_names_the_folder_from_which_the_same_command_goes_on(
    tmp_path, monkeypatch, capsys, small_manifest
):
    monkeypatch.setattr(records, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # no repository: the commit is the one given
    made = tmp_path / "runs" / ("a" * 40) / "predict"
    code = f"import os, signal; os.makedirs({str(made)!r}); os.kill(os.getppid(), signal.SIGTERM)"
    monkeypatch.setattr(records.Case, "command", lambda case, commit: [sys.executable, "-c", code])
    command = ["records", "--machine", "here", "--commit", "a" * 40, "--into", str(tmp_path)]
    assert main(command) == 128 + signal.SIGTERM
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"saved so far in {tmp_path}/runs/{'a' * 40}: predict; the same command goes on" in line


def test_a_record_is_measured_once_per_commit_and_within_the_minutes(
    tmp_path, monkeypatch, capsys, small_manifest
):
    monkeypatch.setattr(records, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # no repository: the commit is the one given
    command = [
        "records",
        "--machine",
        "here",
        "--commit",
        "a" * 40,
        "--into",
        str(tmp_path),
        "--minutes",
        "5",
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "left: predict/here-long, 30 minutes" in said.err
    assert said.out.endswith("\nNew records: predict/here-first.\n")
    record = tmp_path / "predict" / "here-first.json"
    assert json.loads(record.read_text())["headers"][0]["commit"] == "a" * 40
    made = record.stat().st_mtime_ns
    assert main(command) == 0 and record.stat().st_mtime_ns == made
    said = capsys.readouterr()
    assert "here-first" not in said.err and said.out == ""
    command[4] = "b" * 40  # a later commit's run does not go on with that of an earlier one
    assert main(command) == 0
    assert json.loads(record.read_text())["headers"][0]["commit"] == "b" * 40
    assert capsys.readouterr().out.startswith("Nothing moved beyond noise. Rows compared: ")


def test_a_record_is_not_measured_without_the_packages_that_it_compares_with(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "manifest.toml"
    entry = 'minutes = 1, peers = ["json", "no_such_package"], options = "--preset published"'
    path.write_text(f"[here]\nranks = 1\n[here.predict]\nfirst = {{ {entry} }}\n")
    (case,) = records.cases("here", path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("measured"))
    assert records.measure([case], "a" * 40, tmp_path, records.NO_LIMIT, tmp_path) == (0, [])
    line = "left: predict/here-first: install no_such_package first, which it compares with"
    assert line in capsys.readouterr().err


PACKAGES = {
    "fa4": "flash_attn",
    "liger": "liger_kernel",
    "torchao": "torchao",
    "quack": "quack",
    "cce": "cut_cross_entropy",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.experiment}-{case.run}")
def test_the_manifest_names_the_packages_of_which_a_record_has_rows(case):
    path = records.file_of(case.record, records.MANIFEST.parent)
    # Of some runs only a part is shown, and only its record is kept.
    rows = read_json(path) if path.exists() else []
    measured = set()
    for row in rows:
        if row.metrics.get("status") == "ok" and row.variant in PACKAGES:
            measured.add(PACKAGES[row.variant])
    assert measured <= set(case.peers)


NAMES = [
    "ddp_bench/here-xl-batch2",
    "ddp_bench/here-xl-batch2-sharded",
    "ddp_bench/here-xl-batch2-hybrid",
    "memory_breakdown/here-xl-batch2",
    "memory_breakdown/here-all",
]


@pytest.mark.parametrize(
    "words, indices",
    [
        ([], [0, 1, 2, 3, 4]),
        (["ddp_bench"], [0, 1, 2]),
        (["xl-batch2"], [0, 3]),
        (["ddp_bench/xl-batch2"], [0]),
        (["here-xl-batch2"], [0, 3]),
        (["ddp_bench/here-xl-batch2"], [0]),
        (["xl-batch2-*"], [1, 2]),
        (["ddp_*/xl-batch2"], [0]),
        (["here-*"], [0, 1, 2, 3, 4]),
        (["all", "xl-batch2-hybrid"], [2, 4]),
    ],
)
def test_a_word_names_records_exactly_or_by_a_pattern(words, indices):
    assert records.chosen(NAMES, words, "here") == [NAMES[index] for index in indices]


@pytest.mark.parametrize("word", ["batch2", "xl-batch", "bench/xl-batch2", "xl-*/bench"])
def test_a_part_of_a_name_is_no_name(word):
    with pytest.raises(ValueError, match="is called so; --list names them"):
        records.chosen(NAMES, ["all", word], "here")


def save(folder, name, *rows):
    """Write a record, given its name and its rows."""
    file = records.file_of(name, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(rows, file)


@pytest.fixture
def report_of(tmp_path, capsys, monkeypatch):
    """Return the lines of the report on records that a test saved in `before` and `after`."""
    monkeypatch.setenv("COLUMNS", "200")

    def lines(*names):
        records.say_moved(names, tmp_path / "before", tmp_path / "after")
        found = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 100 for line in found)
        return found

    return lines


def test_the_report_has_a_row_for_each_row_that_moved_beyond_noise(tmp_path, report_of):
    before, after = tmp_path / "before", tmp_path / "after"
    quiet = {"noise_pct": 1.0}
    long = "a row with a name of so many words that no table of 100 columns holds it in one line"
    rows = [("slow", 11.0), ("fast", 9.0), ("still", 10.1), (long, 12.5)]
    save(before, "bench/here-a", *[record(name, 10.0, **quiet) for name, _ in rows])
    save(after, "bench/here-a", *[record(name, ms, **quiet) for name, ms in rows])
    save(before, "rates/here-b", record("a", None, tokens_per_s=1.0e6, **quiet))
    save(after, "rates/here-b", record("a", None, tokens_per_s=1.5e6, **quiet))
    lines = report_of("bench/here-a", "rates/here-b")
    assert lines[0] == "Moved beyond noise: 2 worse, 2 better. Rows compared: 5, in records: 2."
    assert lines[2] == "bench/here-a, step_p50_ms:" and "rates/here-b, tokens_per_s:" in lines
    words = [line.split() for line in lines]
    assert ["slow", "10", "ms", "11", "ms", "+10.0", "1.0", "worse"] in words
    assert ["fast", "10", "ms", "9", "ms", "-10.0", "1.0", "better"] in words
    assert ["a", "1e+06", "/s", "1.5e+06", "/s", "+50.0", "1.0", "better"] in words
    assert not [line for line in words if line[:1] == ["still"]]


def test_the_report_says_that_nothing_moved(tmp_path, report_of):
    save(tmp_path / "before", "bench/here-a", record("a", 10.0, noise_pct=5.0), record("b", 1.0))
    save(tmp_path / "after", "bench/here-a", record("a", 10.9, noise_pct=5.0), record("b", 2.0))
    assert report_of("bench/here-a") == [
        "Nothing moved beyond noise. Rows compared: 1, in records: 1.",
        "",
        "bench/here-a, noise unknown: b.",
    ]


def test_the_report_names_what_cannot_be_compared(tmp_path, report_of):
    before, after = tmp_path / "before", tmp_path / "after"
    row = record("a", 10.0, noise_pct=1.0)
    save(before, "bench/here-options", row)
    save(after, "bench/here-options", record("a", 20.0, config={"batch": 8}))
    save(before, "bench/here-machine", row)
    save(after, "bench/here-machine", record("a", 20.0, machine=MACHINE | {"device_name": "H100"}))
    save(before, "bench/here-metric", record("a", None, other=1.0))
    save(after, "bench/here-metric", row)
    save(after, "bench/here-new", row)
    save(after, "bench/here-newer", row)
    save(before, "bench/here-gone", row)
    save(before, "bench/here-rows", row, record("b", 1.0), record("zero", 0.0))
    save(after, "bench/here-rows", row, record("b", "OOM"), record("zero", 0.0))
    cases = ("options", "machine", "metric", "new", "newer", "gone", "rows")
    sentences = [
        "Nothing moved beyond noise. Rows compared: 2, in records: 1.",
        "",
        "bench/here-options cannot be compared (option batch: 4 → 8).",
        "bench/here-machine cannot be compared (NVIDIA H200, 2 on the host → H100, 2 on the host).",
        "bench/here-metric cannot be compared (the earlier file has no step_p50_ms:",
        "it was written by another version, or measured otherwise).",
        "bench/here-rows, only in the first run: b.",
        "New records: bench/here-new, bench/here-newer.",
        "Records that are gone: bench/here-gone.",
    ]
    lines = report_of(*[f"bench/here-{case}" for case in cases])
    assert " ".join(lines) == " ".join(sentences)


def test_rows_that_all_moved_together_are_the_machine(tmp_path, report_of):
    for folder, ms in (("before", 10.0), ("after", 11.0)):
        rows = [record(name, ms, noise_pct=1.0) for name in ("a", "b", "c")]
        save(tmp_path / folder, "bench/here-a", *rows)
    lines = report_of("bench/here-a")
    assert lines[-2].startswith("bench/here-a: every row moved in one direction, by +10.0 %")


def test_moved_compares_with_a_revision_of_git_and_measures_nothing(
    tmp_path, capsys, monkeypatch, small_manifest
):
    folder = tmp_path / "records"
    save(folder, "predict/here-first", record("a", 10.0, noise_pct=1.0))
    save(folder, "predict/here-gone", record("a", 10.0))
    save(folder, "predict/herex2-first", record("a", 10.0))  # of another machine
    identity = ["-c", "user.name=me", "-c", "user.email=me@here"]
    for words in (["init", "-q"], ["add", "records"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    save(folder, "predict/here-first", record("a", 12.0, noise_pct=1.0))
    records.file_of("predict/here-gone", folder).unlink()
    save(folder, "part/here-first", record("a", 1.0))
    command = ["records", "--machine", "here", "--into", str(folder), "--moved"]
    assert main([*command, "HEAD"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Moved beyond noise: 1 worse, 0 better. Rows compared: 1, in records: 1")
    assert said.endswith(
        "New records: part/here-first.\nRecords that are gone: predict/here-gone.\n"
    )
    assert main([*command, "HEAD", "--only", "gone"]) == 0
    assert "Rows compared: 0" in capsys.readouterr().out
    for revision in ("no-such", "--output=x"):
        assert main([*command[:-1], f"--moved={revision}"]) == 2
        assert f"--moved {revision}: git has no such revision of" in capsys.readouterr().err


def test_a_record_is_chosen_by_the_name_that_the_list_gives(capsys):
    for word in ("ddp_bench/cpu-tiny", "ddp_bench/tiny", "tiny"):
        assert main(["records", "--machine", "cpu", "--list", "--only", word]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("ddp_bench/cpu-tiny ")


@pytest.mark.parametrize(
    "argv, line",
    [
        (
            ["--machine", "h2"],
            "machine 'h2' is unknown; manifest.toml has h200, h100x2, h200x2, h100x4, h200x4, cpu",
        ),
        (
            ["--machine", "h200", "--commit", "b" * 40 + "-dirty"],
            "-dirty: commit first, or --commit SHA",
        ),
        (
            ["--machine", "cpu", "--only", "sabotage", "tinny"],
            "--only tinny: no record of cpu is called so; --list",
        ),
    ],
)
def test_records_of_no_commit_or_machine_are_refused(argv, line, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert main(["records", *argv]) == 2
    assert line in capsys.readouterr().err


# Regression: without a GPU the CPU's preset ran, and its rows replaced the record of the H200.
@pytest.mark.parametrize(
    "machine, names, line",
    [
        ("h200", [], "the records of h200 need 1 × H200, and this host has no GPU"),
        ("h200x2", ["NVIDIA H200"], "h200x2 need 2 × H200, and this host has NVIDIA H200"),
        ("h200", ["NVIDIA H100 80GB HBM3"], "and this host has NVIDIA H100 80GB HBM3"),
        ("h200", ["NVIDIA GH200 480GB"], "and this host has NVIDIA GH200 480GB"),
        ("cpu", ["NVIDIA H200"], "this one has NVIDIA H200: CUDA_VISIBLE_DEVICES= hides it"),
    ],
)
def test_records_of_another_machine_are_refused_before_a_run(
    machine, names, line, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # no repository: the commit is the one given
    monkeypatch.setattr(records, "measure", lambda *_: pytest.fail("a run began"))
    has_gpus(monkeypatch, *names)
    command = ["records", "--machine", machine, "--commit", "b" * 40, "--into", str(tmp_path)]
    assert main(command) == 2
    assert line in capsys.readouterr().err
    assert main([*command[:3], "--list"]) == 0


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_is_itself(machine, monkeypatch):
    with open(records.MANIFEST, "rb") as manifest:
        entry = tomllib.load(manifest)[machine]
    # H200 and H100 in the names that torch gives.
    has_gpus(monkeypatch, *[f"NVIDIA {entry['gpu']}"] * entry["ranks"] if "gpu" in entry else [])
    records.require_machine(machine)
    assert ("gpu" in entry) == (not machine.startswith("cpu"))


def test_a_page_shows_no_record_of_uncommitted_code(monkeypatch, tmp_path, capsys):
    saved = read_json(ROOT / "records/ddp_bench/cpu-host.json")
    (tmp_path / "docs").mkdir()
    uncommitted = [replace(row, commit=f"{row.commit}-dirty") for row in saved]
    write_json(uncommitted, tmp_path / "mine.json")
    (tmp_path / "README.md").write_text("<!-- table mine.json -->\nOld.\n<!-- end table -->\n")
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    assert main(["tables"]) == 2
    said = capsys.readouterr().err
    assert "mine.json is of code that was never committed" in said and "distlab records" in said
    assert "Old." in (tmp_path / "README.md").read_text()
    write_json(saved, tmp_path / "mine.json")
    assert main(["tables"]) == 0 and "Old." not in (tmp_path / "README.md").read_text()


def test_a_package_says_that_it_is_no_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    for command in ("tables", "records --machine cpu"):
        assert (
            main(command.split()) == 2
            and "needs a clone of the repository" in capsys.readouterr().err
        )
