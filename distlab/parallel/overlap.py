"""Overlapped data parallelism: an all-reduce per parameter, started during backward.

    compute        │ forward │ backward ─────────────── │      │ optimizer │
    communication  │         │   │ p9 │ p8 │ p7 │ … │ p0 │flags│          │

Communication hides behind the rest of backward; the cost left is the latency of many small messages. All ranks
issue in one plan order (reversed registration): a gradient that is early waits until those before it in the
plan have left. Issuing in the order in which hooks happen to fire would mix up different parameters' gradients
without any error as soon as two ranks' orders differ.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.parallel.buckets import adopt_foreign_gradients, write_used_flags
from distlab.parallel.data_parallel import DataParallel


class OverlapDDP(DataParallel):
    """Averages each gradient as soon as it and all before it in the plan are ready.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        process_group: default: the default group.
    """

    def __init__(self, module: nn.Module, *, process_group: ProcessGroup | None = None):
        super().__init__(module, process_group=process_group)
        self._flags = torch.empty(len(self.trainable), device=self.device)
        self._order = list(range(len(self.trainable) - 1, -1, -1))
        self._in_flight: list[tuple[int, Tensor, Tensor, Work]] = []

    def _gradient_ready(self, index: int) -> None:
        while len(self._in_flight) < len(self._order) and self._order[len(self._in_flight)] in self._ready:
            self._issue_next()

    @torch.no_grad()
    def _issue_next(self) -> None:
        index = self._order[len(self._in_flight)]
        parameter = self.trainable[index]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        sent = gradient.contiguous()
        work = collectives.all_reduce_mean(sent, self.process_group)
        self._in_flight.append((index, gradient, sent, work))

    @torch.no_grad()
    def _synchronize(self) -> None:
        while len(self._in_flight) < len(self._order):
            self._issue_next()
        in_flight, self._in_flight = self._in_flight, []
        write_used_flags(self._flags, self.trainable)
        flags_work = collectives.all_reduce_mean(self._flags, self.process_group)
        gradients: list[Tensor] = [self._flags] * len(in_flight)
        for index, gradient, sent, work in in_flight:
            self._wait(work)
            if sent is not gradient:
                gradient.copy_(sent)
            gradients[index] = gradient
        self._wait(flags_work)
        adopt_foreign_gradients(self._flags, self.trainable, gradients)
