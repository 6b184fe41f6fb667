"""The benchmark of a model's parts and the taking apart of its step, on two gloo ranks; broken ones are caught."""

import json
import math
import os
import shutil
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from distlab.bench import subject as bench_subject
from distlab.bench.subject import TrialConfig
from distlab.model import TransformerLM
from distlab.report.view import write
from distlab.testing import run_ranks
from experiments import model_benchmark, model_profile
from experiments.model_benchmark import BenchmarkConfig
from experiments.model_profile import Inspection, residuals, work
from launch import model_benchmark as launcher
from tests.commands import python

SMALL = {"batch": (1,), "context": (16,), "repeats": 4}
NAIVE = {"naive": TrialConfig(batch=1, context=16, attention="naive", strategy="bucketed")}


def measured(context, folder):
    """What needs ranks: a sweep in which one of them fails, and a step with communication taken apart."""
    sweep = BenchmarkConfig(
        **SMALL,
        attention=("sdpa", "naive", "flash"),
        strategy=("bucketed",),
        warmups=(0, 2),
        modes=("forward", "step"),
    )
    # Interpreted kernels are off, as a user without a GPU finds them, whatever the tests of kernels set.
    with memory_runs_out_once(context.rank == 1), patch.dict(os.environ, TRITON_INTERPRET="0"):
        records = model_benchmark.run(sweep, context)
    wanted = Inspection(profile=True, profile_ranks=(1,), profile_steps=(1, 2), memory=True)
    return {"sweep": records, "parts": model_profile.run(NAIVE, wanted, context, folder)}


@contextmanager
def memory_runs_out_once(here):
    """In this rank's first optimizer step, which takes the memory of the optimizer's state."""
    real, calls = torch.optim.AdamW.step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *args, **kwargs)

    if here:
        torch.optim.AdamW.step = step
    try:
        yield
    finally:
        torch.optim.AdamW.step = real


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    return run_ranks(measured, 2, folder, deadline_s=240, group_timeout_s=120)[0] | {"folder": folder}


def test_rows_are_all_combinations_and_each_is_checked(results):
    rows = {record.variant: record.metrics for record in results["sweep"]}
    assert list(rows) == [
        f"{attention}, {mode}, warm-up {warmup}"
        for attention in ("sdpa", "naive", "flash")
        for mode in ("forward", "step")
        for warmup in (0, 2)
    ]
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


def test_what_fails_is_a_row_and_the_sweep_goes_on(results):
    """Memory runs out on one of two ranks, and flash attention has no GPU: rows on both, and more rows after them."""
    rows = {record.variant: record.metrics for record in results["sweep"]}
    assert rows["sdpa, forward, warm-up 0"]["status"] == "ok"
    assert rows["sdpa, step, warm-up 0"]["status"] == rows["sdpa, step, warm-up 2"]["status"] == "OOM"
    assert "step_p50_ms" not in rows["sdpa, step, warm-up 0"]
    if not torch.cuda.is_available():
        assert set(rows["flash, step, warm-up 0"]) == {"status", "loss_rel_error", "grad_rel_error"}
        assert "needs a CUDA device" in rows["flash, step, warm-up 0"]["status"]


def test_a_benchmark_that_times_zeros_is_caught(one_rank, monkeypatch):
    """A model that somebody forgot to initialise."""

    def zeroed(*args, **options):
        model = TransformerLM(*args, **options)
        for parameter in model.parameters():
            parameter.data.zero_()
        return model

    monkeypatch.setattr(bench_subject, "TransformerLM", zeroed)
    (row,) = model_benchmark.run(
        BenchmarkConfig(**SMALL, modes=("forward_backward",), warmups=(1,)), one_rank
    )
    assert "all gradients are zero" in row.metrics["status"] and "step_p50_ms" not in row.metrics


