"""Report which rank is missing when a collective fails. Free unless a wait is long.

A wait on gloo blocks the host. A rank that has waited for half a second writes an entry into the
job's store, and removes it when the wait ends. When a wait fails, at the group's timeout or because
a connection broke, the ranks without an entry are the missing ones.

A wait on NCCL blocks a stream. At the timeout torch's watchdog names the collective, sleeps for a
minute so that other ranks can write their logs, and aborts. The abort may wait for the lost rank.
So a thread of ours asks the backends, reports the missing ranks and ends this one
(`end_when_lost`).
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

LONG_WAIT = timedelta(seconds=0.5)  # a rank that has waited for longer says that it waits
# Time in which the other ranks can also notice a failure. It is longer than a long wait.
GRACE_S = 1.0
# The same on NCCL, where each rank's timeout begins when its host begins the collective, and ranks
# look for failures only once a second.
NCCL_GRACE_S = 4.0
LEFT = "left"  # stored in place of a count by a rank that no longer needs the others


def wait_for_message(work: Work, group: ProcessGroup, what: str) -> None:
    """Wait for a send or a receive. If it fails, the error names a rank that did not come.

    It does not first wait for half a second, as `collectives.wait` does: on gloo the end of that
    wait would end the message.

    Args:
        work: message in flight.
        group: the two ranks.
        what: activity, in the same words on both ranks.

    Raises:
        RuntimeError: the wait failed.
    """
    try:
        work.wait()
    except RuntimeError as error:
        if group.name() != "gloo":
            raise
        raise _explained(error, group, _Wait(group.group_name, what)) from error


def end_when_lost(device: torch.device, timeout_s: float, over: threading.Event) -> None:
    """End this rank with code 1 on NCCL when another rank is lost, until `over` is set.

    It finds a lost rank in two ways:

    - A backend reports a collective that failed or timed out. Then some ranks did not come to it.
    - Each rank counts its seconds in the job's store, and the previous rank watches this count. It
      stops if the process is stopped, if its host is out of reach, or if a single call keeps all
      Python code from running for that long. In these cases torch's watchdog may hang inside CUDA,
      where the host hangs as well.

    Args:
        device: GPU of this rank.
        timeout_s: seconds without a sign of life after which a rank counts as lost.
        over: event that ends the watch.
    """
    rank = dist.get_rank()
    watched = (rank + 1) % dist.get_world_size()
    seconds = 0
    seconds_of_silence = 0
    last_count = None
    while not over.wait(timeout=1.0):
        # Counted, and not read from a clock, which runs on while a person has suspended all ranks.
        seconds += 1
        _set(f"alive/{rank}", str(seconds))
        count = _get(f"alive/{watched}")
        if count == last_count and count != LEFT:
            seconds_of_silence += 1
        else:
            seconds_of_silence = 0
        last_count = count
        lost: str | RuntimeError | None = None
        if seconds_of_silence > timeout_s:
            lost = (
                f"rank {rank} lost rank {watched}: it has given no sign of life for "
                f"{timeout_s:g} s, so it was stopped, or its host is out of reach"
            )
        # A copy, because the main thread may make or destroy groups meanwhile.
        for group in list(dist.distributed_c10d._world.pg_map):
            if _has_failed(group, device):
                error = RuntimeError(
                    "a collective on NCCL failed or timed out (its watchdog's message names it)"
                )
                here = _Wait(group.group_name, "in a collective")
                lost = _explained(error, group, here, NCCL_GRACE_S)
        if lost is not None:
            print(lost, file=sys.stderr, flush=True)
            # Not `sys.exit`: this is a thread, and the main thread may hang inside CUDA.
            os._exit(1)
    # Otherwise the previous rank would take the end of this one for its loss.
    _set(f"alive/{rank}", LEFT)


def _has_failed(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether a collective of an NCCL group has failed. False for other groups."""
    if group.name() != "nccl":
        return False
    return group._get_backend(device).get_error() != ErrorType.SUCCESS


