"""Overlapped data parallelism: an all-reduce per parameter, started during backward.

    compute        │ forward │ backward ─────────────── │      │ optimizer │
    communication  │         │   │ p9 │ p8 │ p7 │ … │ p0 │flags│          │

Communication hides behind the rest of backward; the cost left is the latency of many small messages. All ranks
issue in one plan order (reversed registration): a gradient that is early waits until those before it in the
plan have left. Issuing in the order in which hooks happen to fire would mix up different parameters' gradients
without any error as soon as two ranks' orders differ.
"""

from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from distlab.comm.two_level import Message
from distlab.parallel.buckets import adopt_foreign_gradients, write_used_flags
from distlab.parallel.naive import NaiveDDP


class OverlapDDP(NaiveDDP):
    """Averages each gradient as soon as it and all before it in the plan are ready.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        mesh, process_group: see `DataParallel`.
    """

    def __init__(
        self, module: nn.Module, *, mesh: DeviceMesh | None = None, process_group: ProcessGroup | None = None
    ):
        super().__init__(module, mesh=mesh, process_group=process_group)
        self._order = list(range(len(self.trainable) - 1, -1, -1))
        self._in_flight: list[tuple[Tensor, Tensor, Work | Message]] = []

    def _gradient_ready(self, index: int) -> None:
        while not self._all_sent() and self._order[len(self._in_flight)] in self._ready and self._may_send():
            self._issue_next()

    def _issue_next(self) -> None:
        self._in_flight.append(self._send(self.trainable[self._order[len(self._in_flight)]]))

    def _all_sent(self) -> bool:
        return len(self._in_flight) == len(self._order)

    def _synchronize(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        in_order = [self.trainable[index] for index in self._order]
        write_used_flags(self._flags, in_order)
        flags_work = self._all_reduce(self._flags)
        gradients = [self._receive(*each) for each in in_flight]
        self._wait(flags_work)
        adopt_foreign_gradients(self._flags, in_order, gradients)
