"""Simulation of the real strategies on any number of ranks, in one process and without memory.

Start with `step.simulate_training`, which runs a step on fake tensors, and `timeline.replay`, which
gives it a time. `estimate.estimate_step` predicts the time in closed form, without a step.
"""

from distlab.simulate.step import SimulatedStep
from distlab.simulate.timeline import Machine, replay

__all__ = ["Machine", "SimulatedStep", "replay"]
