"""The kernel benchmark without a GPU: its rows, their correctness column, resuming, predictions and
pictures.
"""

import dataclasses
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from distlab.experiment import lone_context
from distlab.measure.memory_traffic import KINDS
from distlab.report import Record
from experiments import kernel_roofline as roofline
from experiments.kernel_roofline import EXPERIMENT, PRESETS, RooflineConfig, build
from experiments.kernel_roofline import cases as rows
from experiments.kernel_roofline.device_times import fits
from experiments.kernel_roofline.prediction import naive_bytes, predicted
from experiments.kernel_roofline.tables import compare, headline, verdicts, wall_notes
from kernels import reference
from tests.commands import python
from tests.experiments.frame import measured
from tests.experiments.noisy import Noise, each_seed, side_of_one


def test_operations_are_right_in_the_smoke_run(smoke):
    for r in smoke(EXPERIMENT.name)[0]:
        assert len(r.metrics["time_samples_ms"]) == PRESETS["smoke"]["rounds"]
        assert r.metrics["status"] == "ok", (r.config["label"], r.variant, r.metrics)
        assert r.metrics["time_p50_ms"] > 0 and r.metrics["gb_per_s"] > 0


def test_every_operation_is_timed_in_each_size():
    config = RooflineConfig(only=("add",), small=True, shrink=(1, 4, 64))
    assert [case.shape for case in config.cases()] == [(4, 64), (1, 64), (1, 64)]


def test_a_wrong_kernel_is_called_wrong(monkeypatch, tmp_path):
    def broken(small=False):
        return [dataclasses.replace(norm, make=rms_norm)]

    def rms_norm(shape, dtype):  # twice too large
        return dataclasses.replace(rows.rms_norm(shape, dtype), ours=lambda x, w: 2 * x * w)

    norm = next(case for case in rows.cases(small=True) if case.name == "rms_norm")
    monkeypatch.setattr(rows, "cases", broken)
    found = measured(EXPERIMENT, tmp_path, only=("rms_norm",))
    status = {(r.variant, r.config["direction"]): r.metrics["status"] for r in found}
    assert status["ours", "fwd"] == status["ours", "bwd"] == "WRONG"
    assert status["naive", "fwd"] == status["builtin", "bwd"] == "ok"


def test_what_graphs_hold_must_fit_with_room_to_spare(monkeypatch):
    for name, gib in (("memory_reserved", 10), ("memory_allocated", 4)):
        monkeypatch.setattr(torch.cuda, name, lambda gib=gib: gib * 2**30)
    # with the cached 6: 60 free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (54 * 2**30, 80 * 2**30))
    assert fits(30 * 2**30) and not fits(31 * 2**30)


