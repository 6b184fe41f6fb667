"""Chains of operations as one kernel: right against float64, their traffic by hand, and what is
said of them.
"""

from functools import partial

import pytest
import torch

from distlab.hardware import H100_SXM
from distlab.measure.memory_traffic import KINDS
from distlab.report import Record, ratio_metrics
from distlab.theory.fusion import advise
from experiments.kernel_roofline import EXPERIMENT, chain_kernel
from experiments.kernel_roofline.chains import (
    CHAINS,
    TRAFFIC,
    accounts,
    applied,
    chain_case,
    chain_graph,
    chain_operation,
    in_one_kernel,
)
from experiments.kernel_roofline.tables import compare
from kernels import _dispatch
from tests.experiments.frame import measured
from tests.experiments.noisy import Noise, each_seed, side_of_one
from tests.kernels.fused import DEVICE, TOLERANCE
from tests.kernels.near import near

MORE = (
    ("exp", "rms_norm"),
    ("add", "plus_one", "softmax"),
    ("rms_norm",),
    ("add", "softmax", "silu"),
    ("layer_norm", "scale", "bias", "silu"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "chain", [chain for chain in (*CHAINS, *MORE) if in_one_kernel(chain)], ids="+".join
)
@pytest.mark.parametrize("shape", [(3, 7), (5, 1000)], ids=str)
def test_one_kernel_against_float64(chain, dtype, shape, monkeypatch):
    operation = chain_operation(chain, shape, dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(each.shape, generator=generator).to(DEVICE, dtype) for each in operation.inputs
    ]
    launches, launch = [], chain_kernel.launch
    monkeypatch.setattr(
        chain_kernel, "launch", lambda x, **how: launches.append(how) or launch(x, **how)
    )
    found = operation.ours(*inputs)
    exact = applied(chain, naive=True)(*(tensor.double() for tensor in inputs))
    near(found, exact, TOLERANCE[dtype])
    assert found.dtype == dtype and len(launches) == 1
    monkeypatch.setattr(_dispatch, "runs_triton", lambda tensor: False)
    near(operation.ours(*inputs), found, TOLERANCE[dtype])  # without Triton


def test_what_the_kernel_has_no_form_for():
    for chain in (
        ("bias", "gelu"),
        ("silu", "rms_norm"),
        ("rms_norm", "softmax"),
        ("rms_norm", "add"),
    ):
        assert in_one_kernel(chain) is None
    assert "ours" not in chain_case(("bias", "gelu")).operation.variants


def test_the_traffic_of_a_chain():
    """Residual + RMSNorm + SiLU: three, two and two tensors one by one.

    Three fused, four where the sum is stored.
    """
    tensor = 8192 * 4096 * 2
    graph = chain_graph(("add", "rms_norm", "silu"), (8192, 4096), 2)
    vector = 4096 * 2
    assert (
        graph.unfused().bytes == 7 * tensor + vector and graph.fused().bytes == 3 * tensor + vector
    )


def test_the_traffic_of_exp_plus_one_and_the_division_by_the_sum_of_a_row():
    """Two, two, one and two tensors one by one, and two fused: 3.5 times the bytes."""
    tensor = 8192 * 4096 * 2
    sums = 8192 * 2
    graph = chain_graph(("exp", "plus_one", "normalize"), (8192, 4096), 2)
    assert [operator.name for operator in graph.operators] == [
        "exp 0",
        "plus_one 1",
        "sum 2",
        "divide 2",
    ]
    assert graph.unfused().bytes == 7 * tensor + 2 * sums and graph.fused().bytes == 2 * tensor
    (group,) = advise(graph, H100_SXM).groups
    assert len(group) == 4


def test_chains_in_small(smoke, tmp_path):
    records = measured(EXPERIMENT, tmp_path, only=(), chain=("bias", "silu", "multiply"))
    assert {r.variant: r.metrics["status"] for r in records} == dict.fromkeys(
        ("naive", "builtin"), "ok"
    )
    records, folder = smoke(EXPERIMENT.name)
    assert {r.variant for r in records if "layer_norm" in r.config["label"]} == {
        "ours",
        "naive",
        "builtin",
    }
    page = folder / "parts" / TRAFFIC.name / "table.md"
    text = page.read_text()
    assert (
        "one by one, in fp32" in text
        and "the advisor makes 1 kernel(s) of it, add + layer_norm" in text
    )


@pytest.mark.parametrize("chain", [("add", "layer_norm"), ("bias", "gelu")], ids="+".join)
def test_noise_makes_no_advice(chain, few_resamples):
    each_seed(partial(advice_follows_intervals, chain))


def advice_follows_intervals(chain, seed):
    """Of made-up runs: a kernel pays, or Inductor's, where the interval of their ratio says so."""
    noise = Noise(seed)
    case = chain_case(chain)
    config = {
        "label": "x",
        "chain": chain,
        "direction": "fwd",
        "shape": case.shape,
        "dtype": case.dtype,
    }
    limits = {f"{kind}_gb_per_s": 1000.0 for kind in (*KINDS, "rows")} | {"empty_kernel_ms": 0.001}
    records = []
    for variant in ("naive", "builtin", "compile", "ours"):
        if variant in case.operation.variants or variant == "compile":
            metrics = {"status": "ok"} | limits | noise.metrics("time")
            records.append(Record(EXPERIMENT.name, variant, config, metrics, {}, None))
    records = compare(records)
    (line,) = TRAFFIC.findings(accounts(records))
    by_name = {record.variant: record for record in records}
    if "ours" in by_name:
        ratio = ratio_metrics("over_inductor", by_name["ours"], by_name["compile"], "time")
        side = side_of_one(ratio, "over_inductor")
        claims = {"faster": "a kernel of one's own pays", "slower": "leave it to Inductor"}
    else:
        side = side_of_one(by_name["compile"].metrics, "over_builtin")
        claims = {"faster": ": the fusion pays", "slower": "the fusion does not pay"}
    claims["unclear"] = "this run cannot tell"
    assert [name for name, text in claims.items() if text in line] == [side], line
