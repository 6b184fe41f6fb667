"""A user's model through `--model`: right with every strategy whose contract admits it, the others
say why not.
"""

import re
from dataclasses import replace

import pytest

from distlab.bench.task import examined, own_task
from distlab.parallel import strategies_on
from distlab.testing import run_ranks
from experiments import ddp_bench, memory_breakdown, model_benchmark, plan
from experiments._own_model import simulated
from tests.experiments.frame import measured

OURS = "tests.bench.own_models:"
SHORT = {
    "batch": 4,
    "steps": 5,
    "rounds": 1,
    "warmup": 1,
    "profile_steps": 0,
    "bucket_sizes_mb": (0.002,),
}
UNUSED = {  # a part of what each says
    "fsdp": "gathers the same units on every rank",
    "fsdp2": "gathers the same units on every rank",
    "torch-ddp": "waits for a gradient of every parameter",
    "torch-ddp-tuned": "waits for a gradient",
    "torch-zero": "waits for a gradient of every parameter",
    "hsdp": "gathers the same units on every rank",
    "torch-hsdp": "gathers the same units on every rank",
}


@pytest.mark.parametrize(
    "name, strategies",
    [
        ("mixture", strategies_on("cpu")),
        ("bert", ("local", "bucketed", "zero1", "fsdp2")),
        ("resnet", ("local", "zero1", "fsdp")),
        ("dictionary", ("local", "bucketed")),
        ("compiled_blocks", ("local", "bucketed", "zero1", "fsdp", "fsdp2")),
        ("compiled_here", ("local", "naive", "bucketed", "zero1", "torch-ddp")),
    ],
)
def test_ddp_bench_takes_it_with_every_strategy_that_can(name, strategies, tmp_path):
    records = measured(
        ddp_bench.EXPERIMENT,
        tmp_path,
        factory=OURS + name,
        strategies=strategies,
        check_steps=2,
        **SHORT,
    )
    rows = {record.variant: record for record in records}
    assert set(rows) == set(strategies)
    left_out = {
        row: record.metrics["refusal"]
        for row, record in rows.items()
        if "refusal" in record.metrics
    }
    assert set(left_out) == (set(UNUSED) if name == "mixture" else set())
    assert all(
        UNUSED[row] in text and "'experts." in text and "\n" not in text
        for row, text in left_out.items()
    )
    for row in set(rows) - set(left_out) - {"local"}:
        assert rows[row].metrics["verdict"] == "right", row  # dropout included
        assert (
            rows[row].metrics["examples_per_s"] > 0 and rows[row].metrics["comm_bytes_per_step"] > 0
        )
    assert (
        rows["local"].config["size"] == OURS + name and rows["local"].config["num_parameters"] > 100
    )
    assert len(rows["local"].config["model_commit"].removesuffix("-dirty")) == 40
    assert (
        "Left out: fsdp " in (tmp_path / "ddp_bench/run/report.html").read_text()
        or name != "mixture"
    )


def test_a_peer_that_sends_nothing_is_nobody_s_baseline(tmp_path):
    """Its step is the fastest of all, and every ratio divided by it."""
    rows = ("local", "bucketed", "torch-ddp-tuned")
    records = measured(
        ddp_bench.EXPERIMENT, tmp_path, factory=f"{OURS}returns_dataclass", strategies=rows, **SHORT
    )
    metrics = {record.variant: record.metrics for record in records}
    assert [name for name in rows if metrics[name]["sent_nothing"]] == ["torch-ddp-tuned"]
    assert (
        not any("vs_torch_ddp" in each for each in metrics.values())
        and metrics["bucketed"]["vs_local"] > 0
    )
    differs, said = (
        line for line in ddp_bench.EXPERIMENT.view.findings(records) if line.startswith("WRONG")
    )
    assert said.startswith(
        "WRONG: torch-ddp-tuned: sent nothing, so no row is compared with it; torch's static_graph"
    )
    assert (
        differs.startswith("WRONG: torch-ddp-tuned: ")
        and "tensors differ from one process" in differs
    )


WRAPPERS = "tests.bench.own_wrappers:"


def test_a_users_wrapper_is_a_row(tmp_path):
    """Right ones are compared, wrong ones are printed as wrong, one that raises does not end the
    run.
    """
    wraps = [WRAPPERS + name for name in ("overlapped", "summed", "silent", "raising")]
    choice = {"factory": "tests.bench.odd_values:large", "check_steps": 2, **SHORT}
    choice |= {"strategies": ("local", "bucketed", "torch-ddp"), "wraps": tuple(wraps)}
    records = measured(ddp_bench.EXPERIMENT, tmp_path, **choice)
    found = {record.variant.removeprefix(WRAPPERS): record.metrics for record in records}
    verdicts = {name: metrics.get("verdict") for name, metrics in found.items()}
    assert verdicts == {
        "local": None,
        "bucketed": "right",
        "torch-ddp": "right",
        "overlapped": "right",
        "summed": "WRONG",
        "silent": "WRONG, sent nothing",
        "raising": "failed",
    }
    parameters = 16 * 32 + 32 + 32 * 4 + 4
    assert found["overlapped"]["collectives_per_step"] == 4
    assert found["overlapped"]["comm_bytes_per_step"] == 4 * parameters
    assert found["overlapped"]["vs_local"] > 0 and "vs_local" not in found["summed"]
    assert found["raising"]["step_p50_ms"] == "failed" and found["silent"]["sent_nothing"]
    lines = ddp_bench.EXPERIMENT.view.findings(records)
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert (
        len(wrong) == 4
        and "× P: summed over ranks" in wrong[0]
        and "raised on every rank: the training step failed at own_wrappers.py:" in wrong[2]
        and "a bug of the user's" in wrong[2]
    )


