"""What to sweep."""

from dataclasses import dataclass

from distlab.comm.subgroups import doubling_sizes
from distlab.measure.bandwidth import OPERATIONS, traffic

NAME = "allreduce_sweep"
KIB, MIB = 2**10, 2**20
# 4 KiB … 2 GiB; 1.5 GiB since rings change their ways at 1 GiB, and a piece of a fit takes three sizes
GPU_SIZES = tuple(sorted((*(4 * KIB * 2**k for k in range(20)), 1536 * MIB)))
CPU_SIZES = tuple(4 * KIB * 2**k for k in range(13))  # … 16 MiB


@dataclass(frozen=True)
class SweepConfig:
    """What to time.

    Args:
        operations: names of `distlab.measure.bandwidth.OPERATIONS`.
        sizes: payload bytes.
        group_sizes: numbers of ranks, each timed on the first so many; () for 2, 4, … and all.
        warmup, repeats: untimed and timed calls of each; repeats at most, fewer where `budget_s` is short.
        budget_s: seconds a row may take.
        contention_bytes: size of the all-reduces beside computation; 0 leaves contention out.
        matrix: side of the product; 0 for 8192 (bf16) on a GPU and 384 (fp32) on a CPU.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = GPU_SIZES
    group_sizes: tuple[int, ...] = ()
    warmup: int = 3
    repeats: int = 20
    budget_s: float = 1.0
    contention_bytes: int = 256 * MIB
    matrix: int = 0

    def __post_init__(self) -> None:
        for operation in self.operations:
            traffic(operation, 2)
        if not self.operations or len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ValueError(f"sizes={self.sizes}: give two or more positive sizes, and an operation")
        if self.repeats < 3 or self.warmup < 0 or self.contention_bytes < 0 or self.matrix < 0:
            raise ValueError(
                f"repeats={self.repeats} (3 or more), warmup={self.warmup}, contention_bytes="
                f"{self.contention_bytes}, matrix={self.matrix} (not negative)"
            )

    def groups(self, world_size: int) -> tuple[int, ...]:
        """The numbers of ranks to time, of those there are.

        Raises:
            ValueError: none, because one rank sends nothing, or more than there are.
        """
        if world_size < 2:
            raise ValueError("one rank alone sends nothing: start two or more with --nproc")
        groups = self.group_sizes or tuple(size for size in doubling_sizes(world_size) if size > 1)
        if not groups or min(groups) < 2 or max(groups) > world_size:
            raise ValueError(
                f"group sizes {groups} on {world_size} ranks: collectives need 2 to {world_size} ranks; start more "
                "with --nproc"
            )
        return groups
