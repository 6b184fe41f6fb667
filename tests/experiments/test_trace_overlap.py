"""The account of a trace, on two recorded ones (a small model on two gloo ranks, torch 2.13) and on what is none."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from distlab.measure.trace.capture import load_trace_and_origin
from experiments import trace_overlap
from experiments.trace_overlap import EXPERIMENT, TraceConfig
from launch.__main__ import main
from tests.experiments.frame import measured, refused

TRACES = Path(__file__).parents[1] / "measure" / "traces"
BUCKETED = TRACES / "trace_bucketed_rank0.json.gz"


def test_recorded_traces_step_by_step(tmp_path, capsys):
    assert main(["run", "trace_overlap", str(TRACES), "--out", str(tmp_path)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {}
    for row in line["records"]:
        rows.setdefault(row["variant"], []).append(row["metrics"])
    assert {name: len(steps) for name, steps in rows.items()} == {"bucketed": 2, "local": 2}
    first = rows["bucketed"][0]
    expected = {
        "step_ms": 4.444,
        "compute_ms": 1.311,
        "comm_ms": 2.658,
        "exposed_ms": 2.127,
        "idle_ms": 1.006,
    }
    assert {name: first[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    assert first["overlap_pct"] == pytest.approx(100 * (1 - 2.1265 / 2.6581), abs=0.01)
    assert min(abs(metrics["overhead_ms"]) for metrics in rows["local"]) == 0  # its median step against itself
    assert load_trace_and_origin(BUCKETED)[1] == {"rank": 0, "world_size": 2, "backend": "gloo"}


def test_the_lowest_rank_stands_for_a_folder(tmp_path):
    for rank in (3, 1, 2):
        shutil.copy(BUCKETED, tmp_path / f"trace_bucketed_rank{rank}.json.gz")
    (file,) = TraceConfig((str(tmp_path),)).files()
    assert file.name == "trace_bucketed_rank1.json.gz"
    records = measured(EXPERIMENT, tmp_path, traces=(str(file),))
    assert len(records) == 2 and "overhead_ms" not in records[0].metrics  # nothing to hold it against
    assert {record.variant for record in records} == {"bucketed"}
    assert trace_overlap.variant_of(Path("other.json")) == "other"


def test_a_trace_without_steps_is_refused_by_name(tmp_path, capsys):
    body = json.loads(gzip.decompress(BUCKETED.read_bytes()))
    body["traceEvents"] = [event for event in body["traceEvents"] if event["name"] != "distlab:step"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(body))
    error = refused(capsys, "trace_overlap", str(path), "--out", str(tmp_path))
    assert "mine.json" in error and "has no range 'distlab:step'" in error
