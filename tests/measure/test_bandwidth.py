"""Times of collectives: checked results, sizes and shares.

What disturbs what; when gradients are there.
"""

import time
from unittest import mock

import pytest
import torch

from distlab.comm import collectives
from distlab.measure.bandwidth import OPERATIONS, disturb, rate_beside, time_collective, traffic
from distlab.testing import run_ranks


def every_operation(context):
    timings = []
    for operation in OPERATIONS:
        for size in (1, 4099):
            timings.append(time_collective(context, operation, size, warmup=1, repeats=5))
    return timings


def test_every_collective_is_checked_and_timed_on_the_slowest_rank():
    answers = run_ranks(every_operation, 3)
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 2 * len(OPERATIONS)
    for small, large in zip(answers[0][::2], answers[0][1::2], strict=True):
        # whole elements for each of three ranks
        assert (small.num_bytes, large.num_bytes) == (12, 4104)
        for timing in (small, large):
            assert (
                timing.max_abs_error == 0
                and len(timing.samples_ms) == 5
                and min(timing.samples_ms) > 0
            )


@pytest.mark.ranks(3)
def test_a_collective_that_does_nothing_shows_in_the_row(context):
    """Every call of the library returns at once, and does nothing."""
    done = torch.futures.Future()
    done.set_result(None)
    names = ("reduce", "gather", "scatter", "all_to_all", "all_gather", "broadcast")
    with mock.patch.multiple(collectives, **dict.fromkeys(names, lambda *tensors, **_: done)):
        for name in names:
            assert time_collective(context, name, 4096, warmup=0, repeats=5).max_abs_error != 0, (
                name
            )


def test_shares_of_the_payload():
    assert (
        traffic("all_reduce", 4)
        == traffic("ring_all_reduce", 4)
        == traffic("whole_all_reduce", 4)
        == 1.5
    )
    assert traffic("all_gather", 4) == traffic("reduce_scatter", 4) == 0.75
    assert all(traffic(name, 4) == 0.75 for name in ("gather", "scatter", "all_to_all"))
    assert traffic("broadcast", 8) == traffic("reduce", 8) == 1 and traffic("broadcast", 1) == 0
    with pytest.raises(ValueError, match="'barrier' is unknown; choose among all_reduce"):
        traffic("barrier", 2)
    with pytest.raises(ValueError, match="num_bytes=0"):
        time_collective(None, "all_reduce", 0)


def test_the_rate_of_a_queue_beside_computation():
    # A queue of 10 ms beside 8 ms of computation, at half speed there: 4 done in 8, the other 6
    # after it.
    assert rate_beside(10, 14, 8) == pytest.approx(0.5)
    # 2 ms ran before computation began: 2 alone, 4 beside it, 4 after it.
    assert rate_beside(10, 2 + 8 + 4, 8) == pytest.approx(0.5)
    assert rate_beside(10, 10, 8) == 1 and rate_beside(10, 9, 8) == 1  # undisturbed, and noise


def disturbed(context):
    tensors = torch.zeros(2, 1024)

    def send(number):
        return collectives.all_reduce_mean(tensors[number % 2], context.group, prescaled=True)

    return disturb(context, lambda: time.sleep(0.002), send, least_ms=4, rounds=1)


def test_contention_is_measured_alike_on_all_ranks():
    first, second = run_ranks(disturbed, 2)
    assert first == second
    assert first["compute_alone_ms"] >= 2 and first["compute_beside_ms"] >= 2
    for kind, rate in (("compute", "compute_rate"), ("comm", "communication_rate")):
        assert 0 < first[rate] <= 1
        assert first[rate] == pytest.approx(
            min(1.0, first[f"{kind}_alone_ms"] / first[f"{kind}_beside_ms"])
        )
