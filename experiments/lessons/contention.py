"""What does a collective cost compute that runs at the same time?

    distlab run contention --nproc 2
    distlab run contention --nproc 2 --ways all-reduce all-reduce-4-ctas --megabytes 256

NCCL's kernels occupy multiprocessors, one per CTA (thread block) of their communicator, and all
transfers use the memory's bandwidth. While long kernels run, a message also waits until one of them
leaves multiprocessors free. A row is a computation, bound by arithmetic or by memory, during a
queue of messages that are sent in one way: how fast each runs together with the other, and what one
message costs the computation. On CPUs messages and computation share cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    Experiment,
    Options,
    RankContext,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import computations, disturb, traffic

MIB = 2**20


# the rank and a payload's elements → messages, as a context
Way = Callable[[RankContext, int], Any]
EVERYWHERE: dict[str, Way] = {"all-reduce": all_reduces, "all-gather": all_gathers}
ON_GPUS: dict[str, Way] = {
    **{f"all-reduce-{ctas}-ctas": partial(all_reduces, ctas=ctas) for ctas in (1, 4, 16, 32)},
    "all-reduce-copy-engines": copied_all_reduces,
    "all-gather-copy-engines": copied_all_gathers,
}
WAYS = EVERYWHERE | ON_GPUS


@dataclass(frozen=True)
class ContentionConfig(Options):
    """Options of the experiment. Raises ValueError for a value that is not allowed."""

    ways: tuple[str, ...] = option(
        (), "ways to send messages [all that this machine has]", choices=tuple(WAYS)
    )
    megabytes: tuple[float, ...] = option((64.0, 256.0), "MiB of a message", above=0)
    rounds: int = option(5, "number of rounds, over which medians are taken", least=2)
    least_ms: float = option(50.0, "ms of computation during messages, at least", above=0)
    matrix: int = option(4096, "side of the matmul, in bf16, on a CPU in fp32", least=1)


def measure(config: ContentionConfig, context: RankContext, run: Run) -> None:
    """Measure every row; call it on every rank.

    Raises:
        ValueError: one rank alone, or a way that needs NCCL, without it.
    """
    ways = config.ways or tuple(WAYS if context.backend == "nccl" else EVERYWHERE)
    if context.world_size < 2 or (context.backend != "nccl" and set(ways) & set(ON_GPUS)):
        raise ValueError(
            f"contention: {context.world_size} ranks on {context.backend}: start two or more with --nproc; without "
            f"NCCL --ways has {', '.join(EVERYWHERE)}"
        )
    for way in ways:
        for size in config.megabytes:
            run.progress(f"{way} of {size:g} MiB")
            count = -(-int(size * MIB) // (4 * 128 * context.world_size)) * 128 * context.world_size
            with WAYS[way](context, count) as messages:
                error = checked(context, way, messages)
                for name, compute in computations(config.matrix, context.device).items():
                    found = disturb(
                        context,
                        compute,
                        messages.send,
                        least_ms=config.least_ms,
                        rounds=config.rounds,
                    )
                    found |= costs(found, way, 4 * count, context.world_size) | {
                        "max_abs_error": error
                    }
                    shared = {"world_size": context.world_size, "backend": context.backend}
                    run.add(
                        f"{name} beside {way}",
                        found,
                        computation=name,
                        way=way,
                        megabytes=size,
                        **shared,
                    )


def fill(tensors: Sequence[torch.Tensor], value: float) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def checked(context: RankContext, way: str, messages: Messages) -> float:
    """Return the largest error of a message from other values on each rank.

    Leaves values that repetitions do not change.
    """
    ranks = torch.arange(1.0, context.world_size + 1, device=context.device)
    if way.startswith("all-gather"):
        expected = ranks.repeat_interleave(messages.sent[0].numel())
        kept = 1.0
    else:
        averages = collectives.averages_in_reduction(context.device, context.group)
        expected, kept = (ranks.mean(), 1.0) if averages else (ranks.sum(), 0.0)
    fill(messages.sent, context.rank + 1)
    messages.send(0).wait()
    error = (messages.received[0] - expected).abs().max().item()
    fill(messages.sent, kept)
    return max(collectives.gather_objects(error, context.group))


def costs(found: dict[str, float], way: str, num_bytes: int, ranks: int) -> dict[str, float]:
    """Return the cost of a message to the computation, in ms, and the bus bandwidths.

    They are those of messages alone and during computation.
    """
    carried = num_bytes * traffic(
        "all_gather" if way.startswith("all-gather") else "all_reduce", ranks
    )
    lost_ms = found["comm_beside_ms"] * (1 - found["compute_rate"])
    return {
        "alone_busbw_gb_per_s": carried / found["comm_alone_ms"] / 1e6,
        "beside_busbw_gb_per_s": carried / found["comm_beside_ms"] / 1e6,
        "lost_ms_per_gb": lost_ms / num_bytes * 1e9,
    }


def wrong_rows(records: Records) -> list[str]:
    """Rows whose messages did not bring what they should, a line each."""
    return [
        f"{record.variant} of {record.config['megabytes']:g} MiB: off by {record.metrics['max_abs_error']:g}"
        for record in records
        if not record.metrics["max_abs_error"] < 1e-5
    ]


VIEW = View(
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
    reading="A rate is the speed relative to running alone, of the computation and of the messages. What is lost is "
    "the computation's own time that a message takes from it, per gigabyte of payload: a slow message that disturbs "
    "little can cost as much as a fast one that disturbs a lot. Bus bandwidth as in allreduce_sweep.",
    noise="Half of the range of the computation's times during messages.",
)

QUICK = {"megabytes": (4.0,), "matrix": 384, "rounds": 2, "least_ms": 10.0}
EXPERIMENT = Experiment(
    ContentionConfig,
    measure,
    VIEW,
    presets={
        "cpu": {"megabytes": (1.0, 4.0), "matrix": 384},
        "quick": QUICK,
        "smoke": QUICK | {"megabytes": (0.01,), "least_ms": 1.0, "matrix": 64},
    },
    ranks="many",
    wrong=wrong_rows,
)
