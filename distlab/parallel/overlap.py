"""Overlapped data parallelism: an all-reduce per parameter, started during backward.

    compute        │ forward │ backward ─────────────── │      │ optimizer │
    communication  │         │   │ p9 │ p8 │ p7 │ … │ p0 │flags│          │

Communication is hidden behind the rest of backward. The remaining cost is the latency of many small
messages. All ranks send in the order of one plan, reversed registration: a gradient that is early
waits until those before it have left.
"""

from collections.abc import Callable

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.parallel.ddp import DataParallel


class OverlapDDP(DataParallel):
    """Averages each gradient as soon as it and all before it in the plan are ready.

    Args:
        module: model to wrap; see `DataParallel` for checks and errors.
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
        self._in_flight: list[Callable[[], None]] = []
        # Backward reaches the layers roughly from last to first.
        self._plan = list(reversed(range(len(self.trainable))))
        self.step.unsent.extend(self._plan)

    def _is_complete(self, message: int) -> bool:
        return message in self.step.ready

    def _send(self, message: int) -> None:
        self._in_flight.append(self.average(message))

    def _synchronize(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        self.step.unsent.extend(self._plan)  # the messages of the next step
        for wait_for_mean in in_flight:
            wait_for_mean()
