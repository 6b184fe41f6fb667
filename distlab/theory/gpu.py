"""The roofline: least time of an operation on a GPU, and whether memory or arithmetic limits it.

    time ≥ max(FLOPs / peak, bytes / bandwidth)

An operation whose intensity (FLOPs per byte) is below the ridge, peak / bandwidth, is bound by
memory: less arithmetic does not help it, fewer bytes do. Source: Williams, Waterman & Patterson,
Roofline (2009).

The occupancy: blocks of threads that share an SM, the limit, and the cost of a partly filled last
wave.

An SM has registers, shared memory, and places for warps and blocks; the scarcest decides how many
blocks are resident. Resident warps are what hides latency: while one waits for memory, another
computes.

Allocation rules of compute capability 8.0 to 10.0 (CUDA C++ Programming Guide; CUDA Occupancy
Calculator): registers per warp in units of 256, warps in groups of 4, shared memory in units of 128
bytes plus 1 KiB per block for the system.
"""

from dataclasses import dataclass

from distlab.hardware import GPUSpec
from distlab.theory.checks import at_least_one
from distlab.theory.warp_access import WARP
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
        """FLOPs per byte at which both ceilings cross."""
        return self.peak / self.bandwidth

    def seconds(self, cost: Cost) -> float:
        """The floor of an operation's time."""
        return max(cost.flops / self.peak, cost.bytes / self.bandwidth)

    def bound(self, cost: Cost) -> str:
        """Return the limit: "memory" or "compute"."""
        return "memory" if cost.flops / self.peak < cost.bytes / self.bandwidth else "compute"


def roofline(spec: GPUSpec, dtype: str = "bf16") -> Roofline:
    """The roofline of a GPU by its datasheet.

    Raises:
        ValueError: the GPU has no peak for that dtype; the message lists those it has.
    """
    if dtype not in spec.peak:
        raise ValueError(
            f"{spec.name} has no peak for {dtype!r}; choose one of {', '.join(spec.peak)}"
        )
    return Roofline(spec.peak[dtype], spec.hbm_bandwidth)


REGISTER_UNIT = 256
WARP_GROUP = 4
SHARED_UNIT = 128
SYSTEM_SHARED = 1024
MAX_BLOCKS_PER_SM = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True)
class Occupancy:
    """Residency of one kernel on one SM.

    Args:
        blocks, warps: resident.
        fraction: warps over those the SM has places for.
        limiter: "registers", "shared memory", "warps" or "blocks"; the first of these where several
            limit alike.
    """

    blocks: int
    warps: int
    fraction: float
    limiter: str


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(spec: GPUSpec, threads: int, registers: int, shared_bytes: int = 0) -> Occupancy:
    """Residency of blocks of `threads` with `registers` per thread and `shared_bytes` per block.

    Raises:
        ValueError: a block that cannot run at all; the message says what is allowed.
    """
    if not 1 <= threads <= MAX_THREADS_PER_BLOCK:
        raise ValueError(f"threads={threads}: a block has 1 to {MAX_THREADS_PER_BLOCK}")
    if not 1 <= registers <= MAX_REGISTERS_PER_THREAD:
        raise ValueError(
            f"registers={registers}: a thread has 1 to {MAX_REGISTERS_PER_THREAD}; more are spilled"
        )
    if not 0 <= shared_bytes <= spec.shared_memory_per_block:
        most = spec.shared_memory_per_block
        raise ValueError(f"shared_bytes={shared_bytes}: a block on {spec.name} has 0 to {most}")
    warps = -(-threads // WARP)
    resident_warps = (
        spec.registers_per_sm
        // _round_up(registers * WARP, REGISTER_UNIT)
        // WARP_GROUP
        * WARP_GROUP
    )
    shared = _round_up(shared_bytes, SHARED_UNIT) + SYSTEM_SHARED
    limits = {
        "registers": resident_warps // _round_up(warps, WARP_GROUP if warps > WARP_GROUP else 1),
        "shared memory": spec.shared_memory_per_sm // shared
        if shared_bytes
        else MAX_BLOCKS_PER_SM + 1,
        "warps": spec.max_warps_per_sm // warps,
        "blocks": MAX_BLOCKS_PER_SM,
    }
    blocks = min(limits.values())
    if blocks == 0:
        raise ValueError(
            f"{threads} threads × {registers} registers exceed the {spec.registers_per_sm} registers of "
            f"an SM of {spec.name}; use fewer of either"
        )
    limiter = next(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / spec.max_warps_per_sm, limiter)


@dataclass(frozen=True)
class Waves:
    """Filling of a GPU by a grid.

    Args:
        waves: number of rounds in which all places are filled, the last perhaps partly.
        last: number of blocks of the last round.
        efficiency: ratio of blocks to the places of all rounds.
    """

    waves: int
    last: int
    efficiency: float


def wave_quantisation(blocks: int, sms: int, blocks_per_sm: int = 1) -> Waves:
    """Rounds of a grid of equal blocks. 160 blocks on 148 SMs take two: the second does 12 blocks.

    Raises:
        ValueError: a number below one.
    """
    at_least_one(blocks=blocks, sms=sms, blocks_per_sm=blocks_per_sm)
    places = sms * blocks_per_sm
    waves = -(-blocks // places)
    return Waves(waves, blocks - (waves - 1) * places, blocks / (waves * places))
