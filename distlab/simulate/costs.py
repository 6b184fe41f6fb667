"""How long things take: operators on a device, collectives on links, and both at once."""

from dataclasses import dataclass

from distlab.measure.collectives import CollectiveCall
from distlab.simulate.events import Compute
from distlab.theory.collective_time import further_hops


@dataclass(frozen=True)
class DeviceModel:
    """An operator takes the longer of its arithmetic and its memory traffic, and a launch.

    Args:
        flops_per_s: what matmuls reach (peak × efficiency).
        bytes_per_s: what memory-bound operators reach.
        launch_s: added to every operator: the gap before its kernel, the kernel's ramp and its tail.
        update_bytes_per_s: of the optimizer, one long pass over contiguous tensors; None: as `bytes_per_s`.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float = 0.0
    update_bytes_per_s: float | None = None

    def seconds(self, operator: Compute) -> float:
        """Time of one operator."""
        updates = operator.phase == "optimizer" and self.update_bytes_per_s is not None
        bytes_per_s = self.update_bytes_per_s if updates else self.bytes_per_s
        return self.launch_s + max(operator.flops / self.flops_per_s, operator.bytes / bytes_per_s)


@dataclass(frozen=True)
class LinkModel:
    """Collectives on rings of `ranks`: latency plus volume per link over its bandwidth (α–β).

    A ring all-reduce of S bytes sends 2·(N−1)/N·S over every link, a reduce-scatter or all-gather half of it (S is
    the whole, as the recorder counts), a pipelined broadcast S.

    Args:
        bytes_per_s: W, of one link in one direction, as measured (the "bus bandwidth").
        latency_s: α of one collective between two ranks.
        hop_s: more latency per further rank on the ring; an all-reduce of many ranks takes a tree, 2·log₂N hops.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    hop_s: float = 0.0

    def seconds(self, call: CollectiveCall, ranks: int) -> float:
        """Time of one collective; 0 for a single rank."""
        if ranks == 1:
            return 0.0
        hops = further_hops(ranks, all_reduce=call.op == "all_reduce")
        passes = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(call.op, (ranks - 1) / ranks)
        return self.latency_s + self.hop_s * hops + passes * call.bytes / self.bytes_per_s


@dataclass(frozen=True)
class Contention:
    """Rates while computation and communication run at once, relative to each alone (1: no disturbance).

    Both use SMs and memory bandwidth.
    """

    compute: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "communication"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a rate in (0, 1]; 1 means no disturbance")
