"""Which bucket size is best here, and could one have known? Step time against bucket size, measured and predicted.

    distlab run bucket_sweep                                           all GPUs, or two CPU ranks
    distlab run bucket_sweep --nproc 2 --size xl --batch 2

Before anything is timed with buckets, the parts are: when backward has made each gradient, what all-reduces cost
(a fit, from records of allreduce_sweep or taken here), how backward and an all-reduce slow each other down, and what
packing costs. From these the step with every bucket size is predicted, then it is measured, and torch DDP's beside.

What to sweep is in `config`, the parts and the step that they predict in `prediction`, the sweep in `measuring`, table,
best size, findings and picture in `view`.
"""

from distlab.experiment import Experiment

from .config import BucketSweepConfig
from .measuring import measure
from .view import VIEW, optimum

__all__ = ["EXPERIMENT", "BucketSweepConfig", "optimum"]

QUICK = {
    "size": "tiny", "dtype": "fp32", "batch": 2, "context": 32, "bucket_sizes_mb": (1.0, 4.0, None), "warmup": 1,
    "steps": 4, "rounds": 1,
}  # fmt: skip
PRESETS = {
    "gpu": {"size": "medium", "batch": 8, "dtype": "bf16", "warmup": 3, "steps": 8},
    "cpu": {"steps": 5, "bucket_sizes_mb": (0.25, 1.0, 2.0, 4.0, 10.0, None)},
    "quick": QUICK,
    "smoke": QUICK | {"batch": 1, "context": 16, "bucket_sizes_mb": (1.0, None), "steps": 3},
}
EXPERIMENT = Experiment(BucketSweepConfig, measure, VIEW, presets=PRESETS, ranks="many")
