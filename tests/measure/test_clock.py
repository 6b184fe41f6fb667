"""Clocks measure what they say, and refuse to conclude from too little."""

import math
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distlab.measure import clock, interleaved
from distlab.measure.clock import PhaseTimer, measure, slowest_rank
from distlab.measure.interleaved import noise_floor, own_noise_floor, paired_ratio, percentiles
from distlab.measure.memory import peak_memory


def test_percentiles_interpolate():
    assert percentiles([4, 0, 1, 2, 3]) == pytest.approx({"p20": 0.8, "p50": 2.0, "p80": 3.2})


@pytest.mark.parametrize("samples", [[1.0, 2.0], [1.0, 2.0, math.nan]])
def test_percentiles_refuse(samples):
    with pytest.raises(ValueError, match="percentiles"):
        percentiles(samples)


def test_measure_times_each_repetition_and_no_warm_up(monkeypatch):
    now = 0.0
    durations_s = iter([9.0, 9.0, 0.001, 0.002, 0.003])

    def work():
        nonlocal now
        now += next(durations_s)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    assert measure(work, warmup=2, repeats=3, device="cpu") == pytest.approx([1, 2, 3])


def test_phases_add_up_to_the_step():
    timer = PhaseTimer("cpu")
    for _ in range(2):
        timer.start()
        time.sleep(0.004)
        timer.mark("forward_backward")
        time.sleep(0.002)
        timer.mark("optimizer")
        time.sleep(0.004)
        timer.mark("forward_backward")
    steps = timer.steps()
    assert len(steps) == 2
    for step in steps:
        assert step["forward_backward"] >= 8 and step["optimizer"] >= 2
        assert step["step"] == pytest.approx(step["forward_backward"] + step["optimizer"])
    for _ in timer.each(2, warmup=1):
        timer.mark("optimizer")
    assert len(timer.steps()) == 2  # what was before is forgotten, the warm-up too
    timer.clear()
    assert timer.steps() == []


@pytest.mark.gpu
def test_cuda_clocks_see_kernels_that_the_host_does_not_wait_for():
    timer = PhaseTimer("cuda")
    timer.start()
    torch.cuda._sleep(200_000_000)
    began = time.perf_counter()
    timer.mark("kernel")
    assert time.perf_counter() - began < 0.02  # marking did not wait for the kernel
    assert timer.steps()[0]["kernel"] > 50
    assert (
        min(measure(lambda: torch.cuda._sleep(20_000_000), warmup=1, repeats=3, device="cuda")) > 5
    )
    with peak_memory("cuda") as peak:
        torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert peak.peak_alloc_bytes >= 2**20


@pytest.mark.gpu
def test_replays_of_a_graph_take_what_the_device_takes():
    x = torch.ones(2**26, device="cuda")
    times = clock.replayed(lambda: x.mul_(1.0), calls=(5, 20))(5)
    eager = measure(lambda: x.mul_(1.0), warmup=3, repeats=5, device="cuda")
    assert len(times) == 5 and 0.5 * min(eager) < min(times) < 1.5 * max(eager)
    assert (x == 1).all()


@pytest.mark.gpu
def test_a_graph_uses_the_memory_of_a_living_one():
    x = torch.ones(2**26, device="cuda")
    first = clock.replayed(lambda: x + 1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    second = clock.replayed(lambda: x * 2, beside=first.graph)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before and min(first(3) + second(3)) > 0


def test_a_call_in_a_loop_has_a_time_of_the_host_and_one_until_the_device_is_done(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def advance(seconds):
        now[0] += seconds

    monkeypatch.setattr(clock, "synchronize", lambda device: advance(0.010))
    found = clock.call_ms(lambda: advance(0.002), repeats=3, block_ms=17.0)
    calls = int(17 / (2 + 10 / 3))
    assert found["host"] == pytest.approx([2.0] * 3) and found["wall"] == pytest.approx(
        [2 + 10 / calls] * 3
    )


def test_a_series_has_a_noise_floor_of_its_own():
    assert own_noise_floor([1.0, 2.0] * 4) is None  # too few for a bootstrap of pairs
    assert own_noise_floor([1.0] * 10) == 0 and own_noise_floor([1.0, 1.1] * 8 + [5.0]) > 5
    assert own_noise_floor([1.0] * 10 + [2.0] * 10) == 0  # neighbours share a drift, halves do not


def test_steps_that_alternate_do_not_count_as_two_variants():
    """In one record, every second step was 1.5 % longer. Both halves hold as many of them."""
    generator = random.Random(1)
    steps = [100 + 1.5 * (number % 2) + generator.gauss(0, 0.4) for number in range(24)]
    aliased = noise_floor(steps[0::2], steps[1::2])
    assert aliased > 1.5 and own_noise_floor(steps) < 0.85 * aliased
    steady = [100 + generator.gauss(0, 0.4) for _ in range(24)]
    assert own_noise_floor(steady) == pytest.approx(noise_floor(steady[0::2], steady[1::2]), rel=1)


@pytest.mark.ranks(2)
def test_the_slowest_rank_counts_and_a_nan_is_not_lost(context):
    samples = [1.0 + context.rank, 10.0 - context.rank, math.nan if context.rank == 1 else 0.0]
    found = slowest_rank(samples, context.group, context.device)
    assert found[:2] == [2.0, 10.0] and math.isnan(found[2])


def test_pairs_cancel_the_drift_that_hits_both():
    rng = np.random.default_rng(1)
    drift = rng.uniform(1, 3, size=40)
    b = drift * rng.normal(1, 0.001, size=40)
    ratio, low, high = paired_ratio(1.1 * drift, b)
    assert low <= ratio <= high
    assert ratio == pytest.approx(1.1, abs=0.01) and high - low < 0.05
    unpaired = paired_ratio(1.1 * drift, rng.permutation(b))
    assert unpaired.high - unpaired.low > 5 * (high - low)


def test_the_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(interleaved, "RESAMPLES", 500)
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        a, b = rng.lognormal(0, 0.1, size=(2, 30))
        _, low, high = paired_ratio(a, b)
        hits += low <= 1 <= high
    # 95 expected, standard deviation 2.2; the bootstrap of a median is a little off
    assert hits >= 88


def test_a_variant_against_itself_has_a_noise_floor():
    rng = np.random.default_rng(0)
    quiet, loud = (noise_floor(*rng.normal(100, sigma, size=(2, 30))) for sigma in (0.1, 5))
    assert 0 < quiet < 0.5 < loud < 20
    assert noise_floor([1.0] * 5, [1.0] * 5) == 0
    # the lower end is farther from 1
    assert noise_floor([1.0] * 5, [1.0, 1.0, 1.0, 2.0, 2.0]) == 50


@pytest.mark.parametrize(
    "a, b",
    [
        ([1.0] * 4, [1.0] * 4),
        ([1.0] * 5, [1.0] * 6),
        ([1.0] * 5, [1.0] * 4 + [math.nan]),
    ],
)
def test_paired_ratio_refuses(a, b):
    with pytest.raises(ValueError):
        paired_ratio(a, b)
