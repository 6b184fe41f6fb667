"""Where do the time and the memory of a training step go?

The full step of each configuration taken apart: the kernels with the most time in forward, backward and optimizer, and
the kinds of work by time beside their FLOPs, from the profiler's trace; memory over time by category, with the largest
blocks and who asked for them; and what a block saves for backward, eager, compiled and with this lab's kernels.

Each part measures and says how it is shown: kernels and kinds of work in `work`, memory over time in `memory`, what is
saved for backward in `residuals`. Which are wanted is in `inspection`; `parts` takes every configuration through them,
and `rows` has what they share.
"""

from .inspection import Inspection
from .parts import VIEWS, run

__all__ = ["VIEWS", "Inspection", "run"]
