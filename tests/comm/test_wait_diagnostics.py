"""The message of a collective that fails: which rank did not come, and what it may be doing."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distlab.comm import collectives
from distlab.testing import run_ranks
from tests.parallel.test_contract import on_one_rank, on_two_ranks

TIMEOUT_S = 1.5


def impatient(context, longer_s=0.0):
    """A group of all ranks, made once they have met: how long one takes to start is no part of its timeout."""
    dist.barrier(context.group)
    return dist.new_group(timeout=timedelta(seconds=TIMEOUT_S + longer_s))


def absent(context, how):
    """Rank 1 of 3 does not come to the second message; the others come half a second apart."""
    tensor, group = torch.ones(1000), impatient(context)
    collectives.wait(collectives.all_reduce_mean(tensor, group), group, "averaging gradients")
    time.sleep(context.rank / 4)
    if context.rank == 1:
        if how == "stuck":
            dist.distributed_c10d._get_default_store().wait(["told 0", "told 2"])
        return "rank 1"
    with pytest.raises(RuntimeError) as caught:
        if how == "objects":
            collectives.gather_objects("", group)
        else:
            work = collectives.all_reduce_mean(tensor, group)
            collectives.wait(work, group, "averaging gradients")
    dist.distributed_c10d._get_default_store().set(f"told {context.rank}", "")
    return str(caught.value)


@pytest.mark.parametrize("how", ["stuck", "objects"])
def test_the_rank_that_did_not_come_is_named(how):
    answers = run_ranks(absent, 3, how)
    doing = "exchanging objects" if how == "objects" else "averaging gradients"
    for rank in (0, 2):
        assert answers[rank].startswith(f"rank {rank} was {doing}, and rank 1 did not come: it has fewer batches")
        assert "gloo" in answers[rank]  # torch's own words follow


class JustInTime(dist.Work):
    """Ends between the half second's end and the next look at it."""

    ended = False

    def wait(self, timeout=timedelta(0)):
        if timeout:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        return self.ended

    def is_completed(self):
        return self.ended


@on_one_rank
def test_what_ends_as_the_first_half_second_does_has_not_failed(context):
    collectives.wait(JustInTime(), context.group, "averaging gradients")


@on_two_ranks
def test_a_rank_that_waits_for_something_else_is_told_where(context):
    mine = [impatient(context) for _ in range(2)][context.rank]
    with pytest.raises(RuntimeError) as caught:
        work = collectives.all_reduce_mean(torch.ones(3), mine)
        collectives.wait(work, mine, ("averaging gradients", "broadcasting tensors")[context.rank])
    time.sleep(1.0)  # the other notices a moment later
    doing = ("broadcasting tensors", "averaging gradients")[context.rank]
    assert f"rank {1 - context.rank} waits elsewhere ({doing})" in str(caught.value)


@on_two_ranks
def test_what_a_thread_in_the_background_waits_for_is_not_what_its_rank_does(context):
    """Of a rank that was killed while it wrote a checkpoint, others said that it takes another branch.

    Rank 1's program does not come; a thread of it, such as a checkpoint's, is in a collective of its own.
    """
    group, of_thread = impatient(context), impatient(context, longer_s=2)
    if context.rank == 1:

        def exchange():
            with pytest.raises(RuntimeError):
                collectives.gather_objects("", of_thread)

        thread = threading.Thread(target=exchange)
        thread.start()
        thread.join()
        return
    with pytest.raises(RuntimeError, match="rank 0 was averaging gradients, and rank 1 did not come"):
        collectives.wait(collectives.all_reduce_mean(torch.ones(3), group), group, "averaging gradients")


@on_two_ranks
def test_a_wait_that_ended_is_taken_back(context):
    """A rank that was late once is not taken for one that waits later."""
    for late in (0, 1):
        if context.rank == late:
            time.sleep(1.0)
        work = collectives.all_reduce_mean(torch.ones(3), context.group)
        collectives.wait(work, context.group, "averaging gradients")
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    assert [store.get(f"waits/{rank}") for rank in (0, 1)] == [b"", b""]
