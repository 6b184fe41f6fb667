"""run_ranks: results in rank order, tracebacks of the children, deadlines, and a fresh start after a failure."""

import os
import time

import pytest
import torch

from distlab.comm import RankContext
from distlab.testing import RanksFailed, run_ranks


def square(context: RankContext, base: int) -> tuple[int, int]:
    return base + context.rank**2, os.getpid()


def test_results_come_in_rank_order_from_processes_that_are_reused():
    first, second = run_ranks(square, 3, 10), run_ranks(square, 3, 20)
    assert [value for value, _ in first] == [10, 11, 14]
    assert [value for value, _ in second] == [20, 21, 24]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def tensor(context: RankContext) -> torch.Tensor:
    return torch.full((2,), float(context.rank))


def test_tensors_come_back_by_value():
    assert torch.equal(run_ranks(tensor, 2)[1], torch.ones(2))


def fail_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        raise KeyError("this one")


def test_a_rank_s_traceback_reaches_the_test():
    with pytest.raises(RanksFailed, match=r"rank 1[\s\S]*fail_on_rank_1[\s\S]*KeyError: 'this one'"):
        run_ranks(fail_on_rank_1, 2)
    assert [value for value, _ in run_ranks(square, 2, 0)] == [0, 1]  # new processes, no leftovers


def hang_on_rank_0(context: RankContext) -> None:
    if context.rank == 0:
        time.sleep(60)


def test_a_call_past_its_deadline_shows_where_it_hung():
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang_on_rank_0, 2, deadline_s=6)
    assert time.monotonic() - begin < 30
    assert set(caught.value.failures) == {0}
    assert "no answer within 6 s" in str(caught.value) and "in hang_on_rank_0" in str(caught.value)


def exit_quietly(context: RankContext) -> None:
    os._exit(0)


def test_a_rank_that_exits_with_zero_is_no_success():
    """RELIABILITY's fault table: exit 0 early must fail."""
    with pytest.raises(RanksFailed, match="the process died, exit code 0"):
        run_ranks(exit_quietly, 1)


def test_a_local_function_is_refused_with_the_reason():
    with pytest.raises(TypeError, match="importable function"):
        run_ranks(lambda context: None, 1)
    with pytest.raises(ValueError, match="at least one rank"):
        run_ranks(square, 0, 1)
