"""How long do the parts of a training step take, and how much memory?

Times forward without gradients, forward, forward and backward, and the full step for every combination of the given
sizes, contexts, batches, types, implementations and strategies; each row is checked against the plainest model of the
same weights, its clock against the wall's, and its speed against the device's peak.

What to run is in `config`, the rows in the order they are measured in `measuring`, table and pictures in `view`.
"""

from .config import NAME, BenchmarkConfig
from .measuring import run
from .view import VIEW

__all__ = ["NAME", "VIEW", "BenchmarkConfig", "run"]
