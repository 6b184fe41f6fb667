"""What does a collective cost a computation that runs at the same time?

NCCL's kernels occupy multiprocessors, one per CTA (thread block) of their communicator, and all
transfers use the memory's bandwidth. While long kernels run, a message also waits until one of them
leaves multiprocessors free. On CPUs messages and computation share cores.

A row is a computation, bound by arithmetic or by memory, during a queue of messages that are sent
in one way. It has the speed of each while the other runs, and the cost of one message to the
computation.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from distlab.comm import collectives
from distlab.comm.messages import (
    Messages,
    all_gathers,
    all_reduces,
    copied_all_gathers,
    copied_all_reduces,
)
from distlab.experiment import (
    Column,
    Options,
    RankContext,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import computations, disturb, traffic

CONTENTION = "contention"

# (context of the rank, elements of a message) → messages
Way = Callable[[RankContext, int], AbstractContextManager[Messages]]
EVERYWHERE: dict[str, Way] = {
    "all-reduce": all_reduces,
    "all-gather": all_gathers,
}
# The number of CTAs is that of multiprocessors that a message occupies.
ON_NCCL: dict[str, Way] = {
    "all-reduce-1-ctas": partial(all_reduces, ctas=1),
    "all-reduce-4-ctas": partial(all_reduces, ctas=4),
    "all-reduce-16-ctas": partial(all_reduces, ctas=16),
    "all-reduce-32-ctas": partial(all_reduces, ctas=32),
    "all-reduce-copy-engines": copied_all_reduces,
    "all-gather-copy-engines": copied_all_gathers,
}
WAYS = EVERYWHERE | ON_NCCL


@dataclass(frozen=True)
class ContentionOptions(Options):
    """Options of messages next to a computation. Raises ValueError for one that is not allowed."""

    contention: bool = option(False, "also measure what messages cost a computation")
    ways: tuple[str, ...] = option(
        (),
        "for --contention: ways to send messages [all that this machine has]",
        choices=tuple(WAYS),
        needs="contention",
    )
    megabytes: tuple[float, ...] = option(
        (64.0, 256.0), "for --contention: MiB of a message", above=0, needs="contention"
    )
    rounds: int = option(
        5,
        "for --contention: number of rounds, over which medians are taken",
        minimum=2,
        needs="contention",
    )
    least_ms: float = option(
        50.0,
        "for --contention: ms of computation during messages, at least",
        above=0,
        needs="contention",
    )
    matrix: int = option(
        4096,
        "for --contention: side of the matmul, in bf16, on a CPU in fp32",
        minimum=1,
        needs="contention",
    )

    def ways_on(self, backend: str) -> tuple[str, ...]:
        """Return the ways to measure on a communication backend.

        Raises:
            ValueError: a way that needs NCCL, on another backend.
        """
        # On NCCL all ways exist. Without a choice each of them is measured.
        if backend == "nccl":
            return self.ways or tuple(WAYS)
        refused = [way for way in self.ways if way in ON_NCCL]
        if refused:
            raise ValueError(
                f"--ways {' '.join(refused)}: needs NCCL, and this run is on {backend}; allowed: "
                f"{', '.join(EVERYWHERE)}"
            )
        return self.ways or tuple(EVERYWHERE)


def measure_ways(
    config: ContentionOptions, ways: Sequence[str], context: RankContext, run: Run
) -> None:
    """Measure every row of the part `contention`. Call it on every rank.

    Args:
        config: options of the measurement.
        ways: names of ways to send messages.
        context: context of this rank.
        run: run whose part takes the rows.
    """
    part = run.part(CONTENTION)
    for way in ways:
        for megabytes in config.megabytes:
            run.progress(f"{way} of {megabytes:g} MiB")
            count = elements(megabytes, context.world_size)
            # A way may have a communicator of its own, which is destroyed before the next one.
            with WAYS[way](context, count) as messages:
                error = checked(context, way, messages)
                for name, compute in computations(config.matrix, context.device).items():
                    metrics = disturb(
                        context,
                        compute,
                        messages.send,
                        least_ms=config.least_ms,
                        rounds=config.rounds,
                    )
                    # 4 bytes: messages are fp32.
                    metrics |= costs(metrics, way, 4 * count, context.world_size)
                    metrics["max_abs_error"] = error
                    part.add(
                        f"{name} beside {way}",
                        metrics,
                        computation=name,
                        way=way,
                        megabytes=megabytes,
                        world_size=context.world_size,
                        backend=context.backend,
                    )


def elements(megabytes: float, ranks: int) -> int:
    """Return the number of fp32 elements of a message, a multiple of 128 on each rank."""
    # An all-gather sends equal parts of every rank. 128 elements, 512 bytes, keep each part
    # aligned.
    num_bytes = int(megabytes * 2**20)
    blocks_per_rank = math.ceil(num_bytes / (4 * 128 * ranks))
    return blocks_per_rank * 128 * ranks


def fill(tensors: Sequence[torch.Tensor], value: float) -> None:
    """Write a value into every element."""
    for tensor in tensors:
        tensor.fill_(value)


def checked(context: RankContext, way: str, messages: Messages) -> float:
    """Return the largest error, on any rank, of a message in which each rank has other values.

    Leaves values in the tensors that repetitions do not change.
    """
    # Ranks send 1, 2, 3, … so a rank that is missing changes every result.
    rank_values = torch.arange(1.0, context.world_size + 1, device=context.device)
    if way.startswith("all-gather"):
        # Rank r sends r + 1 everywhere, so its part of the output is known.
        expected = rank_values.repeat_interleave(messages.sent[0].numel())
        unchanging = 1.0
    elif collectives.averages_in_reduction(context.device, context.group):
        # Averaging ones gives ones, however often the message is repeated.
        expected = rank_values.mean()
        unchanging = 1.0
    else:
        expected = rank_values.sum()
        unchanging = 0.0  # every other value would grow with each sum
    fill(messages.sent, context.rank + 1)
    messages.send(0).wait()
    error = (messages.received[0] - expected).abs().max().item()
    fill(messages.sent, unchanging)
    # A rank may be the only one with a wrong result, and only rank 0's rows are kept.
    return max(collectives.gather_objects(error, context.group))


def costs(metrics: dict[str, float], way: str, num_bytes: int, ranks: int) -> dict[str, float]:
    """Return ms that the computation loses per gigabyte sent, and the bus bandwidths.

    Args:
        metrics: result of `disturb`.
        way: name of a way to send messages.
        num_bytes: bytes of a message.
        ranks: number of ranks.
    """
    # Copies by copy engines carry the same bytes as the library's collective of the same kind.
    operation = "all_gather" if way.startswith("all-gather") else "all_reduce"
    # Bytes over the busiest link, see `traffic`. Over ms, 1e6 makes them GB/s.
    carried = num_bytes * traffic(operation, ranks)
    # While one message is under way, the computation runs at `compute_rate` of its speed. The rest
    # of that time is what the message costs it.
    lost_ms = metrics["comm_beside_ms"] * (1 - metrics["compute_rate"])
    return {
        "alone_busbw_gb_per_s": carried / metrics["comm_alone_ms"] / 1e6,
        "beside_busbw_gb_per_s": carried / metrics["comm_beside_ms"] / 1e6,
        "lost_ms_per_gb": lost_ms / num_bytes * 1e9,
    }


def wrong_messages(records: Records) -> list[str]:
    """Return a line for each row of this part whose messages had other values than they should."""
    found = []
    for record in records:
        # The records of a run also hold rows of the sweep, which have a check of their own.
        if record.experiment != CONTENTION:
            continue
        error = record.metrics["max_abs_error"]
        if not error < 1e-5:  # also of NaN
            megabytes = record.config["megabytes"]
            found.append(f"{record.variant} of {megabytes:g} MiB: off by {error:g}")
    return found


def findings(records: Records) -> list[str]:
    """Name the rows that are wrong."""
    return [f"WRONG: {reason}" for reason in wrong_messages(records)]


CONTENTION_VIEW = View(
    name=CONTENTION,
    question="What does a collective cost a computation that runs at the same time?",
    columns=[
        Column("variant", "computation and messages"),
        Column("config.megabytes", "MiB", "g"),
        Column("metrics.compute_alone_ms", "alone ms", ".3f"),
        Column("metrics.compute_beside_ms", "together ms", ".3f"),
        Column("metrics.compute_rate", "its rate", ".3f"),
        Column("metrics.compute_noise_pct", "± %", ".1f"),
        Column("metrics.alone_busbw_gb_per_s", "bus alone GB/s", ".1f"),
        Column("metrics.beside_busbw_gb_per_s", "bus together GB/s", ".1f"),
        Column("metrics.communication_rate", "their rate", ".3f"),
        Column("metrics.lost_ms_per_gb", "ms lost per GB", ".3f"),
        Column("metrics.max_abs_error", "max |Δ|", ".1e"),
    ],
    headline=headline_from(
        "Contention on {world_size} ranks, {device_name} ({backend}), torch {torch}"
    ),
    terminal=(
        "variant",
        "megabytes",
        "compute_rate",
        "compute_noise_pct",
        "alone_busbw_gb_per_s",
        "beside_busbw_gb_per_s",
        "lost_ms_per_gb",
    ),
    findings=findings,
    reading="A rate is the speed relative to running alone, of the computation and of the "
    "messages. ms lost per GB is the computation's own time that messages take from it, per "
    "gigabyte of payload: a slow message that disturbs little can cost as much as a fast one that "
    "disturbs a lot. Bus bandwidth is computed as in collectives.",
    noise="Half of the range of the computation's times during messages.",
)
