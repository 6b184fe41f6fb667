"""The kernel benchmark without a GPU: its rows, their correctness column, resuming, predictions and pictures."""

import dataclasses
import json

import pytest
import torch

from distlab.report import Record, read_json, write_json
from experiments import kernel_roofline as bench
from kernels.cost import Cost

FEW = dataclasses.replace(bench.SMOKE, only=("add", "rms_norm"))


def test_operations_are_right_in_the_smoke_run():
    # One of each kind; every kernel is compared with float64 in tests/kernels.
    names = ("add_rms_norm", "rope", "cross_entropy", "adamw")
    records = bench.run(dataclasses.replace(bench.SMOKE, only=names))
    assert {r.config["operation"] for r in records} == set(names)
    for r in records:
        assert r.metrics["status"] == "ok", (r.config["label"], r.variant, r.metrics)
        assert r.metrics["time_p50_ms"] > 0 and r.metrics["gb_per_s"] > 0


def test_a_cut_off_run_resumes(tmp_path):
    path = tmp_path / "records.json"
    first = bench.run(FEW, path)
    write_json(first[:3], path)
    again = bench.run(FEW, path)
    times = [[r.metrics["time_p50_ms"] for r in records[:3]] for records in (first, again)]
    assert times[0] == times[1]  # measured once
    assert sorted((r.config["label"], r.config["direction"], r.variant) for r in again) == sorted(
        (r.config["label"], r.config["direction"], r.variant) for r in first)
    assert read_json(path) == again


def test_a_wrong_kernel_is_called_wrong(monkeypatch):
    def broken(small=False):
        case = next(c for c in REAL(True) if c.name == "rms_norm")
        return [dataclasses.replace(case, variants=case.variants | {"ours": lambda x, w: 2 * x * w})]

    REAL = bench.cases
    monkeypatch.setattr(bench, "cases", broken)
    status = {(r.variant, r.config["direction"]): r.metrics["status"] for r in bench.run(FEW)}
    assert status["ours", "fwd"] == status["ours", "bwd"] == "WRONG"
    assert status["naive", "fwd"] == status["builtin", "bwd"] == "ok"


def test_a_peer_that_is_missing_is_a_row(monkeypatch):
    rows = bench.run(dataclasses.replace(FEW, only=("rms_norm",), variants=("ours", "liger")))
    liger = [r.metrics["status"] for r in rows if r.variant == "liger"]
    assert liger and all(status == "ok" or status.startswith(("ModuleNotFoundError", "Runtime", "Assertion"))
                         for status in liger)


def test_predicted_traffic_of_the_naive_forms():
    case = next(c for c in bench.cases() if c.name == "add_gelu")
    tensor = 8192 * 8192
    assert case.cost("fwd").bytes == 3 * 2 * tensor
    # x + y in bf16, GeLU in fp32: to float, products, tanh, and back; all of it at least three times the least.
    assert bench.naive_bytes(case, "fwd") > 3 * case.cost("fwd").bytes
    norm = next(c for c in bench.cases() if c.name == "rms_norm")
    rows, cols = norm.shape
    n = rows * cols
    # to float 2+4, square 4+4, mean 4, times r 4+4, times w 4+4, to bf16 4+2 bytes per element, and the row statistics
    assert bench.naive_bytes(norm, "fwd") == pytest.approx(40 * n, rel=0.01)
    assert bench.naive_bytes(next(c for c in bench.cases() if c.name == "dropout"), "fwd") is None


def test_costs_of_both_directions_add_up():
    case = next(c for c in bench.cases() if c.name == "cross_entropy")
    logits = 2048 * 151936 * 2
    assert case.cost("both").bytes == pytest.approx(3 * logits, rel=1e-3)
    assert isinstance(case.cost("both"), Cost)


def record(variant, ms, **metrics):
    config = {"label": "f 8", "operation": "f", "direction": "fwd"}
    return Record(bench.EXPERIMENT, variant, config, {"status": "ok", "time_p50_ms": ms} | metrics, {}, None)


def test_verdicts_name_the_peer_that_wins():
    lines = bench.verdicts([record("ours", 2.0), record("liger", 1.0)])
    assert lines == ["f 8 fwd: liger is faster, 1000.0 µs, ours 2000.0"]
    assert "no peer" in bench.verdicts([record("ours", 1.0), record("liger", 2.0)])[0]


def test_command_writes_tables_and_pictures(tmp_path, capsys):
    command = ["--smoke", "--only", "add", "swiglu", "--out", str(tmp_path), "--stamp", "run"]
    assert bench.main(command) == 0
    out = capsys.readouterr().out.strip().splitlines()
    assert json.loads(out[-1])["experiment"] == "kernel_roofline"
    written = {path.name for path in (tmp_path / "kernel_roofline" / "run").iterdir()}
    assert {"records.json", "records.csv", "table.md", "report.html", "roofline.png", "bars.png"} <= written


def test_wrong_use_is_explained(capsys):
    assert bench.main(["--smoke", "--only", "nothing"]) == 2
    assert "choose among" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert bench.main([]) == 2
        assert "--smoke" in capsys.readouterr().err
