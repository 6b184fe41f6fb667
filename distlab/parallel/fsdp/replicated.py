"""Small parameters (norms, biases): whole on every rank, their gradients averaged once per step."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.parallel.buckets import GradientBucket, plan_buckets
from distlab.parallel.fsdp.units import Entry


class Replicated:
    """Masters of the small parameters; all their gradients are averaged in one all-reduce per dtype.

    Where the module computes in another type than the master's, its attributes find a copy in that type,
    which `refresh()` brings up to date; the copy's gradient is moved to the master as soon as it is complete.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, group: ProcessGroup):
        self.entries = list(entries)
        self.group = group
        self.masters = [self._master(entry, device) for entry in entries]
        self._casts: list[tuple[nn.Parameter, nn.Parameter]] = []
        for entry, master in zip(entries, self.masters, strict=True):
            entry.register(master)
            if entry.compute_dtype != master.dtype:
                copy = nn.Parameter(master.detach().to(entry.compute_dtype), master.requires_grad)
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(_MoveGradient(master))
                entry.install(copy)
                self._casts.append((copy, master))
        self.trainable = [master for master in self.masters if master.requires_grad]
        numels, dtypes = [p.numel() for p in self.trainable], [p.dtype for p in self.trainable]
        scale = collectives.mean_scale(device, group)
        self._buckets = [
            GradientBucket(plan, self.trainable, scale) for plan in plan_buckets(numels, dtypes, None)
        ]

    @staticmethod
    def _master(entry: Entry, device: torch.device) -> nn.Parameter:
        parameter = entry.parameter
        if parameter.is_meta:
            full = torch.empty_like(parameter, device=device, dtype=entry.master_dtype)
        else:
            full = parameter.detach().to(entry.master_dtype)
        return nn.Parameter(full, parameter.requires_grad)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters anew. Through `.data`, because a forward before this one may have saved the copy."""
        if self._casts:
            torch._foreach_copy_(
                [copy.data for copy, _ in self._casts], [master for _, master in self._casts]
            )

    def average(self) -> None:
        """Replace every `.grad` by its mean over ranks; None stays where no rank has a gradient. Blocks."""
        works = [
            collectives.all_reduce_mean(bucket.seal(), self.group, prescaled=True) for bucket in self._buckets
        ]
        for bucket, work in zip(self._buckets, works, strict=True):
            collectives.wait(work, self.group, "averaging gradients")
            bucket.unpack()


class _MoveGradient:
    """A hook: adds the gradient of a low-precision copy to its master's and drops it."""

    def __init__(self, master: nn.Parameter):
        self.master = master

    def __call__(self, copy: nn.Parameter) -> None:
        gradient, copy.grad = copy.grad.to(self.master.dtype), None
        self.master.grad = gradient if self.master.grad is None else self.master.grad + gradient
