"""The attention experiments: their rows, resuming and predictions, without a GPU."""

import dataclasses
import multiprocessing
import shutil

import pytest
import torch

from distlab.report import Record, write_json
from experiments import attention_sweep as sweep
from experiments._attention import Shape, exact, naive
from tests.experiments.frame import measured
from tests.experiments.noisy import Noise, each_seed, side_of_one


def row(variant, shape="2x32x2048x128", error=1e-3, **ratios):
    config = {"shape": shape, "dtype": "bfloat16"}
    metrics = {"max_abs_error": error, "max_abs_grad_error": error} | {
        f"ours_over_{x}": y for x, y in ratios.items()
    }
    return Record(
        sweep.EXPERIMENT.name,
        variant,
        config,
        metrics,
        {"device_name": "H100", "cuda": "13.0", "torch": "", "triton": ""},
        None,
    )


def test_a_shape_that_was_cut_off_is_measured_anew_and_others_are_not(smoke, tmp_path, monkeypatch):
    first, folder = smoke("attention_sweep")
    copied = shutil.copytree(folder, tmp_path / "attention_sweep" / "run")
    write_json(first[:4], copied / "records.json")
    monkeypatch.setattr(
        sweep, "exact", lambda shape, *case: exact(shape, *case) if shape.documents else 1 / 0
    )
    again = measured(sweep.EXPERIMENT, tmp_path)
    assert again[:3] == first[:3] and [r.variant for r in again] == [r.variant for r in first]


def test_a_variant_that_fails_after_its_first_call_is_a_row_too(monkeypatch, tmp_path):
    calls = []

    def second_call_does_not_fit(q, k, v):
        calls.append(q)
        if len(calls) > 2:
            raise torch.OutOfMemoryError("too large")
        return naive(q, k, v)

    monkeypatch.setattr(
        sweep,
        "build",
        lambda variant, *_: second_call_does_not_fit if variant == "naive" else naive,
    )
    first, sdpa, ours = measured(sweep.EXPERIMENT, tmp_path, shapes=("1x1x8x8",))
    assert (
        first.metrics["status"] == "OOM"
        and "max_abs_error" in first.metrics
        and "wall_p50_ms" not in first.metrics
    )
    assert (
        sdpa.metrics["ours_over_wall"] == ours.metrics["wall_p50_ms"] / sdpa.metrics["wall_p50_ms"]
    )


def test_an_error_is_judged_beside_the_peers():
    assert sweep.wrong([row("sdpa"), row("ours", error=2.9e-3)]) == []
    assert len(sweep.wrong([row("sdpa"), row("ours", error=3.1e-3)])) == 2
    assert len(sweep.wrong([row("sdpa"), row("ours", error=float("nan"))])) == 2
    assert sweep.wrong([row("ours", error=1.0), row("sdpa", shape="other")]) == []


def test_peers_that_are_faster_are_named_and_the_mean_is_of_all_shapes():
    rows = [
        row("sdpa", device=0.8, wall=0.9),
        row("sdpa", sweep.TWELVE[0], device=1.25, wall=0.9),
        row("flex", sweep.TWELVE[0], device=9, wall=2.0),
        row("sdpa", "1x1x8x8", device=9.0, wall=1.5),
    ]
    for number, (low, high) in enumerate([(0.88, 0.92), (0.85, 0.95), (0.99, 2.1), (1.01, 1.6)]):
        rows[number].metrics.update(ours_over_wall_low=low, ours_over_wall_high=high)
    assert sweep.crossovers(rows) == [
        "By the wall, a peer is faster in 1 of 4 rows of peers: 1x1x8x8 bfloat16 (sdpa, ours / it "
        "1.50 (95 %: 1.01 to 1.60)).",
        "This run cannot tell which is faster in 1 of 4 rows of peers, by the wall. Noise is up to "
        "± 50 %: try more --rounds, or a machine that does nothing else.",
    ]
    headline = sweep.EXPERIMENT.view.headline(rows)
    by_the_wall = "1.067 (95 %: 0.911 to 1.118) by the wall"
    assert f"2.080 on the device, {by_the_wall}: geometric means of 3 shapes" in headline
    table = sweep.EXPERIMENT.view.table(rows)
    assert "1.50 behind" in table and "2.00 behind" not in table


def test_of_many_faster_peers_the_four_furthest_ahead_are_named():
    rows = [row("sdpa", f"1x1x{n}x8", wall=1 + n / 10) for n in range(1, 7)]
    for each in rows:
        ratio = each.metrics["ours_over_wall"]
        each.metrics.update(ours_over_wall_low=ratio - 0.05, ours_over_wall_high=ratio + 0.05)
    (line,) = sweep.crossovers(rows)
    assert line.startswith("By the wall, a peer is faster in 6 of 6 rows of peers. Furthest behind")
    places = [line.find(f"1x1x{n}x8 bfloat16") for n in (6, 5, 4, 3)]
    assert -1 not in places and places == sorted(places)
    assert "1x1x2x8" not in line


def test_noise_puts_ours_behind_no_peer(few_resamples):
    each_seed(findings_follow_intervals)


