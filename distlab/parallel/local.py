"""No communication at all: the step time that every strategy is measured against.

    compute        │ forward │ backward │ optimizer │
    communication  │

Each rank trains its own copy, so the copies drift apart. Exposed communication = a strategy's step − this one.
"""

from contextlib import nullcontext
from typing import Any

from torch import nn


class Local(nn.Module):
    """The interface of a data-parallel wrapper, without any communication."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> nullcontext:
        """Nothing is ever sent: a context that does nothing."""
        return nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """Nothing to wait for."""

    def sync_buffers(self) -> None:
        """Nothing to synchronise with."""

    def close(self) -> None:
        """Nothing to detach."""
