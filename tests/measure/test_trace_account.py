"""The account of a strategy's overhead: it closes by construction, and each part is what it is
called.
"""

from pathlib import Path

import pytest

from distlab.measure.trace.account import account, closes, explain, phase_starts, step_windows
from distlab.measure.trace.capture import NEXT, OPTIMIZER, STEP
from distlab.measure.trace.reader import Event, load_trace
from tests.measure.test_trace_intervals import event


def step(length, *events):
    return [Event(STEP, "range", "thread 1", 0, length), *events]


def test_each_cause_has_its_part():
    local = step(20, event("compute", 0, 10), event("compute", 10, 16, "adam"), update(10, 16))
    slowed = step(
        32,
        event("compute", 0, 13),  # three ms slower beside an all-reduce
        event("compute", 13, 15, "scale into the bucket"),
        event("communication", 5, 19, "ncclAllReduce", "stream 20"),  # alone from 15 to 19
        event("copy", 19, 20, "memcpy"),
        event("compute", 20, 23, "adam"),  # a half of the parameters each
        update(20, 23),
    )
    found = explain(account(slowed), account(local))
    assert found == {
        "overhead_exposed_ms": 4,
        "overhead_slowdown_ms": 3,
        "overhead_copies_ms": 3,
        "overhead_optimizer_ms": -3,
        "overhead_idle_ms": 5,
    }


def update(start, end):
    return Event(OPTIMIZER, "range", "thread 1", start, end)


def test_on_a_gpu_the_optimizer_is_what_the_host_launched_as_such():
    events = step(
        20,
        event("compute", 0, 8, launched=-3),
        event("compute", 8, 14, "adam", launched=-1),
        update(-2, 0),
    )
    found = account(events)
    assert (found.compute_ms, found.optimizer_ms, found.idle_ms) == (14, 6, 6)


def test_a_phase_begins_with_its_first_kernel_on_the_device():
    events = step(
        20,
        Event("distlab:forward", "range", "thread 1", -9, -4),
        Event("distlab:backward", "range", "thread 1", -4, -2),
        update(-2, 0),
        event("compute", 1, 6, launched=-8),
        event("compute", 6, 14, launched=-3),
        event("communication", 5, 16, "ncclAllReduce", "stream 20", launched=-4),
        event("compute", 14, 18, "adam", launched=-1),
    )
    assert phase_starts(events, (0, 20)) == {"forward": 1, "backward": 6, "optimizer": 14}
    assert phase_starts(events, (10, 20)) == {"optimizer": 4}


@pytest.mark.parametrize(
    "unexplained, overhead, step, is_closed",
    [
        (5.0, 10.0, 200.0, True),  # half of the overhead
        (-5.1, 10.0, 200.0, False),
        (15.7, 17.3, 463.0, False),  # within 5 % of the step, but nearly all of the overhead
        (4.0, 4.0, 460.0, True),  # within 1 % of the step
        (1.0, 0.0, 3.0, True),  # 1 ms
        (-1.1, 0.0, 3.0, False),
        (-10.0, 90.0, 200.0, True),
        (10.1, 90.0, 200.0, False),  # more than 5 % of the step
    ],
)
def test_an_account_closes_if_it_explains_half_or_misses_little(
    unexplained, overhead, step, is_closed
):
    assert closes(unexplained, overhead, step) is is_closed


def queued_steps():
    """Two steps and a third, launched ahead: the host is done before the device begins the
    second.
    """
    return [
        Event(STEP, "range", "thread 1", 0, 2),
        Event(STEP, "range", "thread 1", 2, 4),
        Event(NEXT, "range", "thread 1", 4, 6),
        event("compute", 3, 13, launched=1),
        event(
            "communication", 8, 16, "ncclAllReduce", "stream 20", launched=1.5
        ),  # ends under the second step
        event("compute", 14, 25, launched=3),
        # another stream does not begin a step
        event("compute", 5, 6, "flag", "stream 9", launched=3.5),
        event("compute", 26, 36, launched=5),
    ]


def test_queued_steps_are_told_apart_on_the_device():
    events = queued_steps()
    assert step_windows(events) == [(3, 14), (14, 26)]
    second = account(events, (14, 26))
    assert (second.step_ms, second.compute_ms, second.exposed_ms, second.idle_ms) == (12, 11, 0, 1)
    on_cpu = [
        Event(name, "range", "thread 1", n, n + 1) for n, name in enumerate((STEP, STEP, NEXT))
    ]
    assert step_windows(on_cpu) == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="no range 'distlab:step'"):
        step_windows(on_cpu[2:])


def test_a_recorded_trace_step_by_step():
    """Of a small model on two gloo ranks, written by torch 2.13."""
    events = load_trace(Path(__file__).parent / "traces" / "trace_bucketed_rank0.json.gz")
    windows = step_windows(events)
    seen = account(events, windows[0])
    assert len(windows) == 2
    assert (seen.step_ms, seen.compute_ms, seen.comm_ms) == pytest.approx(
        (4.444, 1.311, 2.658), abs=1e-3
    )
    assert (seen.exposed_ms, seen.idle_ms) == pytest.approx((2.127, 1.006), abs=1e-3)
    assert seen.overlap_pct == pytest.approx(100 * (1 - 2.1265 / 2.6581), abs=0.01)