def findings_follow_intervals(seed):
    """Of made-up runs: rows are named, marked and counted as their intervals say."""
    noise = Noise(seed)
    records = []
    for variant in ("sdpa", "flex", "naive", "ours"):
        empty = row(variant, shape=sweep.TWELVE[0])
        metrics = (
            empty.metrics | {"status": "ok"} | noise.metrics("wall", "fwd_bwd_device", "fwd_device")
        )
        records.append(dataclasses.replace(empty, metrics=metrics))
    records = sweep.compare(records)
    peers = records[:3]
    sides = {record.variant: side_of_one(record.metrics, "ours_over_wall") for record in peers}
    lines = sweep.EXPERIMENT.view.findings(records)
    text = "\n".join(lines)
    named = [variant for variant in sides if f"({variant}, ours / it" in text]
    assert named == [variant for variant, side in sides.items() if side == "slower"]
    unclear = [*sides.values()].count("unclear")
    told = [line for line in lines if line.startswith("This run cannot tell")]
    assert len(told) == (unclear > 0) and all(f"in {unclear} of 3 rows" in line for line in told)
    for name in ("wall", "device", "fwd"):
        for record in peers:
            assert bool(sweep.behind(name)(record)) == (
                side_of_one(record.metrics, f"ours_over_{name}") == "slower"
            )


def test_warming_up_survives_variants_that_fail(monkeypatch):
    forks = multiprocessing.get_context("forkserver")  # of what has imported torch
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
    monkeypatch.setattr(sweep.AttentionSweepConfig, "rows", lambda *_: ["no such variant", "ours"])
    monkeypatch.setattr(sweep, "COMPILED", ("no such variant", "ours"))
    options = sweep.SMOKE | {"warm": 1, "shapes": ("1x1x8x8",)}
    sweep.warm(sweep.AttentionSweepConfig(**options), "cpu")


def test_the_fastest_peer_is_none_of_ours_and_was_timed():
    ms = {"naive": 4.0, "sdpa": 2.0, "ours-ieee": 1.5, "ours": 1.0}
    rows = {variant: row(variant) for variant in (*ms, "flex")}
    for variant, time in ms.items():
        rows[variant].metrics["fwd_bwd_device_p50_ms"] = time
    ours, _ = sweep.compare([rows["ours"], rows["flex"]])
    assert "peer" not in ours.metrics
    found = {record.variant: record.metrics for record in sweep.compare(list(rows.values()))}
    ours = found["ours"]
    assert (ours["peer"], ours["peer_ms"], ours["ours_over_peer"]) == ("sdpa", 2.0, 0.5)
    assert found["naive"]["ours_over_device"] == 0.25
    assert "ours_over_device" not in found["flex"]


@pytest.mark.gpu
def test_device_times_memory_and_kernels():
    found = sweep.of_shape(
        Shape.parse("1x4:2x512x64"), "bfloat16", ["sdpa", "sdpa-flash", "ours"], 3, "cuda"
    )
    for metrics in found.values():
        assert (
            metrics["status"] == "ok"
            and 0 < metrics["fwd_device_p50_ms"] < metrics["fwd_bwd_device_p50_ms"]
        )
        assert metrics["peak_alloc_bytes"] > 3 * 4 * 512 * 64 * 2
    assert found["ours"]["max_abs_error"] <= 3 * found["sdpa"]["max_abs_error"]


def counted(variant, length, dtype="float32", batch=8):
    """(before the backward, at its peak) in bytes."""
    return tuple(
        sweep.predicted_memory(variant, Shape(batch, 1, 1, length, length, 64), dtype).values()
    )


def test_predicted_memory_is_quadratic_for_naive_and_linear_for_ours():
    assert 3.9 < counted("naive", 16384)[1] / counted("naive", 8192)[1] <= 4.0
    assert counted("ours", 16384)[1] == 2 * counted("ours", 8192)[1]
    # q, k, v, o, do and the log-sum-exp
    assert counted("ours", 1024)[0] == 5 * 8 * 1024 * 64 * 4 + 8 * 1024 * 4


@pytest.mark.gpu
def test_the_count_by_hand_is_the_allocators():
    found = sweep.of_shape(Shape.parse("2x1x8192x64"), "bfloat16", ["naive", "ours"], 3, "cuda")
    for variant, metrics in found.items():
        measured = metrics["before_bwd_alloc_bytes"], metrics["peak_alloc_bytes"]
        assert measured == pytest.approx(counted(variant, 8192, "bfloat16", batch=2), abs=2**20)


def test_a_users_function_is_one_more_row(tmp_path, monkeypatch):
    def forward_alone(q, k, v, is_causal=False):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal
        ).detach()

    known = {}

    def remembers(q, k, v, causal=False):
        if q.shape not in known:
            known[q.shape] = forward_alone(q, k, v, causal)
        return known[q.shape]

    shapes = ("1x2x32x16", "1x2x16x16/full", "1x1x16x16/documents=2", "1x2:1x16x16")
    for function, status in ((forward_alone, "ok"), (remembers, "WRONG after timing")):
        monkeypatch.setattr(sweep, "factory_of", lambda *names, f=function: f)
        rows = measured(
            sweep.EXPERIMENT,
            tmp_path / status[:2],
            shapes=shapes,
            variants=("sdpa",),
            yours="my:attention",
        )
        yours = [row for row in rows if row.variant == "yours"]
        # It takes no documents, and all heads have keys of their own.
        assert [row.config["shape"] for row in yours] == list(shapes[:2])
        for row in yours:
            assert row.metrics["max_abs_error"] < 1e-5
            assert row.metrics["status"].startswith(status), row.metrics
