"""Several wrappers on one group of ranks: the order in which their messages leave.

Wrappers send in the order in which backward comes to them, which ranks share, and not when their buckets fill, which
they do not. Before anything else is sent, every wrapper that backward has come to sends all of its step: on another
rank, which used all parameters, it has done so in backward.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from distlab.parallel.guards.gradients import GradientGuard

# Those that backward has come to and that have not finished, in this order. Module state, as one backward of a process
# runs through any number of wrappers.
begun: weakref.WeakKeyDictionary[GradientGuard, None] = weakref.WeakKeyDictionary()


def send_begun(group: ProcessGroup) -> None:
    """Let every wrapper of the group that backward has come to send what it has not sent of its step."""
    for guard in list(begun):
        if guard.process_group is group:
            guard.send_rest()
