"""The roofline: how fast an operation can be at best on a GPU, and which of memory and arithmetic says so.

    time ≥ max(FLOPs / peak, bytes / bandwidth)

An operation whose intensity (FLOPs per byte) lies below the ridge, peak / bandwidth, is bound by memory: doing less
arithmetic does not help it, moving fewer bytes does. Source: Williams, Waterman & Patterson, Roofline (2009).
"""

from dataclasses import dataclass

from distlab.hardware import GPUSpec
from kernels.cost import Cost


@dataclass(frozen=True)
class Roofline:
    """The two ceilings of one device in one dtype.

    Args:
        peak: FLOP/s.
        bandwidth: bytes per second of device memory.
    """

    peak: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.peak > 0 and self.bandwidth > 0):
            raise ValueError(f"peak={self.peak}, bandwidth={self.bandwidth}: both must be positive")

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which both ceilings meet."""
        return self.peak / self.bandwidth

    def seconds(self, cost: Cost) -> float:
        """The floor of an operation's time."""
        return max(cost.flops / self.peak, cost.bytes / self.bandwidth)

    def bound(self, cost: Cost) -> str:
        """ "memory" or "compute"."""
        return "memory" if cost.flops / self.peak < cost.bytes / self.bandwidth else "compute"

    def attainable(self, intensity: float) -> float:
        """FLOP/s at most for an intensity: the roof itself."""
        return min(self.peak, intensity * self.bandwidth)


def roofline(spec: GPUSpec, dtype: str = "bf16", *, bandwidth: float | None = None,
             peak: float | None = None) -> Roofline:
    """The roofline of a GPU by its datasheet, or with measured ceilings in place of it.

    Raises:
        ValueError: the GPU has no peak for that dtype; the message lists those it has.
    """
    if peak is None:
        if dtype not in spec.peak:
            raise ValueError(f"{spec.name} has no peak for {dtype!r}; choose one of {', '.join(spec.peak)}")
        peak = spec.peak[dtype]
    return Roofline(peak, spec.hbm_bandwidth if bandwidth is None else bandwidth)


def l2_resident(bytes_touched: float, spec: GPUSpec) -> bool:
    """Whether a working set may stay in the L2 between two passes, so that measured bandwidth is not the memory's."""
    return bytes_touched <= spec.l2_bytes
