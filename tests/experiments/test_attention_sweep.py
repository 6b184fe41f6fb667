"""The attention experiments: their rows, resuming, predictions and the table they rewrite, without a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from distlab.report import Record
from distlab.report.run import Header, Run
from experiments import attention_sweep as sweep
from experiments import tune_flash_attention as tuning
from experiments._attention import naive
from experiments.tune_flash_attention import EXPERIMENT, Config
from kernels.flash_attention import table
from kernels.flash_attention.configs import Tile
from tests.experiments.frame import measured, refused


def record(variant, length, ms):
    config = {"length": length, "head_dim": 16, "dtype": "float32"}
    return Record(sweep.EXPERIMENT.name, variant, config, {"fwd_bwd_device_p50_ms": ms, "status": "ok"}, {}, None)


def test_smoke_rows_are_right_and_complete(tmp_path):
    records = measured(sweep.EXPERIMENT, tmp_path)
    assert [r.variant for r in records] == ["naive", "sdpa", "ours"]
    for row in records:
        assert row.metrics["status"] == "ok"
        assert row.metrics["max_abs_error"] < 1e-5
        assert row.metrics["max_abs_grad_error"] < 1e-5
        assert row.metrics["host_p50_ms"] > 0


def test_a_variant_that_fails_is_a_row_and_not_the_end(monkeypatch, tmp_path):
    def refuse(variant, length, device):
        if variant == "sdpa":
            raise RuntimeError("no kernel for this type\nand more")
        if variant == "naive":
            raise torch.OutOfMemoryError("too large")
        return naive

    monkeypatch.setattr(sweep, "build", refuse)
    statuses = {r.variant: r.metrics["status"] for r in measured(sweep.EXPERIMENT, tmp_path)}
    assert statuses == {"naive": "OOM", "sdpa": "RuntimeError: no kernel for this type", "ours": "ok"}


def test_wrong_results_show_in_the_error_columns(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "build", lambda *_: lambda q, k, v: naive(q, k, v) * 1.5)
    assert all(r.metrics["max_abs_error"] > 0.1 for r in measured(sweep.EXPERIMENT, tmp_path))


def test_crossovers_name_the_peer_that_wins():
    records = [
        record("ours", 128, 2.0),
        record("naive", 128, 1.0),
        record("ours", 256, 2.0),
        record("naive", 256, 3.0),
    ]
    assert sweep.crossovers(records) == [
        "float32 d=16: a peer is faster at 128 (naive 1.0000 ms, ours 2.0000)"
    ]
    assert "fastest at every length" in sweep.crossovers(records[2:])[0]
    (row, _) = sweep.beside_best_peer(records)
    assert row.metrics == {"ours_ms": 2.0, "peer": "naive", "peer_ms": 1.0, "ours_over_peer": 2.0, "device_ratio": 2.0}
    assert row.config == {"dtype": "float32", "head_dim": 16, "length": 128, "code": "unknown"}
    assert "no device times" in sweep.crossovers([record("ours", 128, None)])[0]


def test_warming_up_survives_variants_that_fail():
    sweep.warm(sweep.Config(**sweep.SMOKE, warm=1), "cpu")
    assert sweep.warm_one((32, 16, "float32", "cpu", "no such variant")) is None


def test_garbage_is_collected_only_where_a_row_has_left_memory_behind(monkeypatch):
    in_use, collected = [100], []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: in_use[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(sweep.gc, "collect", lambda: collected.append(in_use[0]))
    assert sweep.release(100) == 100 and collected == []
    in_use[0] = 150  # a library's workspace: looked at once, then part of what is in use
    assert sweep.release(100) == 150 and sweep.release(150) == 150 and collected == [150]


def test_peak_memory_is_what_a_call_takes_and_not_what_was_there(monkeypatch):
    """Workspaces of libraries and the float64 results lie beside the call's own tensors."""
    case = sweep.inputs((1, 1, 32, 16), "float32", "cpu")
    expected = sweep.exact(*case)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10_700)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"requested_bytes.all.peak": 0})
    times = iter(([1.0] * 3, [2.0] * 3))
    monkeypatch.setattr(sweep, "replay_ms", lambda run, repeats: next(times))
    monkeypatch.setattr(sweep, "build", lambda *_: naive)
    assert sweep.speed(case, expected, "naive", 3, "cuda")["peak_bytes"] == 700 + 4 * 4 * 32 * 16


