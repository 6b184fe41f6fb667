"""Naive data parallelism: after backward, one blocking all-reduce per parameter.

    compute        │ forward │ backward │                          │ optimizer │
    communication  │         │          │ p0 │ p1 │ p2 │ … │ flags │           │

Nothing overlaps, and each small message pays the full latency: the baseline that the others improve on.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from distlab.comm.two_level import Message
from distlab.parallel.buckets import adopt_foreign_gradients, write_used_flags
from distlab.parallel.data_parallel import DataParallel


class NaiveDDP(DataParallel):
    """Averages gradients one parameter at a time in `finish_gradient_synchronization()`.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        mesh, process_group: see `DataParallel`.
    """

    def __init__(
        self, module: nn.Module, *, mesh: DeviceMesh | None = None, process_group: ProcessGroup | None = None
    ):
        super().__init__(module, mesh=mesh, process_group=process_group)
        self._flags = torch.empty(len(self.trainable), device=self.device)

    def _synchronize(self) -> None:
        write_used_flags(self._flags, self.trainable)
        gradients = [self._receive(*self._send(parameter)) for parameter in self.trainable]
        self._wait(self._all_reduce(self._flags))
        adopt_foreign_gradients(self._flags, self.trainable, gradients)

    def _send(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor, Work | Message]:
        """Start to average a gradient, zeros if it is missing; returns it, what is sent of it, and what to wait for."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        sent = gradient.contiguous()
        return gradient, sent, self._all_reduce(sent)

    def _receive(self, gradient: Tensor, sent: Tensor, work: Work | Message) -> Tensor:
        self._wait(work)
        if sent is not gradient:
            gradient.copy_(sent)
        return gradient
