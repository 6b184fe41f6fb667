"""The real strategies on a world of any size, in one process, without memory and without a GPU."""

from distlab.simulate.step import SimulatedStep
from distlab.simulate.timeline import Machine, replay

__all__ = ["Machine", "SimulatedStep", "replay"]