@contextmanager
def waiting(group: ProcessGroup, what: str) -> Iterator[None]:
    """Tell the other ranks of the group that this rank waits for them in the block.

    Args:
        group: ranks of the collective.
        what: activity, in the same words on every rank.

    Raises:
        RuntimeError: the block raised one. The new error names the ranks that did not come.
    """
    number = 0
    if group.name() == "gloo":
        # Read once, because a call such as `all_gather_object` makes several collectives.
        number = group._get_sequence_number_for_group()
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
        number: on gloo, number of collectives that this rank had begun in the group. Ranks that
            wait for the same one have the same number, because they run the same program. 0 on
            NCCL, where the host runs ahead, and for messages between two ranks.
    """

    group: str
    what: str
    number: int = 0

    def seen_from(self, other: "_Wait") -> str:
        """Describe this wait to a rank that waits elsewhere."""
        if self.group != other.group or self.what != other.what:
            return self.what
        return (
            f"{self.what}, as collective {self.number} of the group; here it is collective "
            f"{other.number}"
        )


def _explained(
    error: RuntimeError, group: ProcessGroup, here: _Wait, grace_s: float = GRACE_S
) -> RuntimeError:
    """Return an error that says which ranks did not come to a collective.

    Args:
        error: error of the collective.
        group: ranks of the collective.
        here: wait of this rank.
        grace_s: maximum time in seconds that this function waits for the other ranks' entries.
    """
    _say(here)
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    waits: dict[int, _Wait] = {}  # rank → its wait
    deadline = time.monotonic() + grace_s
    while len(waits) < len(others) and time.monotonic() < deadline:
        for rank in others:
            if rank in waits:
                continue
            entry = _get(_key(rank))
            if entry:
                waits[rank] = _Wait(*json.loads(entry))
        # Each round asks the store for every missing rank. Without a rest, ranks would keep it from
        # storing entries.
        time.sleep(0.02)
    absent = [rank for rank in others if rank not in waits]
    elsewhere = []
    for rank, wait_of_rank in waits.items():
        if wait_of_rank != here:
            elsewhere.append(f"rank {rank} waits elsewhere ({wait_of_rank.seen_from(here)})")
    if len(absent) == 1:
        found = (
            f"rank {absent[0]} did not come: it has fewer batches than the others, is stuck in "
            "code between two steps, or has ended (if by an error, its own message says why)"
        )
    elif absent:
        found = (
            f"ranks {', '.join(str(rank) for rank in absent)} did not come: they have fewer "
            "batches than the others, are stuck in code between two steps, or have ended (if by "
            "an error, their own message says why)"
        )
    elif elsewhere:
        found = (
            f"{', '.join(elsewhere)}: ranks take different numbers of steps or micro-batches, or "
            "other branches of the program"
        )
    elif "Invalid scalar type" in str(error):
        found = "the backend cannot send tensors of this dtype"
    else:
        found = "all ranks came, so a connection failed, or their messages differ in size"
    return RuntimeError(f"rank {dist.get_rank()} was {here.what}, and {found}. torch says: {error}")


# -- the job's store -------------------------------------------------------------------------------


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    """Return the key of a rank's wait in the store.

    Threads in the background, such as a checkpoint's, have another key, because their waits do not
    say where the rank is in its step.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    return f"waits/{rank}" if in_main_thread else f"waits/{rank}/background"


def _say(here: _Wait | None) -> None:
    """Store the wait of this rank for the others to read. None: it does not wait now."""
    entry = "" if here is None else json.dumps(here)
    _set(_key(dist.get_rank()), entry)


def _set(key: str, value: str) -> None:
    try:
        _store().set(key, value)
    except (RuntimeError, ValueError):
        return  # the store ended with the rank that served it


def _get(key: str) -> str | None:
    """Return the value of a key. None if it is not set, or the store has ended."""
    try:
        store = _store()
        if not store.check([key]):  # `get` would wait for the key
            return None
        return store.get(key).decode()
    except (RuntimeError, ValueError):
        return None
