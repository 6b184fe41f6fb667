"""The benchmark of a model's parts and the taking apart of its step, on two gloo ranks; broken ones are caught."""

import json
import math

import pytest
import torch

from distlab.report.view import write
from distlab.testing import run_ranks
from distlab.train import trial as trial_module
from distlab.train.trial import TrialConfig
from experiments import model_benchmark, model_profile
from experiments.model_benchmark import BenchmarkConfig
from experiments.model_profile import Inspection
from launch import model_benchmark as launcher
from tests.commands import python

SMALL = {"batch": (1,), "context": (16,), "repeats": 4}


def measured(context, folder):
    """Everything that needs ranks, in one go: a sweep, its inspection, and two benchmarks that are wrong."""
    sweep = BenchmarkConfig(
        **SMALL,
        attention=("naive", "flash"),
        strategy=("bucketed",),
        warmups=(0, 2),
        modes=("forward", "step"),
    )
    records = model_benchmark.run(sweep, context)
    trials = {"naive": TrialConfig(batch=1, context=16, attention="naive", strategy="bucketed")}
    wanted = Inspection(profile=True, profile_ranks=(1,), profile_steps=(1, 2), memory=True, saved=True)
    parts = model_profile.run(trials, wanted, context, folder)
    return {"sweep": records, "parts": parts, "zeros": zeros(context), "full": out_of_memory(context)}


def zeros(context):
    """A model that somebody forgot to initialise."""
    real = trial_module.TransformerLM
    trial_module.TransformerLM = lambda *args, **options: _zeroed(real(*args, **options))
    try:
        config = BenchmarkConfig(**SMALL, modes=("forward_backward",), warmups=(1,))
        return model_benchmark.run(config, context)
    finally:
        trial_module.TransformerLM = real


def _zeroed(model):
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def out_of_memory(context):
    """Rank 1 runs out of memory in the optimizer's step, as the first step with its state does."""
    options = SMALL | {"batch": (1, 2)}
    config = BenchmarkConfig(**options, modes=("forward", "step"), warmups=(0,))
    real = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    if context.rank == 1:
        torch.optim.AdamW.step = step
    try:
        return model_benchmark.run(config, context)
    finally:
        torch.optim.AdamW.step = real


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    return run_ranks(measured, 2, folder)[0] | {"folder": folder}


def test_rows_are_all_combinations_and_each_is_checked(results):
    rows = {record.variant: record.metrics for record in results["sweep"]}
    assert list(rows)[:4] == [
        f"naive, {mode}, warm-up {warmup}" for mode in ("forward", "step") for warmup in (0, 2)
    ]  # fmt: skip
    step = rows["naive, step, warm-up 2"]
    assert step["status"] == "ok" and step["grad_rel_error"] == 0
    parts = [step[f"{phase}_p50_ms"] for phase in ("forward", "backward", "optimizer")]
    assert (
        all(part > 0 for part in parts) and step["step_p20_ms"] <= step["step_p50_ms"] <= step["step_p80_ms"]
    )
    assert 10 <= step["clock_covered_pct"] <= 105 and step["tokens_per_s"] > 0
    assert rows["naive, forward, warm-up 0"]["backward_p50_ms"] is None
    # Both warm-ups are cut from one series: the later one lacks its first two calls.
    series = rows["naive, step, warm-up 0"]["series_ms"]
    assert len(series) == 6 and step["first_ms"] == series[2]
    if not torch.cuda.is_available():
        assert rows["flash, step, warm-up 0"] == {
            "status": rows["flash, step, warm-up 0"]["status"], "loss_rel_error": None, "grad_rel_error": None,
        }  # fmt: skip
        assert "needs a CUDA device" in rows["flash, step, warm-up 0"]["status"]


def test_a_benchmark_that_times_zeros_is_caught(results):
    (row,) = results["zeros"]
    assert "all gradients are zero" in row.metrics["status"] and "step_p50_ms" not in row.metrics


def test_out_of_memory_on_one_rank_is_a_row_and_the_sweep_goes_on(results):
    rows = {record.variant: record.metrics["status"] for record in results["full"]}
    assert rows == {
        "batch 1, forward": "ok",
        "batch 1, step": "OOM",
        "batch 2, forward": "ok",
        "batch 2, step": "OOM",
    }


