"""What does gradient synchronisation cost, and how much of it can be hidden?

Times no communication at all (`local`), the hand-written strategies and torch's DDP in one run, interleaved so
that drift hits all alike, and explains each: what it sent (checked against the closed form), how long
communication ran and how much of that compute covered (from the profiler), and whether its result equals
training in one process.

What to run is in `config`, the rows in the order they are measured in `measuring`, what a row tells beside its times in
`account`, table, findings and pictures in `view`.
"""

from distlab.experiment import Experiment

from .config import PRESETS_OF_OPTIONS, DDPBenchConfig
from .measuring import measure
from .view import VIEW, draw_step_times, wrong_rows

__all__ = ["EXPERIMENT", "DDPBenchConfig", "draw_step_times", "wrong_rows"]

EXPERIMENT = Experiment(
    DDPBenchConfig, measure, VIEW, presets=PRESETS_OF_OPTIONS, ranks="many", wrong=wrong_rows
)
