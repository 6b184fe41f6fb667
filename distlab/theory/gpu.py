"""Limits of a GPU: the roofline, the occupancy of an SM, and the waves of a grid.

The roofline is the least time of an operation, limited by memory or by arithmetic:

    time ≥ max(FLOPs / peak, bytes / bandwidth)

An operation whose intensity (FLOPs per byte) is below the ridge, peak / bandwidth, is bound by
memory: fewer bytes make it faster, less arithmetic does not. Source: Williams, Waterman & Patterson
2009, "Roofline".

The occupancy is the number of blocks of threads that share an SM, relative to its places. An SM has
registers, shared memory, and places for warps and blocks. The scarcest decides how many blocks are
resident. Resident warps hide latency: while one waits for memory, another computes. The last wave
of a grid may fill an SM only in part.

The order of a matmul's tiles decides which strips of its inputs the programs of one wave share, and
so the share of their loads that the L2 can serve.

Allocation rules of compute capability 8.0, 9.0 and 10.0 (CUDA C++ Programming Guide; CUDA Occupancy
Calculator): registers per warp in units of 256, warps in groups of 4, shared memory in units of 128
bytes plus 1 KiB per block for the system, and at most 32 blocks per SM. Compute capability 8.6, 8.7
and 8.9 allow fewer blocks per SM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distlab.hardware import GPUSpec
from distlab.theory.checks import at_least_one
from distlab.theory.warp_access import WARP
from kernels.cost import Cost


@dataclass(frozen=True)
class Roofline:
    """Two ceilings of one device in one dtype.

    Args:
        peak: FLOP/s.
        bandwidth: bytes per second of device memory.

    Raises:
        ValueError: a number that is not positive.
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
        """Return the least seconds of an operation."""
        return max(cost.flops / self.peak, cost.bytes / self.bandwidth)

    def bound(self, cost: Cost) -> str:
        """Return what limits an operation: "memory" or "compute"."""
        compute_s = cost.flops / self.peak
        memory_s = cost.bytes / self.bandwidth
        # At the ridge itself both limit. It counts as compute: fewer bytes would not help.
        return "memory" if compute_s < memory_s else "compute"


def roofline(spec: GPUSpec, dtype: str = "bf16") -> Roofline:
    """Return the roofline of a GPU by its datasheet.

    Args:
        spec: datasheet.
        dtype: dtype of the arithmetic.

    Raises:
        ValueError: the GPU has no peak for that dtype. The message lists those it has.
    """
    if dtype not in spec.peak:
        raise ValueError(
            f"{spec.name} has no peak for {dtype!r}; choose one of {', '.join(spec.peak)}"
        )
    return Roofline(spec.peak[dtype], spec.hbm_bandwidth)


REGISTER_UNIT = 256  # registers
WARP_GROUP = 4  # warps
SHARED_UNIT = 128  # bytes
SYSTEM_SHARED = 1024  # bytes per block
MAX_BLOCKS_PER_SM = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True)
class Occupancy:
    """Residency of one kernel on one SM.

    Args:
        blocks: number of resident blocks.
        warps: number of resident warps.
        fraction: resident warps over the SM's places for warps.
        limiter: "registers", "shared memory", "warps" or "blocks". The first of these where several
            limit alike.
    """

    blocks: int
    warps: int
    fraction: float
    limiter: str


