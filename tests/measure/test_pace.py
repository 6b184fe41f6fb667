"""Progress of long loops, against a clock that is set by hand."""

import pytest

from distlab.measure.pace import Pace


def said(seconds_per_call, every_s=5.0):
    lines, now = [], [0.0]
    pace = Pace(
        len(seconds_per_call), "small: step", lines.append, every_s=every_s, clock=lambda: now[0]
    )
    for seconds in seconds_per_call:
        now[0] += seconds
        pace()
    return lines


def test_a_long_loop_says_now_and_then_how_long_the_rest_will_take():
    lines = said([4.0] + [1.0] * 99)  # the first call compiles
    assert lines[0] == "small: step: 2 of 100, 0:01:38 left"
    assert lines[1] == "small: step: 7 of 100, 0:01:33 left"
    assert len(lines) == 20


def test_a_short_loop_says_nothing():
    assert said([0.1] * 40) == [] == said([9.0])


def test_no_repetition_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Pace(0, "x", print)
