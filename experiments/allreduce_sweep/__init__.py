"""How fast are this machine's collectives, how well do two constants describe them, and what do they disturb?

    distlab run allreduce_sweep                                        all GPUs, or two CPU ranks
    distlab run allreduce_sweep --nproc 4 --group-sizes 2 4

Times the library's all-reduce, all-gather, reduce-scatter and broadcast, and rings made of sends and receives, for
sizes from kilobytes to two gigabytes on the first 2, 4, … ranks of one launch; fits α–β to each (piecewise, by relative
error); and measures how a matmul and an all-reduce slow each other down, both ways. Every row's result is checked. The
fits are records: `distlab.simulate.calibrate.measured_links` reads them for predictions.

What to sweep, and the sweep, are in `measuring`, the fits in `fitting`, table, findings and curves in `view`.
"""

from distlab.experiment import Experiment

from .fitting import contention, fits, timings, with_fits
from .measuring import CPU_SIZES, GPU_SIZES, KIB, SweepConfig, measure
from .view import VIEW, findings, wrong_rows

__all__ = ["EXPERIMENT", "SweepConfig", "contention", "findings", "fits", "timings", "with_fits", "wrong_rows"]

PRESETS = {
    "gpu": {"sizes": GPU_SIZES, "contention_mb": 256.0},
    "cpu": {"sizes": CPU_SIZES, "contention_mb": 4.0},
    "quick": {"sizes": tuple(4 * KIB * 8**k for k in range(4)), "repeats": 5, "budget_s": 0.1},
    "smoke": {
        "operations": ("all_reduce", "broadcast"), "sizes": (4096, 65536, 262144), "group_sizes": (2,), "warmup": 1,
        "repeats": 3, "budget_s": 0.05, "contention_mb": 0.004, "matrix": 64,
    },
}  # fmt: skip
EXPERIMENT = Experiment(SweepConfig, measure, VIEW, presets=PRESETS, ranks="many", wrong=wrong_rows)