@pytest.mark.gpu
@pytest.mark.parametrize("together", [True, False])
def test_graphs_of_all_variants_on_a_gpu(together, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.kernel_roofline.fits", lambda held: together)
    config = RooflineConfig(
        small=True,
        only=("matmul_gelu", "linear_gelu_dropout"),
        repeat_ms=4,
        variants=("ours", "naive", "builtin", "compile"),
    )
    context = lone_context("cuda")
    run = EXPERIMENT.open(config, context, tmp_path)
    EXPERIMENT.measure(config, context, run)
    records = run.records
    assert len(records) == 3 + 4 + 4  # matmul + GeLU has no naive form
    for r in records:
        assert (
            r.metrics["status"] == "ok"
            and r.metrics["captured"]
            and len(r.metrics["wall_samples_ms"]) == 10
        ), r
        assert r.variant != "ours" or r.metrics["registers"] > 0, r


def case_named(name):
    return next(c for c in rows.cases() if c.name == name)


def test_of_a_users_kernel_nothing_else_is_timed(monkeypatch):
    """Python that finds its arguments would take longer than the launch of a small kernel."""

    def kernel(x, weight):
        return x

    monkeypatch.setattr(roofline, "factory_of", lambda *names: kernel)
    yours = roofline.kernel_of("my:kernel", "rms_norm")
    case = dataclasses.replace(case_named("rms_norm"), yours=yours)
    assert case.operation.yours is kernel


def test_traffic_of_the_naive_forms():
    case = case_named("add_gelu")
    # x + y in bf16, GeLU in fp32: to float, products, tanh, and back; all of it at least three
    # times the least.
    assert naive_bytes(case, "fwd").total() > 3 * case.operation.cost("fwd").bytes
    norm = case_named("rms_norm")
    n, count = norm.shape[0] * norm.shape[1], naive_bytes(norm, "fwd")
    # to float 2+4; square 4+4 and to bf16 4+2; mean 4; times r 4+4, times w 4+4 bytes per element
    expected = {"widen": 6, "copy": 14, "reduce": 4, "broadcast": 16}
    assert {kind: count[kind] / n for kind in KINDS} == pytest.approx(expected, rel=0.01)


def test_a_prediction_is_time_over_time():
    case = case_named("add_gelu")
    alike = {f"{kind}_gb_per_s": 1000.0 for kind in KINDS}
    # two kernels of ours move five tensors
    ratio = naive_bytes(case, "fwd").total() / (5 / 3 * case.operation.cost("fwd").bytes)
    assert predicted(case, "fwd", alike | {"empty_kernel_ms": 0.0})[
        "predicted_over_naive"
    ] == pytest.approx(1 / ratio)
    assert predicted(case_named("matmul_gelu"), "fwd", alike | {"empty_kernel_ms": 0.0}) == {}


def test_templates_are_a_peer_of_single_products(monkeypatch):
    assert [c.name for c in rows.cases() if c.operation.has("template")] == ["matmul"] * 2 + [
        "matmul_gelu"
    ] * 2
    asked = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: asked.append(options) or function
    )
    for variant in ("template", "compile"):
        build(case_named("matmul_gelu"), variant)
    assert (
        asked[0]["options"]["max_autotune_gemm_backends"] == "TRITON"
        and asked[1]["options"] is None
    )


def test_two_operations_are_also_autotuned(monkeypatch):
    autotuned = [c.name for c in rows.cases() if c.operation.has("max-autotune")]
    assert autotuned == ["subtract_mean", "norm_plus_input"]
    traced = partial(torch.compile, backend="aot_eager", fullgraph=True)
    asked = []

    def compile_like(function, *, dynamic, mode=None, options=None):
        asked.append(mode)
        return traced(function)

    monkeypatch.setattr(torch, "compile", compile_like)
    x = 1 + torch.randn(4, 64)
    expected = {
        "subtract_mean": x - x.mean(1, keepdim=True),
        "norm_plus_input": x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() + x,
    }
    for name, result in expected.items():
        for variant in ("naive", "builtin", "compile", "max-autotune"):
            torch.testing.assert_close(build(case_named(name), variant)(x), result)
    assert asked == [None, "max-autotune-no-cudagraphs"] * 2


