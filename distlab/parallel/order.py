"""Several wrappers on one group of ranks: the order in which their messages leave.

Wrappers send in the order in which backward comes to them, which ranks share, and not when their
buckets fill, which they do not. Before anything else is sent, every wrapper that backward has come
to sends all of its step: on another rank, which used all parameters, it has done so in backward.
"""

from __future__ import annotations

import weakref
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from distlab.parallel.data_parallel import DataParallel

# Those that backward has come to and that have not finished, in this order: a set that keeps it.
# Module state, as one backward of a process runs through any number of wrappers.
begun: weakref.WeakKeyDictionary[DataParallel, None] = weakref.WeakKeyDictionary()


def may_send(wrapper: DataParallel) -> bool:
    """Return whether the wrappers of its group that backward came to earlier have sent all of their step."""
    ahead = takewhile(lambda other: other is not wrapper, begun)
    return not any(other.unsent for other in ahead if other.process_group is wrapper.process_group)


def send_begun(group: ProcessGroup) -> None:
    """Let every wrapper of the group that backward has come to send what it has not sent of its step."""
    for wrapper in list(begun):
        if wrapper.process_group is group:
            wrapper.guard.refuse_sending_again()
            wrapper.guard.sent_early |= bool(wrapper.unsent)
            with torch.no_grad():
                wrapper.send_rest()
