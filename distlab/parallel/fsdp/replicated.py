"""The small parameters, which every rank keeps whole: norms, biases, scalars, integers."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.parallel.bucketed import GradientBucket
from distlab.parallel.buckets import plan_of
from distlab.parallel.fsdp.entry import Entry


class Replicated:
    """Masters of the small parameters (norms, biases), whole on every rank; one all-reduce per dtype averages them.

    Where the module computes in another dtype than the master's, its attributes find a copy in that
    dtype, which `refresh()` brings up to date; the copy's gradient is moved to the master as soon
    as it is complete.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, group: ProcessGroup):
        self.masters: list[tuple[Entry, nn.Parameter]] = []
        self.cast: list[tuple[str, nn.Parameter]] = []  # masters that forward does not read
        self._copies: list[nn.Parameter] = []  # of these, which it reads instead
        for entry in entries:
            before = entry.parameter
            if before.is_meta:
                values = torch.empty_like(before, device=device, dtype=entry.master_dtype)
            else:
                values = before.detach().to(entry.master_dtype)
            master = nn.Parameter(values, before.requires_grad)
            self.masters.append((entry, master))
            entry.register(master)
            if entry.compute_dtype != master.dtype:
                copy = nn.Parameter(master.detach().to(entry.compute_dtype), master.requires_grad)
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(_move_gradient, master))
                entry.install(copy)
                self._copies.append(copy)
                self.cast.append((entry.name, master))
        self.trainable = [master for _, master in self.masters if master.requires_grad]
        self._buckets = [
            GradientBucket(plan, self.trainable) for plan in plan_of(self.trainable, None)
        ]
        self._group = group

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters again.

        Through `.data`, because a forward before this one may have saved the copy.
        """
        torch._foreach_copy_(
            [copy.data for copy in self._copies], [master for _, master in self.cast]
        )

    def average(self) -> None:
        """Replace every `.grad` by its mean over ranks; None stays where no rank has a gradient.

        Blocks.
        """
        for bucket in self._buckets:
            bucket.work = collectives.all_reduce_mean(bucket.seal(), self._group)
        for bucket in self._buckets:
            collectives.wait(bucket.work, self._group, "averaging gradients")
            bucket.unpack()


def _move_gradient(master: nn.Parameter, copy: nn.Parameter) -> None:
    """A hook: adds the gradient of a low-precision copy to its master's and drops it."""
    gradient, copy.grad = copy.grad.to(master.dtype), None
    master.grad = gradient if master.grad is None else master.grad + gradient
