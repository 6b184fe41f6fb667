"""How long do the parts of a training step take, how much memory, and where does either go?

    distlab run model_benchmark --size small --batch 4 --context 128 --warmup 0 1 2 5
    distlab run model_benchmark --size medium --dtype fp32 bf16 --attention naive sdpa flash --ops torch triton
    distlab run model_benchmark --quick --profile --memory-snapshot --saved

Times forward without gradients, forward, forward and backward, and the full step for every combination of the given
sizes, contexts, batches, dtypes, implementations and strategies; each row is checked against the plainest model of the
same weights, its clock against the wall's, and its speed against the device's peak.

On request the full step of each combination is taken apart: the kernels with the most time in forward, backward and
optimizer, and the kinds of work by time beside their FLOPs, from the profiler's trace (`work`); memory over time by
category, with the largest blocks and who asked for them (`memory`); and what a block saves for backward, eager,
compiled and with this lab's kernels (`saved`).

What to run is in `config`, the rows in the order they are measured in `measuring`, table and pictures in `view`.
"""

from distlab.experiment import Experiment

from . import memory, saved, work
from .config import BenchmarkConfig
from .measuring import measure
from .view import VIEW

PRESETS = {
    "quick": {"warmups": (1,)},
    "smoke": {"batch": (1,), "context": (16,), "warmups": (1,), "repeats": 3, "modes": ("forward", "step")},
}
EXPERIMENT = Experiment(
    BenchmarkConfig, measure, VIEW, presets=PRESETS, ranks="many", nproc=1,
    parts=(work.KERNEL_VIEW, work.WORK_VIEW, memory.VIEW, saved.VIEW),
)  # fmt: skip
