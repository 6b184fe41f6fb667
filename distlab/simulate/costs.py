"""How long things take: operators on a device, collectives on a network, and both at once."""

from dataclasses import dataclass
from typing import Protocol

from distlab.simulate.events import Compute


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


class Collectives(Protocol):
    """`distlab.theory.step_time.Network`, or collectives as measured (`calibrate.MeasuredLinks`)."""

    def seconds(self, num_bytes: float, ranks: int, *, operation: str) -> float:
        """Time of one collective; 0 for a single rank."""


@dataclass(frozen=True)
class Machine:
    """A kind of device, how they are connected, and how they disturb each other.

    Args:
        device: what one computes.
        network: what they send.
        contention: rates of computation and of communication while both run, relative to each alone (1: no
            disturbance); both use SMs and memory bandwidth.

    Raises:
        ValueError: a rate outside (0, 1].
    """

    device: DeviceModel
    network: Collectives
    contention: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if not all(0 < rate <= 1 for rate in self.contention):
            raise ValueError(f"contention={self.contention}: two rates in (0, 1]; 1 means no disturbance")
