"""The benchmark of a model's parts and the taking apart of its step, on two gloo ranks.

Broken ones are caught.
"""

import itertools
import os
from random import Random
from unittest.mock import patch

import pytest
import torch

from distlab.experiment import lone_context
from distlab.measure import Event
from distlab.model import TransformerLM
from distlab.report.record import Record, read_json
from distlab.testing import run_ranks
from distlab.theory.operators import Compute
from experiments import model_comparison
from experiments.model_benchmark import EXPERIMENT, BenchmarkConfig, taken_apart
from experiments.model_benchmark import by_part as by_part_module
from experiments.model_benchmark.step_memory import MEMORY, memory, predicted_peak
from experiments.model_benchmark.trials import TrialConfig
from kernels import rmsnorm
from tests.experiments.frame import measured, on_rank
from tests.experiments.noisy import each_seed

SMALL = {"batch": (1,), "context": (16,), "repeats": 4}
NAIVE = {
    "attention": ("naive", "sdpa"),
    "strategy": ("bucketed",),
    "modes": ("forward",),
    "warmups": (0,),
}
SWEEP = {
    "attention": ("sdpa", "naive", "flash"),
    "strategy": ("bucketed",),
    "warmups": (0, 2),
    "modes": ("forward", "step"),
}
PARTS = {"profile": True, "memory": True}


def two_runs(context, root):
    """What needs ranks: a sweep in which one of them fails, and a step with communication taken
    apart.
    """
    # Interpreted kernels are off, as a user without a GPU finds them, whatever the tests of kernels
    # set.
    with memory_runs_out_once(context.rank == 1), patch.dict(os.environ, TRITON_INTERPRET="0"):
        records = on_rank(context, "model_benchmark", f"{root}/sweep", "smoke", SMALL | SWEEP)
    on_rank(context, "model_benchmark", f"{root}/parts", "smoke", SMALL | NAIVE | PARTS)
    return records


def measured_here(context, root, /, **fields):
    """The rows of a run of one rank, and its folder."""
    config = BenchmarkConfig(**SMALL | fields)
    run = EXPERIMENT.open(config, context, root)
    EXPERIMENT.measure(config, context, run)
    EXPERIMENT.finish(run, json_only=True)
    return run


def memory_runs_out_once(here):
    """In this rank's first optimizer step, which takes the memory of the optimizer's state."""
    real, calls = torch.optim.AdamW.step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        if here and len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *args, **kwargs)

    return patch.object(torch.optim.AdamW, "step", step)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    records = run_ranks(two_runs, 2, str(folder), deadline_s=240, group_timeout_s=120)[0]
    return {"sweep": records, "folder": folder}


def test_rows_are_all_combinations_and_each_is_checked(results):
    rows = {record.variant: record.metrics for record in results["sweep"]}
    combinations = itertools.product(("sdpa", "naive", "flash"), ("forward", "step"), (0, 2))
    assert list(rows) == ["{}, {}, warm-up {}".format(*each) for each in combinations]
    step = rows["naive, step, warm-up 2"]
    assert step["status"] == "ok" and step["grad_rel_error"] == 0
    assert all(step[f"{phase}_p50_ms"] > 0 for phase in ("forward", "backward", "optimizer"))
    assert 10 <= step["clock_covered_pct"] <= 105 and step["tokens_per_s"] > 0
    assert (
        rows["naive, forward, warm-up 0"]["backward_p50_ms"] is None
        and step["predicted_peak_bytes"] > 0
    )
    # Both warm-ups are cut from one series: the later one lacks its first two calls.
    series = rows["naive, step, warm-up 0"]["step_samples_ms"]
    assert step["first_ms"] == series[2] and step["step_samples_ms"][:-2] == series[2:]


def test_a_predicted_peak_is_of_what_a_mode_holds():
    trial = TrialConfig(
        size="tiny", batch=4, context=128, vocab=256, layers=8, checkpointing="every-2"
    )
    step, gradients, forward = (
        predicted_peak(trial, lone_context("cpu"), mode)
        for mode in ("step", "forward_backward", "forward")
    )
    # AdamW's state
    assert step - gradients == pytest.approx(8 * trial.model().num_parameters, rel=1e-3)
    assert forward is None