def test_only_fp32_has_a_row_in_ieee_arithmetic(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "build", lambda *_: naive)
    found = measured(sweep.EXPERIMENT, tmp_path, variants=("ours-ieee",), dtypes=("float16", "float32"))
    assert [(r.variant, r.config["dtype"]) for r in found] == [("ours-ieee", "float32")]


def test_the_table_file_is_what_the_tuner_writes():
    """Writing the rows gives the file itself, and the fastest tiles replace a row. Run apart, as the tuner compiles."""
    script = """
from experiments.tune_flash_attention import *
from experiments.tune_flash_attention import candidates, chunked, configs, fields, merge, shape_of
assert table_source(table.ROWS) == open(table.__file__, encoding="utf-8").read()
case = Case(2048, 64, "bfloat16")
tiles = [Tile(16, 16, warps) for warps in (2, 4, 8)]
found = [{"kernel": k, "length": length, "how": tile, "ms": ms, "sustained_ms": ms}
         for k in configs.KERNELS for length in (1024, 2048) for tile, ms in zip(tiles, (3.0, 1.0, 2.0))]
rows = merge(table.ROWS, case, found, "sm_90")
(row,) = [row for row in rows if row[0] == ("sm_90", 16, "ieee", 64, True, 2048)]
assert len(rows) == len(table.ROWS) and row[1] == "1x1x2048x64: 1.0000 1.0000 1.0000 ms"
assert [Tile(*tile) for tile in row[2:]] == [tiles[1]] * 3
assert fields(tiles[0]) == (16, 16, 2, 2, 1, False) and fields(Tile(16, 16, chunk=64))[-1] == 64
kinds = [(k, t, d) for k in configs.KERNELS for t in ("bfloat16", "float32") for d in (16, 128)]
assert all(0 < len(list(candidates(*kind))) < 80 for kind in kinds)
every = [tile for kind in kinds if kind[1] == "float32" for tile in candidates(*kind)]
assert not any(configs.miscompiled(32, tile) for tile in every) and any(tile.warps == 8 for tile in every)
split = [tile for tile in candidates("forward", "float32", 64) if tile.chunk]
assert {t.chunk for t in chunked(split, 2048)} == {64, 128, 256, 512, 1024} and chunked(split, 8192) == []
assert {shape_of(t) for t in chunked(split, 2048)} == set(split) and chunked(tiles, 8192) == tiles
"""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
    assert len({row[0] for row in table.ROWS}) == len(table.ROWS)


def test_tuning_refuses_what_it_does_not_know(capsys):
    name, quick = "tune_flash_attention", "--quick"
    assert "give dtype:head_dim[:precision]" in refused(capsys, name, quick, "--family", "bfloat16")
    with pytest.raises(ValueError, match="name families with --family"):
        Config()


def test_the_winners_of_a_family_are_rows(tmp_path):
    tiles = [Tile(16, 16, warps) for warps in (2, 4)]
    found = [{"kernel": kernel, "length": 1024, "how": t, "ms": ms, "sustained_ms": ms, "registers": 9}
             for kernel in ("forward", "dkdv", "dq") for t, ms in zip(tiles, (3.0, 1.0), strict=True)]
    found += [{"kernel": "dq", "length": 1024, "how": tiles[0], "ms": float("inf"), "why": "wrong"}]
    run = Run(Header("tune_flash_attention", {}, 1, {"device_name": "H100", "torch": "", "triton": ""}, None), tmp_path)
    tuning.add_winners(run, "bfloat16:64", tuning.Case(1024, 64, "bfloat16"), found)
    forward, _, dq = run.records
    assert forward.config["tiles"] == "16x16 w4 s2" and forward.metrics["registers"] == 9
    assert dq.metrics["sustained_ms"] == 1.0
    assert [r.metrics.get("status") for r in tuning.to_records("bfloat16:64", found, run)] == [None] * 6 + ["wrong"]
    assert EXPERIMENT.view.table(run.records) and run.done("dq", family="bfloat16:64", length=1024)
    with pytest.raises(ValueError, match=r"no tile of dq can be used: \['wrong'\]"):
        tuning.best_of(found[-1:], "dq", 1024)


def test_lengths_at_which_the_two_differ_by_less_than_their_noise_are_ties():
    spread = {"fwd_bwd_device_p20_ms": 1.8, "fwd_bwd_device_p80_ms": 2.2}
    ours, naive = record("ours", 128, 2.0), record("naive", 128, 1.9)
    for row in (ours, naive):
        row.metrics.update(spread)
    assert sweep.crossovers([ours, naive]) == ["float32 d=16: no peer is faster; a tie at 128"]