def test_torchaos_layer_multiplies_by_the_weight_that_it_is_given(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(rows, "_torchao_linear", rows._torchao_linear.__wrapped__)
    for name in ("torchao", "torchao.float8"):  # a conversion that converts nothing
        monkeypatch.setitem(
            sys.modules, name, SimpleNamespace(convert_to_float8_training=lambda layer: layer)
        )
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    torch.testing.assert_close(build(case_named("float8_linear"), "torchao")(x, w), x @ w.T)


def test_a_kernel_that_remembers_its_first_results_is_wrong_after_timing(monkeypatch, tmp_path):
    known = {}

    def remembers(x, weight):
        if x.shape not in known:
            known[x.shape] = rows.rms_norm(x.shape, x.dtype).builtin(x, weight)
        return known[x.shape]

    monkeypatch.setattr(roofline, "kernel_of", lambda name, operation: remembers)
    found = measured(
        EXPERIMENT, tmp_path, only=("rms_norm",), yours="my:kernel", variants=("builtin",)
    )
    status = {(r.variant, r.config["direction"]): r.metrics["status"] for r in found}
    assert status["yours", "fwd"] == "WRONG after timing" and status["builtin", "fwd"] == "ok"


def test_a_kernel_without_a_backward_says_so(monkeypatch, tmp_path):
    def forward(x, cosines, sines):
        return reference.rope(x, cosines, sines).detach()

    monkeypatch.setattr(roofline, "kernel_of", lambda name, operation: forward)
    found = measured(EXPERIMENT, tmp_path, only=("rope",), yours="my:kernel", variants=("naive",))
    status = {(r.variant, r.config["direction"]): r.metrics["status"] for r in found}
    assert status["yours", "fwd"] == "ok" and "it has no backward" in status["yours", "bwd"]


def test_optional_peers_have_rows_only_where_they_are_installed(monkeypatch):
    assert "quack" not in RooflineConfig().forms() and "cce" not in RooflineConfig().forms()
    with pytest.raises(ValueError, match=r"--variants cce: .* pip install 'cut-cross-entropy>="):
        RooflineConfig.check_given({"variants": ("ours", "cce")})
    monkeypatch.setattr(roofline, "is_installed", lambda variant: True)
    assert {"quack", "cce"} < set(RooflineConfig().forms())
    RooflineConfig.check_given({"variants": ("ours", "cce")})


def test_optional_peers_are_called_as_their_packages_say(monkeypatch):
    calls = []

    def peer(*tensors, **options):
        calls.append((len(tensors), options))

    quack = SimpleNamespace(rmsnorm=peer, softmax=peer, cross_entropy=peer)
    monkeypatch.setitem(sys.modules, "quack", quack)
    monkeypatch.setitem(
        sys.modules, "cut_cross_entropy", SimpleNamespace(linear_cross_entropy=peer)
    )
    for name in ("rms_norm", "softmax", "cross_entropy"):
        case = case_named(name)
        build(case, "quack")(*case.inputs("meta"))
    case = case_named("linear_cross_entropy")
    build(case, "cce")(*case.inputs("meta"))
    assert calls == [(2, {"eps": 1e-5}), (1, {}), (2, {}), (3, {})]


def record(variant, ms, **metrics):
    config = {"label": "f 8", "operation": "f", "direction": "fwd"}
    return Record(
        EXPERIMENT.name, variant, config, {"status": "ok", "time_p50_ms": ms} | metrics, {}, None
    )


def said(*records):
    return verdicts(compare(records))


def test_a_verdict_names_only_the_rows_that_are_furthest_behind():
    records = []
    for place, ratio in enumerate((1.1, 1.6, 1.2, 1.3, 1.5, 1.4)):
        for variant, ms in (("ours", ratio), ("liger", 1.0)):
            row = record(variant, ms, noise_pct=0.1)
            row.config["label"] = f"f {place}"
            records.append(row)
    [line] = said(*records)
    assert "in 0 of 6 rows, slower in 6. Furthest behind: f 1 fwd (liger, ours / it 1.60" in line
    places = [line.find(f"f {place} fwd") for place in (1, 4, 5, 3)]
    assert places == sorted(places) and -1 not in places
    assert "f 0 fwd" not in line and "f 2 fwd" not in line


def test_verdicts_name_the_peer_that_wins():
    exact = {"noise_pct": 1.0}
    counts = "On the device ours is faster than the fastest peer in {} of 1 rows, slower in {}"
    lost = counts.format(0, 1) + ": f 8 fwd (liger, ours / it 2.00 (95 %: 1.98 to 2.02))."
    assert said(record("ours", 2.0, **exact), record("liger", 1.0, **exact)) == [lost]
    won = counts.format(1, 0) + "."
    assert said(record("ours", 1.0, **exact), record("liger", 2.0, **exact)) == [won]
    remedy = "try more --rounds, or a machine that does nothing else."
    unclear = counts.format(0, 0) + ". In 1 this run cannot tell. {}: " + remedy
    noisy = record("ours", 1.02, noise_pct=3.0), record("liger", 1.0, **exact)
    assert said(*noisy) == [unclear.format("Noise is up to ± 3.0 %")]
    unknown = record("ours", 2.0), record("liger", 1.0)
    assert said(*unknown) == [unclear.format("There is no interval")]
    wrong = (
        record("ours", 2.0, **exact),
        record("liger", 1.0, status="WRONG"),
        record("naive", 3.0, **exact),
    )
    assert said(*wrong)[0] == won


def test_predictions_are_close_where_the_whole_interval_is():
    def counted(*errors, noise_pct=0.5):
        rows = [
            record("ours", 1.0, predicted_over_naive=0.5 * off, noise_pct=noise_pct)
            for off in errors
        ]
        naive = record("naive", 2.0, noise_pct=0.5)
        return verdicts([compare([ours, naive])[0] for ours in rows])[-1]

    assert (
        counted(1.14, 0.84)
        == "Of 2 predicted ratios to the naive form 1 are within 15 %, 1 are not."
    )
    doubt = (
        "Of 1 predicted ratios to the naive form 0 are within 15 %, 0 are not. For 1 this run "
        "cannot tell. Noise"
    )
    assert counted(1.14, noise_pct=5.0).startswith(doubt)


def test_noise_makes_no_verdict(few_resamples):
    each_seed(verdicts_follow_intervals)


def verdicts_follow_intervals(seed):
    """Of made-up runs: the rows that are counted as faster, slower and unclear are those whose
    intervals say so.
    """
    noise = Noise(seed)
    records = []
    for label in ("f 8", "g 8", "h 8"):
        for variant in ("ours", "liger", "naive"):
            config = {"label": label, "operation": label, "direction": "fwd"}
            metrics = {"status": "ok"} | noise.metrics("time", "wall")
            if variant == "ours":
                metrics["predicted_over_naive"] = noise.random.choice([0.7, 1.0, 1.1])
            records.append(Record(EXPERIMENT.name, variant, config, metrics, {}, None))
    records = compare(records)
    ours = [record.metrics for record in records if record.variant == "ours"]
    lines = EXPERIMENT.view.findings(records)
    assert len(lines) == 3
    for line, name in zip(lines, ("over_peer", "over_peer_wall"), strict=False):
        sides = [side_of_one(metrics, name) for metrics in ours]
        counted = re.search(r"fastest peer in (\d) of 3 rows, slower in (\d)", line)
        assert [int(count) for count in counted.groups()] == [
            sides.count("faster"),
            sides.count("slower"),
        ]
        assert ("cannot tell" in line) == ("unclear" in sides)
    close, far = re.search(r"form (\d) are within 15 %, (\d) are not", lines[-1]).groups()
    errors = []
    for metrics in ours:
        ends = [metrics.get("over_naive_high"), metrics.get("over_naive_low")]
        if None not in ends and min(ends) > 0:
            errors.append([metrics["predicted_over_naive"] / end - 1 for end in ends])
    assert int(close) == sum(low >= -0.15 and high <= 0.15 for low, high in errors)
    assert int(far) == sum(low > 0.15 or high < -0.15 for low, high in errors)
    assert ("cannot tell" in lines[-1]) == (int(close) + int(far) < 3)


def test_a_wall_time_below_its_device_time_is_marked():
    assert wall_notes(record("ours", 1.0, wall_p50_ms=0.9, host_p50_ms=0.1)) == " L2"
    assert wall_notes(record("ours", 1.0, wall_p50_ms=1.2, host_p50_ms=1.1)) == " host"


def test_a_resumed_run_names_the_ceilings_of_every_process():
    parts = [
        record("ours", 1.0, copy_gb_per_s=3000.0, cublas_tflop_per_s=rate)
        for rate in (672.0, 672.0, 773.0)
    ]
    assert "copy 3,000 GB/s, cuBLAS 672 and 773 TFLOP/s" in headline(parts)


PLANNED = """
import torch
from unittest import mock
from experiments.kernel_roofline.device_times import of_our_kernels, of_triton_kernels
from kernels import _dispatch, _recorder, softmax
from kernels._compile import compile_for

def keep(function, check, kept, args, key):
    kept[key] = lambda *args: None  # what the recorder writes down reaches no launch of Triton's
    kept[key].calls_torch, kept[key].index = False, -1

x = torch.randn(8, 64)
with mock.patch.object(_recorder, "_written", keep):
    for _ in range(3):
        softmax.forward_op(x)
assert any(_dispatch._kept.values())
with compile_for(90), mock.patch.object(_dispatch, "runs_triton", lambda x: True):
    print(of_our_kernels(lambda: softmax.forward_op(x))["registers"])
    print(of_triton_kernels(lambda: softmax.forward_op(x))["registers"])
    assert of_triton_kernels(lambda: x + x) == {}
    assert of_our_kernels(lambda: x + x) == {}
"""


def test_registers_of_a_call_that_has_a_program():
    done = python("-c", PLANNED, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]
    ours, of_triton = map(int, done.stdout.split())
    assert ours == of_triton > 8