def test_what_fails_is_a_row_and_the_sweep_goes_on(results):
    """Memory runs out on one of two ranks, and flash attention has no GPU: rows on both, and more
    rows after them.
    """
    rows = {record.variant: record.metrics for record in results["sweep"]}
    assert rows["sdpa, forward, warm-up 0"]["status"] == "ok"
    assert (
        rows["sdpa, step, warm-up 0"]["status"] == rows["sdpa, step, warm-up 2"]["status"] == "OOM"
    )
    assert "step_p50_ms" not in rows["sdpa, step, warm-up 0"]
    if not torch.cuda.is_available():
        assert "needs a CUDA device" in rows["flash, step, warm-up 0"]["status"]


def test_a_benchmark_that_times_zeros_is_caught(one_rank, monkeypatch, tmp_path):
    """A model that somebody forgot to initialise."""

    def zeroed(model, seed=0):
        for parameter in model.parameters():
            parameter.data.zero_()

    monkeypatch.setattr(TransformerLM, "reset_parameters", zeroed)
    (row,) = measured_here(one_rank, tmp_path, modes=("forward_backward",), warmups=(1,)).records
    assert "all gradients are zero" in row.metrics["status"] and "step_p50_ms" not in row.metrics


def test_a_layer_of_llama_by_the_modules_of_torch_of_this_lab_and_of_liger(tmp_path, monkeypatch):
    """On a CPU there is no Liger, and nothing is compiled; what a wrong norm computes is seen."""
    monkeypatch.setattr("kernels._dispatch.runs_triton", lambda tensor: False)
    case = {"layer": True, "kv_heads": 2}
    found = {
        r.variant: r.metrics
        for r in measured(model_comparison.EXPERIMENT, tmp_path / "right", **case)
    }
    assert [*found] == ["torch", "torch-compiled", "nn", "nn-compiled", "liger"]
    assert all(
        m["grad_rel_error"] < 1e-5 and m["step_p50_ms"] > 0
        for name, m in found.items()
        if name != "liger"
    )
    assert "Error" in found["liger"]["status"] and found["nn"]["over_compiled"] > 0
    real = rmsnorm.rms_norm
    monkeypatch.setattr(rmsnorm, "rms_norm", lambda *given: 1.01 * real(*given))
    found = {
        r.variant: r.metrics
        for r in measured(model_comparison.EXPERIMENT, tmp_path / "wrong", **case)
    }
    assert found["nn"]["grad_rel_error"] > 1e-3 > found["torch"]["grad_rel_error"]


def test_what_forms_of_a_block_save(one_rank, tmp_path):
    run = measured_here(
        one_rank, tmp_path, attention=("naive",), modes=("forward",), warmups=(1,), saved=True
    )
    found = run.parts["model_saved"].records
    saved_by = {record.variant: record.metrics for record in found}
    whole = {
        form: saved_by[f"{form}, all"]["saved_block_bytes"]
        for form in ("eager", "compiled", "ours")
    }
    assert whole["compiled"] < whole["eager"] and whole["ours"] < whole["eager"]
    # The closed form is the GPU's; a CPU writes each norm out and keeps two more tensors of it.
    # Then the mask.
    norms, mask = 2 * 2 * 16 * 128 * 4, 16 * 16
    assert whole["eager"] == saved_by["eager, all"]["predicted_saved_block_bytes"] + norms + mask
    # Fused operations keep no silu(w1 x); a CPU's merged heads are one more copy.
    for form in ("compiled", "ours"):
        assert whole[form] == pytest.approx(
            saved_by[f"{form}, all"]["predicted_saved_block_bytes"], rel=0.15
        )
    assert saved_by["eager, 1"]["of_block_pct"] >= saved_by["eager, 5"]["of_block_pct"] > 0