@pytest.mark.parametrize("name, ranks", [("bf16", 2), ("large", 3)])
def test_nobody_is_accused_of_rounding(name, ranks, tmp_path):
    """FSDP has fp32 copies of bf16 parameters, and gradients of data around ±100 round by more than
    1e-5.
    """
    choice = {"factory": f"tests.bench.odd_values:{name}", "check_steps": 2, **SHORT}
    choice |= {
        "strategies": ("local", "bucketed", "fsdp", "torch-ddp"),
        "wraps": (WRAPPERS + "summed",),
    }
    records = measured(replace(ddp_bench.EXPERIMENT, nproc=ranks), tmp_path, **choice)
    verdicts = {record.variant: record.metrics.get("verdict") for record in records}
    assert verdicts.pop(WRAPPERS + "summed") == "WRONG" and verdicts.pop("local") is None
    assert set(verdicts.values()) == {"right"}, verdicts


def test_memory_is_measured_and_predicted(tmp_path):
    choice = {"factory": f"{OURS}bert", "strategies": ("bucketed", "fsdp"), "batch": 4}
    for metrics in (
        record.metrics for record in measured(memory_breakdown.EXPERIMENT, tmp_path, **choice)
    ):
        assert metrics["predicted_peak_alloc_bytes"] > metrics["parameters_bytes"] > 0
        assert metrics["predicted_peak_parameters_bytes"] == pytest.approx(
            metrics["parameters_bytes"], rel=0.02
        )


def test_a_step_is_profiled_and_its_memory_drawn(tmp_path):
    (step,) = measured(
        model_benchmark.EXPERIMENT,
        tmp_path,
        factory=f"{OURS}dictionary",
        profile=True,
        memory=True,
        modes=("step",),
        batch=(4,),
    )
    assert step.metrics["status"] == "ok" and step.metrics["examples_per_s"] > 0
    assert list((tmp_path / "model_benchmark/run").glob("memory_*dictionary*.png"))


def test_plan_steps_it_in_the_fake_world(tmp_path):
    fields = {
        "model": f"{OURS}resnet",
        "batch": 64,
        "device": "h100:8",
        "strategies": ("bucketed", "zero1"),
    }
    rows = measured(plan.EXPERIMENT, tmp_path, **fields)
    assert {row.config["strategy"] for row in rows if row.metrics["fits"]} == {"bucketed", "zero1"}
    best = rows[0].metrics
    assert best["predicted_examples_per_s"] == pytest.approx(64 / best["predicted_step_ms"] * 1e3)


def test_a_sharded_optimizer_is_predicted_to_hold_a_part():
    whole, part = (simulated(f"{OURS}bert", strategy, 4, 8) for strategy in ("bucketed", "zero1"))
    assert part.peak.by_category["optimizer"] < 0.2 * whole.peak.by_category["optimizer"]
    with pytest.raises(ValueError, match="cannot be stepped under naive on tensors without values"):
        simulated(f"{OURS}mixture", "naive", 4, 8)


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "fails",
            r"fails\(\) failed at own_models.py:\d+ \(RuntimeError: no such file of weights\)",
        ),
        (
            "fails_in_torch",
            r"loss\(model, batch\) failed at own_models.py:\d+ \(RuntimeError: mat1",
        ),
        ("bare_module", r"build\(\) must return \(module, batch, loss\): .*; it returned Linear"),
        (
            "vector_loss",
            r"must return a scalar tensor with a gradient, or .*, not a tensor of shape \(4, 10\)",
        ),
        (
            "batch_without_generator",
            r"batch\(size, generator\) failed \(TypeError: batch_without_generator",
        ),
        ("frozen", "the module has no parameter to train"),
        ("gone", "tests.bench.own_models has no function 'gone'"),
    ],
)
def test_a_wrong_factory_is_one_message(name, said):
    (message,) = run_ranks(messages, 1, name)
    assert (
        re.search(said, message)
        and message.startswith(f"--model {OURS}{name}: ")
        and "\n" not in message
    )


def messages(context, name):
    try:
        examined(OURS + name, own_task(OURS + name, 4), context)
    except ValueError as error:
        return str(error)
