"""Agreement of the ranks on their next collective, before messages of different sizes can meet.

gloo matches messages by position. If two ranks are in collectives of different sizes, gloo's
receiving thread raises a C++ exception, which ends the process without a Python error or a message.
So each call that ranks could make at different times (a pass of FSDP, a state dict, a norm) begins
with an exchange of what each rank is about to do. Its messages have one fixed size, and use a
connection that carries nothing else. All ranks raise if they differ. If a rank never comes, all
time out with an explanation.

On NCCL there is no agreement, because the host would wait in every step. There a mismatch ends in
the group's timeout and the report of `distlab.comm.wait_diagnostics`.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

from distlab.comm import collectives

MESSAGE_BYTES = 256

# Connection of each group. It is module state because all wrappers of a group share one connection.
# The keys are weak, so that a group that was destroyed does not stay here.
_connections: weakref.WeakKeyDictionary[ProcessGroup, dist.ProcessGroupGloo]
_connections = weakref.WeakKeyDictionary()


def prepare(group: ProcessGroup) -> None:
    """Connect the ranks of a gloo group for later agreements. The first call is a collective."""
    if group.name() != "gloo" or group.size() == 1 or group in _connections:
        return
    # Not `dist.new_group`: all ranks of the job would have to call it, and it counts groups.
    store = dist.PrefixStore(f"agreement/{group.group_name}", _get_default_store())
    # The group's own timeout: a rank that is late for an agreement is as late as for the
    # collective.
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    _connections[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def agree(group: ProcessGroup | None, doing: str) -> None:
    """Wait until all ranks of the group are about to do the same.

    Does nothing in a group that was not prepared: on NCCL, and on one rank.

    Args:
        group: ranks that must agree. None without communication.
        doing: words that follow "rank 0 is", such as "at the start of a forward pass".

    Raises:
        RuntimeError: a rank is about to do something else, which every rank then reports, or a rank
            did not come.
    """
    connection = None if group is None else _connections.get(group)
    if connection is None:
        return
    # Cut or filled up to one size, because messages of different sizes are what must not meet.
    text = doing.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES)
    # A bytearray, because `frombuffer` warns about memory that cannot be written.
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    work = connection.allgather([gathered], [mine])
    collectives.wait(work, group, doing)
    ranks = dist.get_process_group_ranks(group)
    first = gathered[0]
    for rank, other in zip(ranks, gathered, strict=True):
        if not torch.equal(other, first):
            raise RuntimeError(
                f"ranks do different things: rank {ranks[0]} is {_text_of(first)}, and rank "
                f"{rank} is {_text_of(other)}. Every rank must make the same calls in the same "
                "order"
            )


def agree_on_call(group: ProcessGroup | None, call: str) -> None:
    """Wait until all ranks are in the same method (see `agree`).

    Args:
        group: ranks that must agree. None without communication.
        call: name of the method, such as "ZeroOptimizer.state_dict()".
    """
    agree(group, collective(call))


def collective(call: str) -> str:
    """Describe a rank that is in a method which all ranks must call."""
    return f"in {call}, a collective that every rank must call"


def _text_of(message: torch.Tensor) -> str:
    # The cut may have split a character of several bytes.
    return bytes(message.tolist()).decode(errors="replace").rstrip()
