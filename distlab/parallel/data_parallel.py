"""What our DDPs share: start alike, watch gradients, average them.

A strategy is a subclass that decides two things: what to do when a gradient is ready
(`_gradient_ready`) and what is left to do at the end (`_synchronize`). The life of one step:

    forward ─ backward ─────────────────────── finish_gradient_synchronization() ─ optimizer.step()
              │ hook per parameter                │
              └ _gradient_ready(index)            └ _synchronize()

Equality. Afterwards each trainable parameter's `.grad` is the mean over ranks of the local
gradients, where a missing gradient (None) counts as zero; a parameter that no rank used keeps
`.grad = None`.

Order. All ranks send the same messages in one order, that of the plan (`unsent`), whatever order
their hooks fire in: messages in the order of hooks would mix up different parameters' gradients
without any error as soon as two ranks' orders differ.
"""

import weakref
from abc import abstractmethod
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.comm import collectives
from distlab.comm.subgroups import resolve_mesh
from distlab.comm.two_level import Message, OneLevel, all_reduce_on
from distlab.parallel import agreement, order
from distlab.parallel.buckets import UsedFlags, withdraw_targets
from distlab.parallel.guards.gradients import GradientGuard
from distlab.parallel.guards.module import Guarded, check_module
from distlab.parallel.shard import Shard, whole


class DataParallel(Guarded):
    """Base class of our DDPs.

    Construction compares the model across ranks, then broadcasts parameters and buffers from rank
    0. Buffers are not synchronised in forward: call `sync_buffers()` before evaluating or saving.

    Args:
        module: any `nn.Module` whose trainable parameters lie on one device.
        mesh: (replicas, ranks of a shard group), such as hosts and their GPUs: gradients are
            averaged in two levels (`distlab.comm.two_level`); default: in one.
        process_group: all ranks; default: the default group.

    Attributes:
        trainable, named: the parameters that are averaged, in registration order, without and with
            names; a tied one once.
        frozen: the others, with names.
        unsent: the messages of this step that may leave before its end and have not, in the order
            of the plan.

    Raises:
        TypeError: a mesh that is no DeviceMesh.
        ValueError: a mesh of other dimensions or ranks (see `resolve_mesh`), nothing to train,
            parameters on several devices, an uninitialized parameter, two parameters that share
            memory, a model that is wrapped already, or ranks that disagree on names, shapes,
            dtypes, strides or `requires_grad` (then on every rank).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.module, self.mesh = module, mesh
        groups = resolve_mesh(mesh, process_group)
        self.process_group, self.all_reduce = groups.world, all_reduce_on(groups)
        agreement.prepare(self.process_group)
        self.named = check_module(module, type(self).__name__, self.process_group)
        self.trainable = [parameter for _, parameter in self.named]
        self.device = self.trainable[0].device
        named = module.named_parameters()
        self.frozen = [
            (name, parameter) for name, parameter in named if not parameter.requires_grad
        ]
        collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)
        self.unsent: deque[Any] = deque()
        self._used: UsedFlags | None = self._flags_apart()  # None: they ride inside the messages
        # until finish; also of what this rank did not use
        self._averaged: dict[nn.Parameter, Tensor] = {}
        self.guard = GradientGuard(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(
                partial(_on_gradient, weakref.ref(self), index)
            )
            for index, parameter in enumerate(self.trainable)
        ]

    # -- what a subclass decides ---------------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        """The gradient of `trainable[index]` is complete in this backward; communication may start."""

    def _send_next(self) -> None:
        """Send the first of `unsent`."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Send what has not been sent, wait for all, leave the means in `.grad`."""

    # -- a step --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result."""
        if torch.is_grad_enabled():
            self.guard.before_forward(self._synchronizes)
        return self.module(*args, **kwargs)

    def average(self, parameter: nn.Parameter) -> "Started":
        """Start to replace a gradient, zeros if it is missing here, by its mean over the ranks; `wait()` for that."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._averaged[parameter] = gradient
        sent = gradient.contiguous()
        started = self.all_reduce(sent)
        return started if sent is gradient else CopiedBack(gradient, sent, started)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the mean over ranks.

        Call it on every rank after backward, before step.

        Gradients that backward did not make (`parameter.grad = …`) are averaged too. Without any
        gradient, and without a synchronised forward, since the last call it does nothing.

        Raises:
            ValueError: the module trains a parameter now that was frozen, or not there, at
                construction.
            RuntimeError: a gradient was changed after backward, when it may have been sent.
        """
        if not self.guard.begin_finish():
            return
        try:
            with torch.no_grad():
                if self.unsent:
                    self.send_rest()
                flags = None if self._used is None else self.all_reduce(self._used.write())
                self._synchronize()
                if flags is not None:
                    flags.wait()
                    if self._used.unused:
                        self._used.adopt(self.mean_of)
        finally:
            self._averaged.clear()
            self.guard.end_finish()

    def send_rest(self) -> None:
        """Send what backward did not bring, where messages need not wait for the end."""
        while self.unsent:
            self._send_next()

    def _flags_apart(self) -> UsedFlags:
        """Used flags that have a message of their own."""
        return UsedFlags(self.trainable, torch.empty(len(self.trainable), device=self.device))

    def mean_of(self, index: int) -> Tensor:
        """Where the mean of the gradient of `trainable[index]` arrives, also of one that only other ranks have."""
        return self._averaged[self.trainable[index]]

    # -- the rest of the interface -------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """All parameters, whole."""
        return [whole(name, parameter) for name, parameter in (*self.named, *self.frozen)]

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook; the module is as before (gradients may still be views of a bucket's memory)."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        withdraw_targets(self.trainable)
        order.begun.pop(self, None)
        self.guard.close()


class CopiedBack(NamedTuple):
    """The mean of a gradient that is not contiguous in memory.

    Attributes:
        gradient: where the mean is put.
        sent: its contiguous copy.
    """

    gradient: Tensor
    sent: Tensor
    started: OneLevel | Message

    def wait(self) -> None:
        """Wait for the mean."""
        self.started.wait()
        self.gradient.copy_(self.sent)


Started = OneLevel | Message | CopiedBack


def _on_gradient(owner: weakref.ref, index: int, _: nn.Parameter) -> None:
    """A parameter's hook; holds its wrapper weakly, so that dropping the wrapper ends its communication."""
    wrapper = owner()
    if wrapper is not None and wrapper.guard.accept(index, wrapper._synchronizes):
        wrapper._gradient_ready(index)