def test_the_tables_and_pictures_of_a_step_taken_apart(results, tmp_path):
    parts, folder = results["parts"], results["folder"]
    assert set(parts) == {"model_kernels", "model_work", "model_memory", "model_saved"}
    assert [path.name for path in folder.glob("trace*")] == ["trace_naive_rank1.json.gz"]
    assert (folder / "memory_naive.png").stat().st_size > 10_000
    for name, records in parts.items():
        view = model_profile.VIEWS[name]
        (tmp_path / name).mkdir()
        page = write(view, records, tmp_path / name)
        assert page.exists() and "naive: " in view.table(records)
    work = {record.variant.removeprefix("naive: "): record.metrics for record in parts["model_work"]}
    assert work["communication"]["kernel_ms"] > 0 and work["communication"]["flops"] == 0
    assert sum(m["of_kernel_time_pct"] for m in work.values()) == pytest.approx(100)
    assert sum(m["of_flops_pct"] for m in work.values()) == pytest.approx(100)
    assert work["matrix products"]["of_flops_pct"] > 80
    assert "timer's step" in model_profile.work_findings(parts["model_work"])[0]
    assert {r.metrics["phase"] for r in parts["model_kernels"]} == {"forward", "backward", "optimizer"}
    # The buckets were there before the step, and hold the gradients of it.
    held = parts["model_memory"][0].metrics
    assert held["at_peak_gradients_bytes"] > 0.9 * held["at_peak_parameters_bytes"] > 0
    saved = {record.variant.removeprefix("naive: "): record.metrics for record in parts["model_saved"]}
    whole = {form: saved[f"{form}, all"]["saved_block_bytes"] for form in ("eager", "compiled", "ours")}
    assert whole["compiled"] < whole["eager"] and whole["ours"] < whole["eager"]
    # The closed form is the GPU's; a CPU writes each norm out and keeps two more tensors of it. Then the mask.
    norms, mask = 2 * 2 * 16 * 128 * 4, 16 * 16
    assert whole["eager"] == saved["eager, all"]["predicted_saved_block_bytes"] + norms + mask
    assert saved["eager, 1"]["of_block_pct"] >= saved["eager, 5"]["of_block_pct"] > 0


def test_the_pictures_of_a_sweep(results, tmp_path):
    page = write(model_benchmark.VIEW, results["sweep"], tmp_path)
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"steps.png", "warmup.png"} and "flash, step" in page.read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"modes": ("backward",)}, "inference"), ({"repeats": 2}, "at least 3"), ({"warmups": (-1,)}, "none below 0"),
     ({"size": ()}, "at least one value")],
)  # fmt: skip
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        BenchmarkConfig(**wrong)


def test_inspections_that_cannot_be():
    with pytest.raises(ValueError, match="first <= last"):
        Inspection(profile_steps=(3, 2))
    with pytest.raises(ValueError, match="none below 0"):
        Inspection(profile_ranks=(-1,))


def test_kernel_names_are_cut_to_what_says_something():
    assert (
        model_profile.short_name("void cutlass::Kernel2<cutlass_80_tensorop(int)>(Params)")
        == "cutlass::Kernel2"
    )
    long = model_profile.short_name(
        "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>"
    )
    assert long == "vectorized_elementwise_kernel<4, MulFunctor<float>>"
    assert len(model_profile.short_name("aten::" + "x" * 100)) == 64


def test_options_become_combinations():
    options = "--size tiny small --context 16 --dtype fp32 bf16 --compile --mode step --warmup 0 1"
    args = launcher.parser().parse_args([*options.split(), "--checkpointing", "none", "every-2"])
    config = launcher.config_of(args)
    assert len(config.trials()) == 8 and config.compile == ("model",) and config.warmups == (0, 1)
    assert config.label(config.trials()[1]) == "tiny, fp32, checkpointing every-2"


@pytest.mark.commands
def test_the_quick_form_takes_everything_apart_within_a_minute(tmp_path):
    command = [
        "launch/model_benchmark.py",
        "--quick",
        "--profile",
        "--memory-snapshot",
        "--saved",
        "--out",
        tmp_path,
    ]
    result = python(*command, timeout=60)
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.strip().splitlines()[-1])
    assert last["experiment"] == "model_benchmark" and len(last["records"]) == 4
    assert all(math.isfinite(row["metrics"]["step_p50_ms"]) for row in last["records"])