@pytest.mark.parametrize(
    "attention, dtype, context",
    [("sdpa", "fp32", 64), ("sdpa", "bf16", 64), ("naive", "fp32", 512)],
)
def test_the_peaks_of_a_forward_and_of_a_step_are_predicted(
    one_rank, tmp_path, attention, dtype, context
):
    """Within 3 %: of a step the CPU's norms keep two tensors more.

    Naive attention, with its scores, needs 10 %.
    """
    sizes = {"size": ("small",), "layers": (1,), "context": (context,)}
    (trial,) = BenchmarkConfig(**SMALL | sizes, attention=(attention,), dtype=(dtype,)).trials()
    rows = [metrics for _, metrics in memory(one_rank, trial, tmp_path, "small")[MEMORY]]
    forward, step = rows[0], rows[-1]
    for metrics in (forward, step):
        ratio = metrics["predicted_timeline_peak_bytes"] / metrics["timeline_peak_bytes"]
        assert ratio == pytest.approx(1, abs=0.03 if attention == "sdpa" else 0.1), metrics["scope"]
    assert forward["at_peak_optimizer_state_bytes"] == forward["at_peak_gradients_bytes"] == 0


def test_segments_of_segments_need_less_than_segments(one_rank, tmp_path):
    """Eight blocks whose activations decide, within 5 % of the prediction."""
    sizes = {"layers": (8,), "batch": (4,), "context": (128,), "vocab": (256,)}
    given = SMALL | sizes | {"attention": ("sdpa",), "checkpointing": ("every-8", "every-8-2")}
    peaks = {}
    for trial in BenchmarkConfig(**given).trials():
        metrics = memory(one_rank, trial, tmp_path, trial.checkpointing)[MEMORY][-1][1]
        peaks[trial.checkpointing] = metrics["timeline_peak_bytes"]
        ratio = metrics["predicted_timeline_peak_bytes"] / metrics["timeline_peak_bytes"]
        assert ratio == pytest.approx(1, abs=0.05), trial.checkpointing
    assert peaks["every-8-2"] < 0.8 * peaks["every-8"]


def test_the_tables_and_pictures_of_a_step_taken_apart(results):
    folder = results["folder"] / "parts" / "model_benchmark" / "run"
    parts = {path.name: read_json(path / "records.json") for path in (folder / "parts").iterdir()}
    assert set(parts) == {"model_kernels", "model_work", "model_parts", "model_memory"}
    assert (folder / "memory_naive.png").stat().st_size > 10_000
    for name, records in parts.items():
        assert "naive: " in EXPERIMENT.views()[name].table(records)
        parts[name] = [record for record in records if record.config["label"] == "naive"]
    work = {}
    for record in parts["model_work"]:
        kind = record.variant.removeprefix("naive: ")
        work[record.metrics["phase"], kind] = record.metrics
    communication = work["backward", "communication"]
    assert communication["kernel_ms"] > 0 and communication["flops"] == 0
    assert work["inference", "softmax"]["calls_per_step"]
    phases = ("forward", "backward", "optimizer", "inference")
    for phase in phases:
        shares = [metrics["of_flops_pct"] for (where, _), metrics in work.items() if where == phase]
        assert sum(shares) == pytest.approx(100)
    assert "timer's step" in taken_apart.work_findings(parts["model_work"])[0]
    assert {r.metrics["phase"] for r in parts["model_kernels"]} == set(phases)
    by_part = {r.variant.removeprefix("naive: "): r.metrics for r in parts["model_parts"]}
    for part in ("scores", "softmax", "norms", "SwiGLU"):
        for phase in ("forward", "backward"):
            assert by_part[part][f"{phase}_part_ms"] > 0
            assert by_part[part][f"predicted_{phase}_part_ms"] > 0
    assert sum(metrics["of_kernel_time_pct"] for metrics in by_part.values()) == pytest.approx(100)
    assert "predicted" in by_part_module.part_findings(parts["model_parts"])[0]
    # The buckets were there before the step, and hold the gradients of it.
    forward, held = parts["model_memory"][0].metrics, parts["model_memory"][-1].metrics
    assert (forward["scope"], held["scope"]) == ("forward only", "full step")
    assert held["at_peak_gradients_bytes"] > 0.9 * held["at_peak_parameters_bytes"] > 0


