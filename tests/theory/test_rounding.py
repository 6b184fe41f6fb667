"""Formats in integer arithmetic against torch's own rounding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.theory.rounding import (
    FORMATS,
    overflow_share,
    repeated_sum,
    safe_loss_scales,
    stalls_at,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FINITE = (
    st.floats(-1e38, 1e38)
    | st.floats(-7e4, 7e4)
    | st.floats(-1e-4, 1e-4)
    | st.floats(-1e-40, 1e-40)
)


@given(st.sampled_from(list(FORMATS)), FINITE)
def test_rounding_is_torchs(name, x):
    assert FORMATS[name].nearest(x) == torch.tensor(x, dtype=torch.float64).to(DTYPES[name]).item()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_sum_stalls_where_it_is_said_to(name):
    held = FORMATS[name]
    limit = stalls_at(0.01, held)
    assert held.nearest(limit + 0.01) == limit and held.nearest(limit / 2 + 0.01) > limit / 2
    assert repeated_sum(0.01, 10_000, held, FORMATS["fp32"]) == limit


def test_overflow_and_the_window_of_loss_scales():
    assert overflow_share(1.0, 1, 1.959964) == pytest.approx(0.05, rel=1e-4)
    assert overflow_share(1.0, 10, 1e9) == 0
    low, high = safe_loss_scales(10_000, 4096)
    uniform = torch.tensor(1 / 10_000 / 4096, dtype=torch.float64)
    assert (uniform * 1.01 * low).half() > 0 == (uniform * 0.99 * low).half()
    assert math.isfinite(high / 4096) and (torch.tensor(high / 4096) * 1.01).half().isinf()
