"""How well do the strategies scale on this host? Weak and strong scaling measured on 1, 2, 4, … of its ranks at once.

    distlab run scaling_measured                                  one rank per GPU, or two on a CPU
    distlab run scaling_measured --nproc 8 --minutes 8
    distlab run scaling_measured --nproc 8 --minutes 8 --name 20250101-120000       goes on with that run

One launch, sub-groups of its first ranks. Predictions are written before anything is timed and kept as they are; after
every cell (one regime on one number of ranks) its rows are written, so that a run that was cut off goes on under its
`--name`. A cell interleaves all strategies. After each, parameters (and gradients, where whole ones exist) are compared
bit by bit across ranks. Each group size also gets a short sweep of collectives with its fit.

What to measure and what is said beforehand is in `prediction`, the cells and their order in `measuring`,
table, findings and pictures in `view`.
"""

from distlab.experiment import Experiment
from distlab.report.run import same_run

from .measuring import measure
from .prediction import MeasureConfig
from .view import VIEW, wrong_rows

ON_CPU = {
    "regimes": ("weak:tiny:2", "strong:tiny:4"), "context": 32, "dtype": "fp32", "bucket_size_mb": 4.0,
    "sweep_bytes": tuple(4096 * 8**k for k in range(4)),
}  # fmt: skip
QUICK = ON_CPU | {"strategies": ("bucketed", "torch-ddp"), "warmup": 1, "steps": 3}
SMOKE = {"regimes": ("weak:tiny:1",), "strategies": ("bucketed",), "context": 16, "sweep_bytes": (4096, 16384)}
PRESETS = {"cpu": ON_CPU, "quick": QUICK, "smoke": QUICK | SMOKE}
EXPERIMENT = Experiment(
    MeasureConfig, measure, VIEW, presets=PRESETS, ranks="many", wrong=wrong_rows,
    same_run=lambda before, now: [line for line in same_run(before, now) if not line.startswith("option minutes ")],
)  # fmt: skip
