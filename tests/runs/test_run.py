"""A run's folder fails early and clearly.

One writer, whole files, and what is complete is not measured again.
"""

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from distlab.checkpoint.lock import RunLock
from distlab.cli_errors import until_stopped
from distlab.experiment import (
    Experiment,
    Options,
    View,
    headline_from,
    lone_context,
    option,
)
from distlab.files import digest_of
from distlab.report import Column, read_json
from distlab.report.record import FORMAT
from distlab.runs import Header, make_folder, open_run


def test_each_run_gets_its_own_folder(tmp_path):
    folders = [make_folder(tmp_path, "ddp_bench") for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(re.fullmatch(r"\d{8}-\d{6}(-\d+)?", folder.name) for folder in folders)
    assert all(
        folder.parent == tmp_path / "ddp_bench" and not list(folder.iterdir()) for folder in folders
    )


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.ddp_bench.*--out"):
        make_folder(tmp_path / "file", "ddp_bench")


@pytest.mark.parametrize(
    "experiment, stamp", [("", None), ("..", None), ("a", "x/y"), ("a", "x\ny")]
)
def test_names_that_leave_the_folder_are_refused(tmp_path, experiment, stamp):
    with pytest.raises(ValueError, match="cannot name a folder"):
        make_folder(tmp_path, experiment, stamp)


# -- a run's files say that they are whole ---------------------------------------------------------


HEADER = Header("bench", {"batch": 4}, 1, {"device_name": "a CPU"}, "abc")


def saved(out):
    """The folder of a run with two rows."""
    folder = make_folder(out, "bench", "run")
    run = open_run(HEADER, folder)
    run.add("one", {"step_p50_ms": 1.5})
    run.add("two", {"step_p50_ms": float("nan")})
    assert [record.variant for record in open_run(HEADER, folder).records] == ["one", "two"]
    return folder


def sealed(change):
    """A change to a JSON object, with a checksum that fits."""

    def changed(text):
        body = change(json.loads(text))
        if isinstance(body, dict):
            body["digest"] = digest_of(body)
        return json.dumps(body).encode()

    return changed


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "nested": lambda text: b"[" * 100_000,
    "edited": lambda text: text.replace(b"1.5", b"1.25").replace(b"batch", b"catch"),
    "replaced": lambda text: b"7",
    "without checksum": lambda text: text.replace(b'"digest"', b'"digits"'),
    "another object": sealed(lambda body: {"format": FORMAT, "records": [[]], "headers": []}),
    "a kind": sealed(lambda body: {name: 7 for name in body}),
    "of another run": sealed(lambda body: json.loads(json.dumps(body).replace("bench", "sweep"))),
    "of another commit": sealed(lambda body: json.loads(json.dumps(body).replace("abc", "abd"))),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "records.json"])
def test_a_run_whose_files_were_changed_is_refused_by_the_file_s_name(tmp_path, name, damage):
    file = saved(tmp_path) / name
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(ValueError) as caught:
        open_run(HEADER, file.parent)
    message = str(caught.value)
    named = name in message or (name == "run.json" and "holds another run: " in message)
    assert named and "\n" not in message and len(message) < 400, message
    if name == "records.json" and not damage.startswith("of another"):  # nor is it shown
        with pytest.raises(ValueError, match=r"records\.json"):
            read_json(file)


def test_records_without_a_checksum_are_read_as_before(tmp_path):
    body = json.loads((saved(tmp_path) / "records.json").read_text())
    del body["digest"]
    (tmp_path / "old.json").write_text(json.dumps(body | {"format": "distlab-run-2"}))
    assert read_json(tmp_path / "old.json")[0].metrics == {"step_p50_ms": 1.5}
    every = sorted((Path(__file__).parents[2] / "records").glob("*/*.json"))
    assert every and all(map(read_json, every))


# -- one run of a name -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Config(Options):
    batch: int = option(4, "sequences")


def measure(config, context, run):
    if config.batch < 0:
        raise ValueError("no batch")
    run.cut_off = config.batch == 0
    for variant in ("one", "two"):
        if config.batch != 9 and run.done(variant):
            continue
        if config.batch in (7, 9) and run.records:
            os.kill(os.getpid(), signal.SIGINT)
        run.add(variant, {"step_p50_ms": 1.0})


VIEW = View(
    [Column("variant", "variant")],
    headline_from("bench"),
    name="bench",
    question="What?",
    reading="So.",
)
BENCH = Experiment(Config, measure, VIEW, ranks="one")


def command(out, *options):
    config, frame = BENCH.chosen(
        BENCH.parser().parse_args(["--device=cpu", f"--out={out}", *options])
    )
    return until_stopped("bench", lambda: BENCH.run(config, lone_context("cpu"), frame))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_second_run_of_a_name_is_refused_and_changes_nothing(tmp_path):
    folder = saved(tmp_path)
    first = RunLock(folder)
    assert first.try_take()
    before = contents(folder)
    for options in ([], ["--fresh"], ["--batch=5"]):
        with pytest.raises(
            ValueError,
            match=r"run is being written by another run \(process \d+ on .*another --name",
        ):
            command(tmp_path, "--name=run", *options)
    assert contents(folder) == before and [path.name for path in folder.parent.iterdir()] == ["run"]
    first.check()
    first.release()


def test_a_complete_run_is_measured_again_only_where_that_is_asked_for(tmp_path, capsys):
    folder = tmp_path / "bench" / "run"
    assert command(tmp_path, "--name=run") == 0
    before = contents(folder)
    assert {"run.json", "records.json", "report.html"} <= before.keys() and "run.lock" not in before
    capsys.readouterr()
    assert command(tmp_path, "--name=run") == 0
    said = capsys.readouterr()
    assert re.search(
        r"this run is complete, since 2\d{3}-.* UTC \(.*bench/run\)\. --fresh measures it again",
        said.err,
    )
    assert said.out == "" and contents(folder) == before
    # A program that asks for JSON gets that of the saved rows.
    assert command(tmp_path, "--name=run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(folder)
    assert contents(folder) == before
    assert command(tmp_path, "--name=run", "--fresh") == 0
    assert contents(folder).keys() == before.keys()
    assert {
        name: text
        for name, text in contents(folder.with_name("run-old-1")).items()
        if name in before
    } == before


def test_a_page_that_cannot_be_written_does_not_hide_what_was_measured(
    tmp_path, capsys, monkeypatch
):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("distlab.experiment.write", full)
    with pytest.raises(OSError, match="No space left"):
        command(tmp_path, "--name=run")
    assert "variant" in capsys.readouterr().out


def test_a_run_that_left_rows_to_the_next_call_is_not_complete(tmp_path, capsys):
    for _ in range(2):
        assert command(tmp_path, "--name=run", "--batch=0") == 0
        assert "complete" not in capsys.readouterr().err


def test_a_refused_run_leaves_no_folder(tmp_path):
    for options in (["--name=run"], []):
        with pytest.raises(ValueError, match="no batch"):
            command(tmp_path, *options, "--batch=-1")
    assert list((tmp_path / "bench").iterdir()) == []


def test_a_stopped_run_promises_to_go_on_where_rows_are_saved(tmp_path, capsys):
    """And where the experiment asks for them: one that did not said so too, and began with its
    first row.
    """
    ends = {
        7: "run.json; the same command with --name run-7 continues\n",
        9: "records.json, run.json\n",
    }
    for batch, end in ends.items():
        assert command(tmp_path, f"--name=run-{batch}", f"--batch={batch}") == 130
        line = capsys.readouterr().err
        assert line.endswith(end) and "saved so far in" in line
