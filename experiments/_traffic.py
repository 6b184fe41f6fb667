"""The memory traffic of a computation, operator by operator, counted at torch's dispatcher."""

from typing import Any

from distlab.measure import memory_traffic
from distlab.measure.collectives import tensors_in
from distlab.simulate.events import EventLog


class TrafficLog(EventLog):
    """Log of `items` and, in `places`, the kind of traffic and innermost `open` range of each."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.open = [""]  # names of the open ranges, innermost last
        self.places: list[tuple[str, str]] = []

    def _add_operator(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        before = len(self.items)
        super()._add_operator(func, args, kwargs, result)
        # The base class has appended the operators of this call, so the new ones are after
        # `before`.
        for operator in self.items[before:]:
            if operator.flops:
                kind = "copy"  # a matmul's bytes move as those of a copy
            else:
                kind = memory_traffic.kind_of(tensors_in((args, kwargs)), tensors_in(result))
            self.places.append((kind, self.open[-1]))
