"""`distlab records`: the manifest's commands exist, a record is its run's rows, and no work is done
twice.
"""

import json
import shlex
import tomllib

import pytest

from distlab.options import given
from launch import __main__ as command_line
from launch import records, registry
from launch.__main__ import main
from launch.registry import ROOT, load

SMALL = """
[here]
ranks = 1
[here.predict]
first = { minutes = 1, options = "--preset published" }
long = { minutes = 30, options = "--preset published" }
"""
MACHINES = tuple(tomllib.loads(records.MANIFEST.read_text()))


@pytest.mark.parametrize(
    "case",
    [case for name in MACHINES for case in records.cases(name)],
    ids=lambda c: f"{c.experiment}-{c.run}",
)
def test_a_command_of_the_manifest_is_one(case):
    experiment = load(case.experiment).EXPERIMENT
    args = experiment.parser().parse_args(shlex.split(case.options))
    preset = experiment.preset(getattr(args, "preset", None) or "", on_gpu=case.machine != "cpu")
    experiment.config(**preset | given(experiment.config, args))


def test_every_record_has_the_name_of_a_case_that_renews_it():
    known = {case.run for name in MACHINES for case in records.cases(name)}
    found = {
        path.relative_to(records.MANIFEST.parent).as_posix()
        for path in records.MANIFEST.parent.rglob("*.json")
    }
    assert not {path for path in found if path[:-5].partition("/")[2] not in known}


def test_a_record_is_measured_once_per_commit_and_within_the_minutes(tmp_path, monkeypatch, capsys):
    manifest = tmp_path / "manifest.toml"
    manifest.write_text(SMALL)
    monkeypatch.setattr(records, "MANIFEST", manifest)
    monkeypatch.setattr(records, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(
        records, "cases", lambda machine, known=records.cases: known(machine, manifest)
    )
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
    said = capsys.readouterr().err
    assert "left: predict/here-long, 30 minutes" in said
    record = tmp_path / "predict" / "here-first.json"
    assert json.loads(record.read_text())["headers"][0]["commit"] == "a" * 40
    made = record.stat().st_mtime_ns
    assert main(command) == 0 and record.stat().st_mtime_ns == made
    assert "here-first" not in capsys.readouterr().err
    command[4] = "b" * 40  # a later commit's run does not go on with that of an earlier one
    assert main(command) == 0
    assert json.loads(record.read_text())["headers"][0]["commit"] == "b" * 40


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


def test_a_page_shows_no_record_of_uncommitted_code(monkeypatch, tmp_path, capsys):
    saved = json.loads((ROOT / "records/ddp_bench/cpu-host.json").read_text())
    saved["headers"][0]["commit"] += "-dirty"
    (tmp_path / "docs").mkdir()
    (tmp_path / "mine.json").write_text(json.dumps(saved))
    (tmp_path / "README.md").write_text("<!-- table mine.json -->\nOld.\n<!-- end table -->\n")
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    assert main(["tables"]) == 2
    said = capsys.readouterr().err
    assert "mine.json is of code that was never committed" in said and "distlab records" in said
    assert "Old." in (tmp_path / "README.md").read_text()
    (tmp_path / "mine.json").write_text(json.dumps(saved).replace("-dirty", ""))
    assert main(["tables"]) == 0 and "Old." not in (tmp_path / "README.md").read_text()


def test_a_package_says_that_it_is_no_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    for command in ("tables", "records --machine cpu"):
        assert (
            main(command.split()) == 2
            and "needs a clone of the repository" in capsys.readouterr().err
        )
