"""Agreement of the ranks on what they are about to do, before messages of different sizes can meet.

gloo matches messages by position. Where one rank is in a collective of other size than its peer,
gloo's receiving thread raises a C++ exception that ends the process: no Python error, no message.
So the calls that ranks can make at different times (a pass of FSDP, a state dict, a norm) begin by
telling each other, in messages of one fixed size and over a connection that carries nothing else,
what each rank is about to do. All ranks raise if these differ, and all time out with an explanation
if a rank never comes.

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

# Module state, as all wrappers of a group share one connection. A group that was destroyed leaves.
_connections: weakref.WeakKeyDictionary[ProcessGroup, dist.ProcessGroupGloo]
_connections = weakref.WeakKeyDictionary()


def prepare(group: ProcessGroup) -> None:
    """Connect the ranks of a gloo group for later agreements. A collective, the first time."""
    if group.name() != "gloo" or group.size() == 1 or group in _connections:
        return
    # Not `dist.new_group`, which all ranks of the job would have to call, and which counts groups.
    store = dist.PrefixStore(f"agreement/{group.group_name}", _get_default_store())
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    _connections[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def agree(group: ProcessGroup | None, doing: str) -> None:
    """Wait until all ranks of the group are about to do the same.

    Does nothing in a group that was not prepared: on NCCL, and on one rank.

    Args:
        group: the ranks; None without communication.
        doing: words that follow "rank 0 is", such as "at the start of a forward pass".

    Raises:
        RuntimeError: a rank is about to do something else (then on every rank), or did not come.
    """
    connection = None if group is None else _connections.get(group)
    if connection is None:
        return
    text = doing.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES)
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    work = connection.allgather([everyones], [mine])
    collectives.wait(work, group, doing)
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, everyones, strict=True):
        if not torch.equal(other, everyones[0]):
            raise RuntimeError(
                f"ranks do different things: rank {ranks[0]} is {_text_of(everyones[0])}, and rank "
                f"{rank} is {_text_of(other)}. Every rank must make the same calls in the same order"
            )


def agree_on_call(group: ProcessGroup | None, call: str) -> None:
    """Wait until all ranks are in the same method; see `agree`.

    Args:
        call: the method, such as "ZeroOptimizer.state_dict()".
    """
    agree(group, collective(call))


def collective(call: str) -> str:
    """Describe a rank that is in a method which all ranks must call."""
    return f"in {call}, a collective that every rank must call"


def _text_of(message: torch.Tensor) -> str:
    return bytes(message.tolist()).decode(errors="replace").rstrip()