def test_what_forms_of_a_block_save(one_rank, tmp_path):
    found = model_profile.run(NAIVE, Inspection(saved=True), one_rank, tmp_path)["model_saved"]
    saved = {record.variant.removeprefix("naive: "): record.metrics for record in found}
    whole = {form: saved[f"{form}, all"]["saved_block_bytes"] for form in ("eager", "compiled", "ours")}
    assert whole["compiled"] < whole["eager"] and whole["ours"] < whole["eager"]
    # The closed form is the GPU's; a CPU writes each norm out and keeps two more tensors of it. Then the mask.
    norms, mask = 2 * 2 * 16 * 128 * 4, 16 * 16
    assert whole["eager"] == saved["eager, all"]["predicted_saved_block_bytes"] + norms + mask
    assert saved["eager, 1"]["of_block_pct"] >= saved["eager, 5"]["of_block_pct"] > 0
    page = write(residuals.VIEW, found, tmp_path)
    assert "made by" in page.read_text() and len(residuals.saved_findings(found)) == 3


def test_the_tables_and_pictures_of_a_step_taken_apart(results, tmp_path):
    parts, folder = results["parts"], results["folder"]
    assert set(parts) == {"model_kernels", "model_work", "model_memory"}
    assert [path.name for path in folder.glob("trace*")] == ["trace_naive_rank1.json.gz"]
    assert (folder / "memory_naive.png").stat().st_size > 10_000
    for name, records in parts.items():
        view = model_profile.VIEWS[name]
        (tmp_path / name).mkdir()
        page = write(view, records, tmp_path / name)
        assert page.exists() and "naive: " in view.table(records)
    kinds = {record.variant.removeprefix("naive: "): record.metrics for record in parts["model_work"]}
    assert kinds["communication"]["kernel_ms"] > 0 and kinds["communication"]["flops"] == 0
    assert sum(m["of_kernel_time_pct"] for m in kinds.values()) == pytest.approx(100)
    assert sum(m["of_flops_pct"] for m in kinds.values()) == pytest.approx(100)
    assert kinds["matrix products"]["of_flops_pct"] > 80
    assert "timer's step" in work.work_findings(parts["model_work"])[0]
    assert {r.metrics["phase"] for r in parts["model_kernels"]} == {"forward", "backward", "optimizer"}
    # The buckets were there before the step, and hold the gradients of it.
    held = parts["model_memory"][0].metrics
    assert held["at_peak_gradients_bytes"] > 0.9 * held["at_peak_parameters_bytes"] > 0


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
    assert work.short_name("void cutlass::Kernel2<cutlass_80_tensorop(int)>(Params)") == "cutlass::Kernel2"
    long = work.short_name("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>")
    assert long == "vectorized_elementwise_kernel<4, MulFunctor<float>>"
    assert len(work.short_name("aten::" + "x" * 100)) == 64


def test_options_become_combinations():
    options = "--size tiny small --context 16 --dtype fp32 bf16 --compile --mode step --warmup 0 1"
    args = launcher.parser().parse_args([*options.split(), "--checkpointing", "none", "every-2"])
    config = launcher.config_of(args)
    assert len(config.trials()) == 8 and config.compile == ("model",) and config.warmups == (0, 1)
    assert config.label(config.trials()[1]) == "tiny, fp32, checkpointing every-2"


def test_the_command_for_nsight_starts_as_many_ranks_as_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: f"bin/{name}")
    monkeypatch.setattr("sys.argv", ["launch/model_benchmark.py", "--size", "small"])  # of a rank: no --nproc
    launcher.say_nsys(tmp_path, 4, launcher.parser().parse_args(["--size", "small"]))
    said = capsys.readouterr().out
    assert "--nproc-per-node=4" in said and said.endswith("launch/model_benchmark.py --size small --nvtx\n\n")


def test_nvtx_without_a_gpu_is_refused_before_ranks_start(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launcher.main(["--nvtx"]) == 2
    assert capsys.readouterr().err.count("CUDA device") == 1


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
