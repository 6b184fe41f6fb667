"""The pipeline of backward and messages against its closed form, and by hand."""

import pytest

from distlab.theory import step_time


def test_a_pipeline_by_hand():
    """Ready at 2 and 3 of 10 s; messages of 1 and 4 s at half speed; backward beside them at 3/4."""
    rates = {"compute_rate": 0.75, "communication_rate": 0.5}
    # 2 alone; 1 s of message lasts 2, backward is at 3.5; 4 s last 8, backward at 9.5; 0.5 alone.
    assert step_time.pipeline([2, 3], [1, 4], 10, **rates) == pytest.approx(2 + 2 + 8 + 0.5)
    assert step_time.pipeline([], [], 10) == 10
    for wrong in (([1], [], 1.0), ([1], [1], -1.0)):
        with pytest.raises(ValueError, match=r"see the docstring|not be negative"):
            step_time.pipeline(*wrong)
    with pytest.raises(ValueError, match=r"rates \(0"):
        step_time.pipeline([1], [1], 1, compute_rate=0)
