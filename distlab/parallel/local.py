"""No communication at all: the step time that every strategy is compared with.

    compute        │ forward │ backward │ optimizer │
    communication  │

Each rank trains its own copy, so the copies diverge. Overhead of a strategy = its step − this one.
"""

from torch import nn

from distlab.parallel.model import ParallelModel


class Local(ParallelModel):
    """The interface of a strategy, without any communication."""

    process_group = None

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.device = next(module.parameters()).device

    def sync_buffers(self) -> None:
        """Do nothing, as there are no other ranks."""