def _round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def occupancy(spec: GPUSpec, threads: int, registers: int, shared_bytes: int = 0) -> Occupancy:
    """Return the residency of a kernel's blocks on an SM.

    Args:
        spec: datasheet of the GPU.
        threads: number of threads of a block.
        registers: number of registers of a thread.
        shared_bytes: bytes of shared memory of a block.

    Raises:
        ValueError: a block that cannot run at all. The message says what is allowed.
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
    warps = -(-threads // WARP)  # warps of a block
    # Registers are given to whole warps, in units.
    registers_per_warp = _round_up(registers * WARP, REGISTER_UNIT)
    # Each of four schedulers of an SM has a quarter of the registers.
    warps_by_registers = spec.registers_per_sm // registers_per_warp // WARP_GROUP * WARP_GROUP
    allocated_warps = _round_up(warps, WARP_GROUP) if warps > WARP_GROUP else warps
    # The system keeps 1 KiB for each block.
    shared_per_block = _round_up(shared_bytes, SHARED_UNIT) + SYSTEM_SHARED
    blocks_by_shared_memory = MAX_BLOCKS_PER_SM + 1  # more than the limit: it never decides
    if shared_bytes:
        blocks_by_shared_memory = spec.shared_memory_per_sm // shared_per_block
    limits = {  # blocks
        "registers": warps_by_registers // allocated_warps,
        "shared memory": blocks_by_shared_memory,
        "warps": spec.max_warps_per_sm // warps,
        "blocks": MAX_BLOCKS_PER_SM,
    }
    # `min` takes the first of equal ones, in the order that `Occupancy.limiter` promises.
    limiter = min(limits, key=limits.__getitem__)
    blocks = limits[limiter]
    if blocks == 0:
        raise ValueError(
            f"{threads} threads × {registers} registers exceed the {spec.registers_per_sm} "
            f"registers of an SM of {spec.name}; use fewer of either"
        )
    resident_warps = blocks * warps
    return Occupancy(
        blocks=blocks,
        warps=resident_warps,
        fraction=resident_warps / spec.max_warps_per_sm,
        limiter=limiter,
    )


@dataclass(frozen=True)
class Waves:
    """Filling of a GPU by a grid.

    Args:
        waves: number of rounds of blocks. The last may fill only a part of the places.
        last: number of blocks of the last round.
        efficiency: ratio of blocks to the places of all rounds.
    """

    waves: int
    last: int
    efficiency: float


def wave_quantisation(blocks: int, sms: int, blocks_per_sm: int = 1) -> Waves:
    """Return the rounds of a grid of equal blocks.

    160 blocks on 148 SMs take two rounds, and the second has 12 blocks.

    Args:
        blocks: number of blocks of the grid.
        sms: number of SMs.
        blocks_per_sm: number of blocks that are resident on an SM.

    Raises:
        ValueError: a number below one.
    """
    at_least_one(blocks=blocks, sms=sms, blocks_per_sm=blocks_per_sm)
    places = sms * blocks_per_sm
    waves = -(-blocks // places)
    return Waves(
        waves=waves,
        last=blocks - (waves - 1) * places,
        efficiency=blocks / (waves * places),
    )


def tile_order(row_tiles: int, col_tiles: int, group: int) -> list[tuple[int, int]]:
    """Return the tiles of a matmul's result, (row, column), in the order of their programs.

    Groups of rows of tiles are walked one after the other, each column by column.

    Args:
        row_tiles: rows of tiles.
        col_tiles: columns of tiles.
        group: rows of tiles in a group. 1 is row order.

    Raises:
        ValueError: a number below one.
    """
    at_least_one(row_tiles=row_tiles, col_tiles=col_tiles, group=group)
    order = []
    for first in range(0, row_tiles, group):
        rows = range(first, min(first + group, row_tiles))
        for col in range(col_tiles):
            for row in rows:
                order.append((row, col))
    return order


def l2_hit_share(order: Sequence[tuple[int, int]], concurrent: int) -> float:
    """Return the share of a matmul's loads that the L2 serves.

    Each tile reads a strip of a and a strip of b. The tiles of one wave advance through the depth
    together: the first to ask for a piece of a strip fetches it from memory, and the others find it
    in the L2. Between waves nothing is kept, since the strips of a deep matmul do not fit.

    Args:
        order: (row, column) of each tile, as from `tile_order`.
        concurrent: number of tiles of a wave.

    Raises:
        ValueError: no tiles, or a number below one.
    """
    at_least_one(tiles=len(order), concurrent=concurrent)
    fetched = 0
    for start in range(0, len(order), concurrent):
        wave = order[start : start + concurrent]
        rows = {row for row, _ in wave}
        cols = {col for _, col in wave}
        # Each strip is fetched once per wave, however many tiles of the wave read it.
        fetched += len(rows) + len(cols)
    # Without sharing, every tile would fetch two strips.
    return 1 - fetched / (2 * len(order))
