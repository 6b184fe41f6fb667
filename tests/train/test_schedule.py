"""The learning rate and the loss scale."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.train.config import TrainConfig
from distlab.train.scaler import LossScaler
from distlab.train.schedule import WarmupCosine


@given(st.integers(1, 200), st.integers(0, 200), st.floats(0, 1))
def test_rises_to_the_peak_then_falls_to_the_floor(steps, warmup, floor):
    schedule = WarmupCosine(2.0, steps, min(warmup, steps), floor)
    rates = [schedule(step) for step in range(steps + 2)]
    top = max(schedule.warmup - 1, 0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert all(a >= b - 1e-12 for a, b in zip(rates[top:], rates[top + 1 :], strict=False))
    assert rates[-1] == pytest.approx(2.0 * floor)
    assert min(rates) > 0 or floor == 0


def test_known_values():
    schedule = WarmupCosine(1.0, 12, 2, 0.1)
    assert [schedule(0), schedule(1), schedule(2)] == [0.5, 1.0, 1.0]
    assert schedule(7) == pytest.approx(0.1 + 0.9 * 0.5)  # half-way down


BAD = {"lr": 0.0, "steps": 0, "warmup": -1, "lr_floor": 1.5, "batch": 0, "keep": 0}


@pytest.mark.parametrize("name, value", BAD.items())
def test_refusals(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*: give"):
        TrainConfig(**{name: value})


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps():
    scaler = LossScaler(scale=8.0, growth_interval=2)
    for finite, expected in (
        (True, 8.0),
        (True, 16.0),
        (True, 16.0),
        (False, 8.0),
        (True, 8.0),
        (True, 16.0),
    ):
        scaler.update(finite)
        assert scaler.scale == expected
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.scale == 16.0
    for _ in range(5):
        other.update(False)
    assert other.scale == 1.0  # and no less
