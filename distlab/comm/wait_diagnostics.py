"""Which rank did not come, where a collective fails on gloo; costs nothing as long as nobody waits for long.

A wait on gloo blocks the host. A rank that has waited for half a second writes so into the job's store, and removes the
entry when the wait ends. When a wait fails, at the group's timeout or because a connection broke, the ranks without an
entry are the missing ones.

On NCCL a wait blocks a stream, and at the timeout torch's watchdog ends the process, with the collective's name.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, Work

LONG_WAIT = timedelta(seconds=0.5)
GRACE_S = 1.0  # in which others notice a failure too; longer than a long wait


def wait(work: Work, group: ProcessGroup, what: str) -> None:
    """`work.wait()`, whose failure names the ranks that did not come.

    Args:
        what: is being done, in the same words on every rank, such as "averaging gradients".

    Raises:
        RuntimeError: the wait failed.
    """
    if group.name() != "gloo" or not isinstance(work, Work):  # such as a transfer by copy engines
        work.wait()
        return
    try:
        work.wait(LONG_WAIT)
    except RuntimeError:  # it lasts, if only until this moment, or it has failed, and then so does the next wait
        with waiting(group, what):
            work.wait()


def wait_for_message(work: Work, group: ProcessGroup, what: str) -> None:
    """`wait` of a send or a receive, which on gloo a first half second would end."""
    try:
        work.wait()
    except RuntimeError as error:
        if group.name() != "gloo":
            raise
        raise _explained(error, group, what) from error


@contextmanager
def waiting(group: ProcessGroup, what: str) -> Iterator[None]:
    """Inside, this rank waits for the others of the group; see `wait`."""
    _say(group, what)
    try:
        yield
    except RuntimeError as error:
        raise _explained(error, group, what) from error
    _say(group, None)


def _explained(error: RuntimeError, group: ProcessGroup, what: str) -> RuntimeError:
    """The error of a collective, and the ranks that did not come to it. Takes up to `GRACE_S`."""
    _say(group, what)
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    said: dict[int, str] = {}
    deadline = time.monotonic() + GRACE_S
    while len(said) < len(others) and time.monotonic() < deadline:
        said |= {rank: doing for rank in others if rank not in said and (doing := _hear(rank))}
        time.sleep(0.02)
    absent = [rank for rank in others if rank not in said]
    mine = _message(group, what)
    if absent:
        it, has, sits, own = ("it", "has", "is", "its") if len(absent) == 1 else ("they", "have", "are", "their")
        found = (
            f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} did not come: {it} {has} fewer "
            f"batches than the others, {sits} stuck in code between two steps, or {has} ended (if by an error, {own} "
            "own message says why)"
        )
    others_doing = {rank: json.loads(doing)[1] for rank, doing in said.items() if doing != mine}
    elsewhere = [f"rank {rank} waits elsewhere ({doing})" for rank, doing in others_doing.items()]
    if not absent and elsewhere:
        found = f"{', '.join(elsewhere)}: ranks take different numbers of steps, or other branches of the program"
    elif not absent:
        found = "all ranks came, so a connection failed, or their messages differ in size"
    return RuntimeError(f"rank {dist.get_rank()} was {what}, and {found}. torch says: {error}")


# -- the job's store -----------------------------------------------------------------------------------------------


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _message(group: ProcessGroup, what: str) -> str:
    return json.dumps([group.group_name, what])


def _key(rank: int) -> str:
    """Waits of threads in the background, such as a checkpoint's, are apart: they say nothing of where its step is."""
    main = threading.current_thread() is threading.main_thread()
    return f"waits/{rank}" if main else f"waits/{rank}/background"


def _say(group: ProcessGroup, what: str | None) -> None:
    """Tell everybody what this rank waits for; None: for nothing any more."""
    try:
        _store().set(_key(dist.get_rank()), "" if what is None else _message(group, what))
    except (RuntimeError, ValueError):  # the store ended with the rank that served it
        return


def _hear(rank: int) -> str | None:
    """What a rank said last, if it waits."""
    key = _key(rank)
    try:
        return _store().get(key).decode() if _store().check([key]) else None
    except (RuntimeError, ValueError):
        return None
