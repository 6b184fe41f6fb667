"""Records survive the way to disk and back.

What is written is whole and says what was not measured.
"""

import csv
import json
import math
import shlex
import socket
import subprocess
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from distlab.report import (
    Record,
    commit,
    environment,
    json_line,
    provenance,
    read_json,
    write_json,
)
from distlab.report.provenance import commit_of
from distlab.report.record import plain, write_csv


def record(variant="bucketed", **metrics):
    return Record(
        "ddp_bench", variant, {"batch": 4, "model": {"layers": 2}}, metrics, {"torch": "2"}, None
    )


def test_records_come_back_as_they_went(tmp_path):
    path = tmp_path / "records.json"
    elsewhere = Record("ddp_bench", "naive", {}, {"step_p50_ms": 2}, {"torch": "1"}, None)
    records = [record(step_p50_ms=1.5, mfu_pct=None, status="OOM"), elsewhere]
    write_json(records, path)
    assert read_json(path) == records
    assert [entry.name for entry in tmp_path.iterdir()] == ["records.json"]


def test_a_nan_stays_a_nan_and_the_file_stays_json(tmp_path):
    path = tmp_path / "records.json"
    write_json([record(diff=math.nan, low=-math.inf)], path)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    metrics = read_json(path)[0].metrics
    assert math.isnan(metrics["diff"]) and metrics["low"] == -math.inf


def test_values_of_torch_and_numpy_become_plain():
    config = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "sizes": (1, 2)}
    metrics = {"a_ms": numpy.float64(1.5), "n": torch.tensor(3)}
    assert plain(config) == {"dtype": "bfloat16", "device": "cpu", "sizes": [1, 2]}
    assert plain(metrics) == {"a_ms": 1.5, "n": 3}
    assert type(plain(metrics)["a_ms"]) is float


def test_what_a_record_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"metrics\.grad.*Tensor"):
        plain(record(grad=torch.zeros(3)))


def test_csv_has_a_row_per_record_and_empty_cells_for_none(tmp_path):
    path = tmp_path / "records.csv"
    config, metrics = {"batch": 8, "late": 1}, {"x_ms": 2.5, "new_ms": 1}
    second = Record("ddp_bench", 'a "quoted", one', config, metrics, {}, "abc")
    write_csv([record(x_ms=1.5, mfu_pct=None), second], path)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[3:6] == ["config.batch", "config.model.layers", "config.late"]
    assert (
        rows[0]["metrics.x_ms"] == "1.5"
        and rows[0]["metrics.mfu_pct"] == "" == rows[0]["metrics.new_ms"]
    )
    assert rows[1]["variant"] == 'a "quoted", one'


def test_the_json_line_is_one_line_and_always_json():
    line = json_line("ddp_bench", [record(a_ms=math.nan, b_ms=1.0)], "outputs/x", ["WRONG: a"])
    assert "\n" not in line and "NaN" not in line
    assert json.loads(line) == {
        "experiment": "ddp_bench",
        "records": [{"variant": "bucketed", "metrics": {"a_ms": None, "b_ms": 1.0}}],
        "findings": ["WRONG: a"],
        "out": "outputs/x",
    }


def test_environment_names_the_machine_but_neither_host_nor_path():
    found = environment("cpu")
    assert found["torch"] == torch.__version__ and found["cpu_cores"] >= 1 and found["nccl"] is None
    text = json.dumps(found)
    assert socket.gethostname() not in text and '"/' not in text


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True
    )


def test_commit_is_that_of_the_checkout_that_holds_the_code(tmp_path, monkeypatch):
    code = tmp_path / "distlab" / "provenance.py"
    code.parent.mkdir()
    code.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert commit() is None and commit(default="abc") == "abc"  # no repository at all

    git(tmp_path, "init")
    (tmp_path / "other.txt").write_text("")
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "-m", "somebody else's repository")
    assert commit() is None  # an untracked copy of the code: not our checkout

    record = tmp_path / "records" / "x" / "cpu-all.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    git(tmp_path, "add", "distlab", "records")
    git(tmp_path, "commit", "-m", "code")
    clean = commit()
    assert len(clean) == 40
    (tmp_path / "results.json").write_text("")
    record.write_text("measured again")
    # results beside the code do not change what ran, nor records the next one's
    assert commit() == clean
    (tmp_path / "distlab" / "new.py").write_text("")
    assert commit() == f"{clean}-dirty"
    (tmp_path / "distlab" / "new.py").unlink()
    code.write_text("changed")
    assert commit("abc") == f"{clean}-dirty"


def test_a_record_of_when_overhead_was_called_exposed_is_read_with_the_names_of_today(tmp_path):
    old = [
        "uncovered_comm_ms",
        "exposed_uncovered_ms",
        "predicted_exposed_comm_ms",
        "exposed_vs_torch_ddp_low",
    ]
    now = [
        "exposed_ms",
        "overhead_exposed_ms",
        "predicted_overhead_ms",
        "overhead_vs_torch_ddp_low",
    ]
    same = ["exposed_ms", "exposed_all_gather_forward_ms", "step_p50_ms"]
    for before, after in ((old, now), (same, same)):
        write_json(
            [Record("ddp_bench", "fsdp", {}, dict.fromkeys(before, 1.0), {}, None)],
            tmp_path / "old.json",
        )
        assert list(read_json(tmp_path / "old.json")[0].metrics) == after


@pytest.mark.parametrize(
    "started, pasted",
    [
        (
            "python /venv/bin/distlab run ddp_bench --nproc 2 --quick",
            "distlab run ddp_bench --quick",
        ),
        (
            "python -u {root}/launch/__main__.py run ddp_bench --quick",
            "distlab run ddp_bench --quick",
        ),
        ("python -m launch run plan --model /home/me/m.json", "distlab run plan --model …/m.json"),
        ("python {root}/launch/ddp_bench.py --quick", "python launch/ddp_bench.py --quick"),
    ],
)
def test_the_command_of_a_record_can_be_pasted(monkeypatch, started, pasted):
    root = Path(provenance.__file__).resolve().parents[2]
    monkeypatch.setattr(provenance.sys, "orig_argv", started.format(root=root).split())
    assert shlex.split(provenance.command()) == pasted.split()


def test_the_commit_of_a_users_file_is_that_of_its_repository(tmp_path):
    run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    model = tmp_path / "model.py"
    model.write_text("x = 1\n")
    assert commit_of(model) is None  # nothing tracks it
    run(["git", "init", "-q"])
    run(["git", "add", "model.py"])
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    run(["git", *identity, "commit", "-q", "-m", "first"])
    head = run(["git", "rev-parse", "HEAD"]).stdout.decode().strip()
    assert commit_of(model) == head
    model.write_text("x = 2\n")
    assert commit_of(model) == f"{head}-dirty"