def test_kernels_count_for_the_range_that_launched_them():
    """A GPU runs behind the host; what is launched in no range of the model is the rest."""
    events = [
        Event("distlab:step", "range", "thread 1", 0, 100),
        Event("distlab:forward", "range", "thread 1", 0, 10),
        Event("distlab:in blocks.3.attention", "range", "thread 1", 1, 6),
        Event("distlab:in blocks.3.attention/attention/scores", "range", "thread 1", 2, 4),
        Event("distlab:backward", "range", "thread 1", 10, 20),
        Event(
            "distlab:in blocks.3.attention/attention/scores backward", "range", "thread 2", 11, 12
        ),
        Event("nvjet_a", "compute", "stream 7", 50, 57, 3, "aten::mm"),
        Event("nvjet_a", "compute", "stream 7", 57, 60, 5, "aten::mm"),
        Event("before", "compute", "stream 7", -9, -5, -10),
        Event("nvjet_a", "compute", "stream 7", 60, 62, 11.5, "aten::mm"),
        Event("loss", "compute", "stream 7", 62, 63, 9, "aten::nll_loss"),
    ]
    ms, count = by_part_module.measured_parts(events)
    assert ms == {
        ("forward", "scores"): 7,
        ("forward", "projections"): 3,
        ("backward", "scores"): 2,
        ("forward", "loss and rest"): 1,
    }
    assert count["forward", "scores"] == count["backward", "scores"] == 1
    assert by_part_module.part_of("encoder.3.conv backward") == "encoder.*.conv"


def test_an_operator_takes_the_longer_of_its_flops_and_its_bytes():
    bytes_per_s = {"copy": 10.0, "widen": 5.0, "norm": 4.0, "norm backward": 2.0}
    rates = by_part_module.Rates(
        {"matmul": 100.0, "attention": 50.0, "attention backward": 20.0}, bytes_per_s, 1.0
    )
    for name, flops, moved, phase, kind, seconds in (
        ("mm", 1000, 10, "forward", "copy", 11),
        ("_to_copy", 0, 10, "forward", "widen", 3),
        ("_fused_rms_norm", 0, 8, "forward", "copy", 3),
        ("_fused_rms_norm_backward", 0, 8, "backward", "copy", 5),
        ("rms_norm_backward", 0, 10, "backward", "copy", 2),
        ("_scaled_dot_product_attention_backward", 100, 1, "backward", "copy", 6),
    ):
        assert rates.seconds(Compute(name, flops, moved, phase), kind) == seconds, name


def test_kernel_names_are_cut_to_what_says_something():
    assert (
        taken_apart.short_name("void cutlass::Kernel2<cutlass_80_tensorop(int)>(Params)")
        == "cutlass::Kernel2"
    )
    assert len(taken_apart.short_name("aten::" + "x" * 100)) == 64


def test_options_become_combinations():
    options = (
        "--size tiny small --context 16 --dtype fp32 bf16 --compile model --mode step --warmup 0 1"
    )
    args = EXPERIMENT.parser().parse_args([*options.split(), "--checkpointing", "none", "every-2"])
    config, _ = EXPERIMENT.chosen(args)
    assert len(config.trials()) == 8 and config.compile == ("model",) and config.warmups == (0, 1)
    assert config.label(config.trials()[1]) == "tiny, fp32, checkpointing every-2"


def test_noise_makes_no_cost_of_the_profiler():
    each_seed(cost_is_told_beyond_the_noise)


def cost_is_told_beyond_the_noise(seed):
    """Of made-up runs: a difference inside the timer's noise is not left to stand as the
    profiler's.
    """
    random = Random(seed)
    error, noise = random.gauss(0, 10), random.choice([0.5, 5.0, 40.0])
    metrics = {
        "phase": "forward",
        "phase_kernel_ms": 1.0,
        "profiler_kernel_ms": 1.0,
        "timer_step_ms": 2.0,
    }
    metrics |= {
        "profiler_step_ms": 2 * (1 + error / 100),
        "profiler_error_pct": error,
        "timer_noise_pct": noise,
    }
    (line,) = taken_apart.work_findings(
        [Record("model_work", "x", {"label": ""}, metrics, {}, None)]
    )
    assert ("cannot tell" in line) == (abs(error) <= noise)
