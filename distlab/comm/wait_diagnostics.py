"""Report which rank is missing when a collective fails. Free unless a wait is long.

A wait on gloo blocks the host. A rank that has waited for half a second writes so into the job's
store, and removes the entry when the wait ends. When a wait fails, at the group's timeout or
because a connection broke, the ranks without an entry are the missing ones.

On NCCL a wait blocks a stream. At the timeout torch's watchdog names the collective, sleeps a
minute for other ranks' logs, and aborts, which may wait for the lost rank. So a thread asks the
backends, says which ranks did not come, and ends this one (`end_when_lost`).
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import ProcessGroup, Store, Work

LONG_WAIT = timedelta(seconds=0.5)
GRACE_S = 1.0  # in which others notice a failure too; longer than a long wait
LEFT = "left"  # in place of a count, by a rank that needs the others no more
# there each rank counts from when its host began the collective, and looks once a second
NCCL_GRACE_S = 4.0


def wait_for_message(work: Work, group: ProcessGroup, what: str) -> None:
    """Wait for a send or a receive.

    There is no first wait of half a second, which on gloo would end the message.
    """
    try:
        work.wait()
    except RuntimeError as error:
        if group.name() != "gloo":
            raise
        raise _explained(error, group, _Wait(group.group_name, what)) from error


def end_when_lost(device: torch.device, timeout_s: float, over: threading.Event) -> None:
    """End this rank with code 1 on NCCL when another one is lost, until `over` is set.

    Which one is found in two ways. A collective that has failed or timed out is one that some ranks
    did not come to. And each rank counts its seconds in the job's store, where the one before it
    looks: a process that is stopped, or whose host is out of reach, does not count on (then torch's
    watchdog may hang where the host does, inside CUDA). Nor does one that a single call keeps from
    running any Python for so long.

    Args:
        device: this rank's GPU.
        timeout_s: seconds without a sign of life.
        over: ends the watch.
    """
    rank, after = dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()
    seconds, silent, heard = 0, 0, None
    while not over.wait(timeout=1.0):
        seconds += 1  # not by a clock, which runs on while a person has suspended all ranks
        _set(f"alive/{rank}", str(seconds))
        before, heard = heard, _get(f"alive/{after}")
        silent = silent + 1 if heard == before != LEFT else 0
        lost = None
        if silent > timeout_s:
            lost = (
                f"rank {rank} lost rank {after}: it has given no sign of life for {timeout_s:g} s, so it was "
                "stopped, or its host is out of reach"
            )
        for group in list(dist.distributed_c10d._world.pg_map):
            if (
                group.name() == "nccl"
                and group._get_backend(device).get_error() != ErrorType.SUCCESS
            ):
                error = RuntimeError(
                    "a collective on NCCL failed or timed out (its watchdog's message names it)"
                )
                lost = _explained(
                    error, group, _Wait(group.group_name, "in a collective"), NCCL_GRACE_S
                )
        if lost:
            print(lost, file=sys.stderr, flush=True)
            os._exit(1)
    _set(f"alive/{rank}", LEFT)


@contextmanager
def waiting(group: ProcessGroup, what: str) -> Iterator[None]:
    """Note that this rank waits for the others of the group in the block, see `wait`."""
    # Read once, because a call such as `all_gather_object` makes several collectives.
    number = group._get_sequence_number_for_group() if group.name() == "gloo" else 0
    here = _Wait(group.group_name, what, number)
    _say(here)
    try:
        yield
    except RuntimeError as error:
        raise _explained(error, group, here) from error
    _say(None)


class _Wait(NamedTuple):
    """A wait of one rank, as the other ranks read it in the store.

    Attributes:
        group: name of the process group.
        what: activity, in words.
        number: number of collectives that this rank had begun in the group on gloo. Ranks that wait
            for the same one have the same number, because they run the same program. 0 on NCCL,
            where the host runs ahead, and for messages between two ranks.
    """

    group: str
    what: str
    number: int = 0

    def seen_from(self, other: "_Wait") -> str:
        """Say where this wait is, to a rank that waits elsewhere."""
        if self[:2] != other[:2]:
            return self.what
        return f"{self.what}, as collective {self.number} of the group; here it is collective {other.number}"


def _explained(
    error: RuntimeError, group: ProcessGroup, here: _Wait, grace_s: float = GRACE_S
) -> RuntimeError:
    """Return the error of a collective with the ranks that did not come to it.

    Takes up to `grace_s`.
    """
    _say(here)
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    said: dict[int, _Wait] = {}
    deadline = time.monotonic() + grace_s
    while len(said) < len(others) and time.monotonic() < deadline:
        for rank in others:
            wait_of_rank = _get(_key(rank))
            if rank not in said and wait_of_rank:
                said[rank] = _Wait(*json.loads(wait_of_rank))
        time.sleep(0.02)
    absent = [rank for rank in others if rank not in said]
    elsewhere = [
        f"rank {rank} waits elsewhere ({place.seen_from(here)})"
        for rank, place in said.items()
        if place != here
    ]
    if absent:
        it, has, sits, own = (
            ("it", "has", "is", "its") if len(absent) == 1 else ("they", "have", "are", "their")
        )
        found = (
            f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} did not come: {it} {has} fewer "
            f"batches than the others, {sits} stuck in code between two steps, or {has} ended (if by an error, {own} "
            "own message says why)"
        )
    elif elsewhere:
        found = (
            f"{', '.join(elsewhere)}: ranks take different numbers of steps or micro-batches, or other branches of "
            "the program"
        )
    elif "Invalid scalar type" in str(error):
        found = "the backend cannot send tensors of this dtype"
    else:
        found = "all ranks came, so a connection failed, or their messages differ in size"
    return RuntimeError(f"rank {dist.get_rank()} was {here.what}, and {found}. torch says: {error}")


# -- the job's store -----------------------------------------------------------------------------------------------


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    """Return the key of this rank's wait in the store.

    Threads in the background, such as a checkpoint's, have another key: their waits do not say
    where the rank's step is.
    """
    main = threading.current_thread() is threading.main_thread()
    return f"waits/{rank}" if main else f"waits/{rank}/background"


def _say(here: _Wait | None) -> None:
    """Tell all ranks what this one waits for. None: it waits for nothing now."""
    _set(_key(dist.get_rank()), "" if here is None else json.dumps(here))


def _set(key: str, value: str) -> None:
    try:
        _store().set(key, value)
    except (RuntimeError, ValueError):  # the store ended with the rank that served it
        return


def _get(key: str) -> str | None:
    try:
        return _store().get(key).decode() if _store().check([key]) else None
    except (RuntimeError, ValueError):
        return None
