"""How fast are this machine's collectives, how well do two constants describe them, and what do they disturb?

Times the library's all-reduce, all-gather, reduce-scatter and broadcast, and rings made of sends and receives, for
sizes from kilobytes to two gigabytes on the first 2, 4, … ranks of one launch; fits α–β to each (piecewise, by relative
error); and measures how a matrix product and an all-reduce slow each other down, both ways. Every row's result is
checked. The fits are records: `distlab.simulate.calibrate.measured_links` reads them for predictions.

What to sweep is in `config`, the sweep in `measuring`, the fits in `fitting`, table and findings in `view`, the curves
in `pictures`.
"""

from .config import CPU_SIZES, GPU_SIZES, KIB, MIB, NAME, SweepConfig
from .fitting import with_fits
from .measuring import run
from .rows import contention, fits, timings
from .view import VIEW, findings, wrong_rows

__all__ = [
    "CPU_SIZES",
    "GPU_SIZES",
    "KIB",
    "MIB",
    "NAME",
    "VIEW",
    "SweepConfig",
    "contention",
    "findings",
    "fits",
    "run",
    "timings",
    "with_fits",
    "wrong_rows",
]
