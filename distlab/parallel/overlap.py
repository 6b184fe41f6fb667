"""Overlapped data parallelism: an all-reduce per parameter, started during backward.

    compute        │ forward │ backward ─────────────── │      │ optimizer │
    communication  │         │   │ p9 │ p8 │ p7 │ … │ p0 │flags│          │

Communication hides behind the rest of backward; the cost left is the latency of many small
messages. All ranks send in the order of one plan, reversed registration: a gradient that is early
waits until those before it have left.
"""

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.parallel.data_parallel import DataParallel, Started


class OverlapDDP(DataParallel):
    """Averages each gradient as soon as it and all before it in the plan are ready.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        mesh, process_group: see `DataParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__(module, mesh=mesh, process_group=process_group)
        self._ready: set[int] = set()
        self._in_flight: list[Started] = []
        self.unsent.extend(reversed(range(len(self.trainable))))

    def _gradient_ready(self, index: int) -> None:
        self._ready.add(index)
        if self.guard.may_send(index):
            while self.unsent and self.unsent[0] in self._ready:
                self._send_next()

    def _send_next(self) -> None:
        self._in_flight.append(self.average(self.trainable[self.unsent.popleft()]))

    def _synchronize(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        self._ready.clear()
        self.unsent.extend(reversed(range(len(self.trainable))))
        for started in in_flight:
            started.wait()
