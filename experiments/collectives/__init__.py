"""How fast are this machine's collectives?

    distlab run collectives                              # all GPUs, or two CPU ranks
    distlab run collectives --nproc 4 --group-sizes 2 4
    distlab run collectives --preset contention          # and what they cost a computation
    distlab run collectives --preset contention --ways all-reduce all-reduce-4-ctas --megabytes 256

The sweep (`sweep.py`) times the library's eight collectives, from all-reduce to all-to-all, and
rings made of sends and receives. Payloads have sizes from kilobytes to two gigabytes. The groups
are the first 2, 4, … ranks of one launch. α–β is fitted to each collective (piecewise, by relative
error). Every row's result is checked.

With `--contention` the run also measures what messages cost a computation that runs at the same
time (`contention.py`). All ranks of the launch take part. The rows are in `parts/contention`.
Preset `contention` does so after a short sweep of the two collectives that are sent.
"""

from dataclasses import dataclass

from distlab.experiment import Experiment, RankContext, Records, Run

from .contention import CONTENTION_VIEW, ContentionOptions, measure_ways, wrong_messages
from .sweep import CPU_SIZES, SWEEP_VIEW, SweepOptions, measure_groups, wrong_timings


# Fields of the last base come first, so the options of the sweep do.
@dataclass(frozen=True)
class CollectivesConfig(ContentionOptions, SweepOptions):
    """Options of both measurements. Raises ValueError for a value that is not allowed."""


def measure(config: CollectivesConfig, context: RankContext, run: Run) -> None:
    """Time everything that has no row yet. Call it on every rank.

    Raises:
        ValueError: group sizes that cannot be, see `SweepOptions.groups`, or a way to send messages
            that this machine does not have, see `ContentionOptions.ways_on`.
        MemoryError: on a CPU, a payload that does not fit. On a GPU such a row says OOM.
    """
    # Both raise before the first row is measured.
    groups = config.groups(context.world_size)
    ways = config.ways_on(context.backend)
    measure_groups(config, groups, context, run)
    if config.contention:
        measure_ways(config, ways, context, run)


def wrong_rows(records: Records) -> list[str]:
    """Return a line for each row whose collective had another result than it should."""
    return wrong_timings(records) + wrong_messages(records)


PRESETS = {
    "cpu": {"sizes": CPU_SIZES, "megabytes": (1.0, 4.0), "matrix": 384},
    "quick": {
        "sizes": (4_096, 32_768, 262_144, 2_097_152),
        "repeats": 5,
        "budget_s": 0.1,
        "megabytes": (4.0,),
        "rounds": 2,
        "least_ms": 10.0,
        "matrix": 384,
    },
    "contention": {
        "operations": ("all_reduce", "all_gather"),
        "sizes": (67_108_864, 268_435_456),  # 64 and 256 MiB, as `megabytes`
        "contention": True,
    },
    "contention-cpu": {"sizes": (1_048_576, 4_194_304)},
    "smoke": {
        "operations": ("all_reduce", "broadcast"),
        "sizes": (4_096, 65_536, 262_144),
        "group_sizes": (2,),
        "warmup": 1,
        "repeats": 3,
        "budget_s": 0.05,
        "contention": True,
        "megabytes": (0.01,),
        "rounds": 2,
        "least_ms": 1.0,
        "matrix": 64,
    },
}

EXPERIMENT = Experiment(
    CollectivesConfig,
    measure,
    SWEEP_VIEW,
    presets=PRESETS,
    ranks="many",
    wrong=wrong_rows,
    parts=(CONTENTION_VIEW,),
)
