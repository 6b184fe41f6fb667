"""The parts of the study on a small model: what is predicted is what comes out, and what must break
breaks.
"""

import pytest
import torch

from experiments import mixed_precision
from experiments.mixed_precision import layer_norm


@pytest.fixture(scope="module")
def records(smoke):
    return smoke("mixed_precision")[0]


def rows(records, part):
    return {(r.variant, r.config["on"]): r.metrics for r in records if r.config["part"] == part}


def test_sums_are_those_of_rounding_in_integers(records):
    sums = rows(records, "accumulation")
    assert len(sums) == 7 and all(m["sum"] == m["predicted_sum"] for m in sums.values())


def test_types_under_autocast(records):
    of = {
        key: (m["type_under_fp16"], m["type_under_bf16"])
        for key, m in rows(records, "types").items()
    }
    whole = ("parameters", "loss", "gradients", "residual stream")
    assert {of[part, "Transformer"] for part in ("attention.qkv", "feed_forward.w2", "head")} == {
        ("fp16", "bf16")
    }
    assert {of[part, "Transformer"] for part in whole} == {("fp32", "fp32")} and of[
        "fc1", "toy"
    ] == ("fp16", "bf16")


def test_statistics_want_fp32(records):
    found = rows(records, "norm")
    tolerance = {"fp16": 1e-3, "bf16": 4e-3}
    for (variant, _), metrics in found.items():
        low, _, statistics = variant.partition(", statistics ")
        if statistics == "fp32":
            assert metrics["relative_error"] < tolerance[low]
        assert metrics["lost_rows_pct"] == pytest.approx(
            metrics["predicted_lost_rows_pct"], abs=3
        ), variant
    assert found["fp16, statistics fp16", "deviation 64"]["lost_rows_pct"] > 1
    assert found["bf16, statistics bf16", "mean 100"]["relative_error"] > 0.01
    x = torch.randn(4, 32, dtype=torch.float64)
    assert torch.allclose(layer_norm(x), torch.nn.functional.layer_norm(x, (32,)))


def test_small_gradients_need_a_scale_in_fp16_and_none_in_bf16(records):
    found = {variant: m for (variant, _), m in rows(records, "scaling").items()}
    assert found["fp16"]["underflow_pct"] > 50
    for name in ("fp16", "fp16 × 2^12"):
        assert found[name]["underflow_pct"] == pytest.approx(
            found[name]["predicted_underflow_pct"], abs=0.5
        )
    assert found["fp16 × 2^12"]["underflow_pct"] == found["bf16"]["underflow_pct"] == 0
    assert found["fp16 × 2^40"]["nonfinite_pct"] > 0 == found["fp16 × 2^12"]["nonfinite_pct"]
    words = " ".join(mixed_precision.findings(records))
    assert "stalls at 4" in words and "scales from 2^12 to 2^12" in words
