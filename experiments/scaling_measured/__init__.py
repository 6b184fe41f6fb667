"""How well do the strategies scale on this host? Weak and strong scaling measured on 1, 2, 4, … of its ranks at once.

    python -m experiments.scaling --measure                       one rank per GPU, or two on a CPU
    torchrun --standalone --nproc_per_node=8 launch/scaling.py

One launch, sub-groups of its first ranks. Predictions are written before anything is timed and kept as they are; after
every cell (one regime on one number of ranks) the records are written, so that a run that was cut off goes on with
`--resume FOLDER`. A cell interleaves all strategies. After each, parameters (and gradients, where whole ones exist) are
compared bit by bit across ranks. Each group size also gets a short sweep of collectives with its fit.

What to measure is in `config`, what is said beforehand in `prediction`, the order of the cells and resuming in
`measuring`, one cell on one group in `cells`, table, findings and pictures in `view`.
"""

from .config import NAME, STRATEGIES, MeasureConfig, Regime
from .measuring import PREDICTIONS, run
from .view import VIEW, wrong_rows

__all__ = ["NAME", "PREDICTIONS", "STRATEGIES", "VIEW", "MeasureConfig", "Regime", "run", "wrong_rows"]
