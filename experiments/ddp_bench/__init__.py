"""What does gradient synchronisation cost, and how much of it can be hidden?

Times no communication at all (`local`), the hand-written strategies and torch's DDP in one run, in interleaved rounds
so that clock drift affects all equally, and explains each: what it sent (checked against the closed form), how long
communication ran and how much of that compute covered (from the profiler), and whether its result equals
training in one process.

What to run and what a row tells are in `measuring`, table, findings and pictures in `view`.
"""

from distlab.experiment import Experiment
from distlab.parallel import strategies_on

from .measuring import DDPBenchConfig, measure
from .view import VIEW, wrong_rows

QUICK = {
    "strategies": ("local", "naive", "bucketed", "torch-ddp"),
    "rounds": 2, "steps": 4, "check_steps": 2, "profile_steps": 1,
}  # fmt: skip
PRESETS = {
    "gpu": {
        "size": "medium", "dtype": "bf16", "bucket_sizes_mb": (100.0,), "warmup": 3, "steps": 8, "rounds": 3,
        "strategies": strategies_on("cuda"),
    },
    "quick": QUICK,
    "smoke": QUICK | {
        "size": "tiny", "batch": 1, "context": 16, "bucket_sizes_mb": (1.0,), "warmup": 1, "steps": 5, "rounds": 1,
        "check_steps": 1,
    },
}  # fmt: skip
EXPERIMENT = Experiment(
    DDPBenchConfig, measure, VIEW, presets=PRESETS, ranks="many", wrong=wrong_rows
)
