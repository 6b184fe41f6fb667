"""The message of a collective that fails: which rank did not come, and what it may be doing."""

import contextlib
import io
import os
import re
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ErrorType

from distlab.comm import collectives
from distlab.comm.wait_diagnostics import end_when_lost
from distlab.parallel import FSDP
from distlab.testing import RanksFailed, run_ranks
from tests.parallel.test_contract import on_one_rank, on_two_ranks

TIMEOUT_S = 1.5


def impatient(context, longer_s=0.0):
    """A group of all ranks, made once they have met: how long one takes to start is no part of its
    timeout.
    """
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
        assert answers[rank].startswith(
            f"rank {rank} was {doing}, and rank 1 did not come: it has fewer batches"
        )
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


def uneven(context, how):
    """Rank 1 is elsewhere in the program, but all ranks say that they are in the same call."""
    group = impatient(context)
    if how == "one collective more":
        if context.rank == 1:
            collectives.all_reduce(torch.ones(5), group)
        collectives.gather_objects("", group)
    elif how == "one message of a bucket more":
        for _ in range(2 if context.rank == 1 else 1):
            collectives.reduce_scatter_mean(
                torch.ones(2), torch.ones(2 * context.world_size), group
            )
        collectives.gather_objects("", group)


HOWS = ["one collective more", "one message of a bucket more"]


@pytest.mark.parametrize("how", HOWS)
def test_ranks_in_the_same_call_at_different_places_of_the_program_are_told_so(how):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(uneven, 2, how)
    assert set(caught.value.failures) == {0, 1}
    for rank, text in caught.value.failures.items():
        message = text.strip().splitlines()[-1]
        place = (
            rf"rank {1 - rank} waits elsewhere "
            r"\(\w+ \w+, as collective \d+ of the group; here it is \w+ \d+\)"
        )
        assert re.search(place, message), message
        assert "ranks take different numbers of steps or micro-batches" in message
        assert "all ranks came" not in message


def uneven_micro_batches(context, counts):
    group = impatient(context)
    model = FSDP(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), process_group=group)
    count = counts[context.rank]
    for index in range(count):
        with nullcontext() if index == count - 1 else model.no_sync():
            model(torch.ones(2, 6)).sum().backward()
    model.finish_gradient_synchronization()


@pytest.mark.parametrize("counts", [(3, 1), (1, 3)])
def test_uneven_micro_batches_are_named_before_messages_meet(counts):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(uneven_micro_batches, 2, counts)
    for text in caught.value.failures.values():
        message = text.strip().splitlines()[-1]
        assert (
            "ranks do different things: rank 0 is at the start of a backward of FSDP(Sequential)"
            in message
        )
        assert "inside no_sync()" in message


@on_two_ranks
def test_what_a_thread_in_the_background_waits_for_is_not_what_its_rank_does(context):
    """Of a rank that was killed while it wrote a checkpoint, others said that it takes another
    branch.

    Rank 1's program does not come; a thread of it, such as a checkpoint's, is in a collective of
    its own.
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
    with pytest.raises(
        RuntimeError, match="rank 0 was averaging gradients, and rank 1 did not come"
    ):
        collectives.wait(
            collectives.all_reduce_mean(torch.ones(3), group), group, "averaging gradients"
        )


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


def watched(context, error, timeout_s, seconds):
    """What the watch of a rank on NCCL says within so many of its seconds, here as short as
    possible; it may end it.
    """
    ticks, said = iter([False] * seconds + [True]), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(dist.ProcessGroup, "name", lambda group: "nccl")
        patch.setattr(
            dist.ProcessGroup, "_get_backend", lambda *_: SimpleNamespace(get_error=lambda: error)
        )
        patch.setattr(os, "_exit", sys.exit)
        with contextlib.suppress(SystemExit):
            end_when_lost(
                context.device, timeout_s, SimpleNamespace(wait=lambda timeout: next(ticks))
            )
            said.write("left")
    return said.getvalue()


def lost_in_a_collective(context):
    """A collective of ranks 0 and 2 of 3 has timed out; rank 1's group says nothing of it."""
    error = ErrorType.SUCCESS if context.rank == 1 else ErrorType.TIMEOUT
    return watched(context, error, timeout_s=100, seconds=3)


def test_on_nccl_a_collective_that_failed_ends_its_ranks_and_names_those_that_did_not_come():
    first, second, third = run_ranks(lost_in_a_collective, 3)
    for rank, said in ((0, first), (2, third)):
        assert said.startswith(f"rank {rank} was in a collective, and rank 1 did not come")
    assert second == "left"


@on_two_ranks
def test_on_nccl_a_rank_without_a_sign_of_life_is_lost_and_one_that_has_left_is_not(context):
    for leaves in (True, False):
        if context.rank == 1 and leaves:
            assert watched(context, ErrorType.SUCCESS, timeout_s=3, seconds=0) == "left"
        dist.barrier()
        if context.rank == 0:
            said = watched(context, ErrorType.SUCCESS, timeout_s=3, seconds=8)
            lost = (
                "rank 0 lost rank 1: it has given no sign of life for 3 s, so it was stopped, or "
                "its host is out of "
            )
            assert said == "left" if leaves else said.startswith(lost)
        dist.barrier()
        dist.distributed_c10d._get_default_store().set("alive/1", "7")
        dist.barrier()
