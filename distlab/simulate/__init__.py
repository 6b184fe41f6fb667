"""The real strategies on a world of any size, in one process, without memory and without a GPU."""

from distlab.simulate.costs import DeviceModel, Machine
from distlab.simulate.events import EventLog, MemoryMoment
from distlab.simulate.run import SimulatedStep, simulate_step
from distlab.simulate.timeline import Timeline, replay

__all__ = [
    "DeviceModel",
    "EventLog",
    "Machine",
    "MemoryMoment",
    "SimulatedStep",
    "Timeline",
    "replay",
    "simulate_step",
]
