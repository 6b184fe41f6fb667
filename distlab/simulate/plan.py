"""What a training step will take of memory and of time, before anything is allocated: `--plan` of every command."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from distlab.comm import RankContext
from distlab.comm.rank_process import on_main
from distlab.hardware import lookup
from distlab.simulate.estimate import estimate_step, machine_of
from distlab.simulate.world import in_own_process
from distlab.theory.memory.peak import StepMemory
from distlab.theory.step_time import StepTime
from distlab.train.requirements import GIB, PlannedStep, memory_of_a_rank, settled

# Whose steps have a closed form of their time, and torch's that send the same.
TIMED = ("local", "naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "fsdp")
LIKE = {"fsdp2": "fsdp", "torch-ddp": "bucketed", "torch-ddp-tuned": "bucketed", "bucketed-dma": "bucketed"}


@dataclass(frozen=True)
class Plan:
    """A step as predicted.

    Args:
        step: of which `checkpointing` is settled.
        memory: of a rank.
        free_bytes: that a rank may take now; None where nobody says.
        time: None where the device's speed is not known, or the strategy's time has no closed form.
    """

    step: PlannedStep
    memory: StepMemory
    free_bytes: int | None
    time: StepTime | None

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f" of {self.free_bytes / GIB:,.1f} free"
        time = "on a device whose speed is not known" if self.time is None else f"of {1e3 * self.time.step:,.0f} ms"
        most = f"{self.memory.peak.total / GIB:,.1f} GiB{free} on each rank ({self.memory.peak_phase})"
        return f"{self.step}: blocks keep {self.step.checkpointing}, at most {most}, a step {time}"


def plan_steps(steps: Sequence[PlannedStep], context: RankContext, micro_batches: int = 1) -> list[Plan]:
    """Predict each of these steps on the ranks of this context. A collective.

    Args:
        micro_batches: accumulated in a step.

    Raises:
        RuntimeError: times could not be predicted; the message says why.
    """
    on_gpu, free = context.device.type == "cuda", memory_of_a_rank(context.device, context)
    steps = [replace(step, checkpointing=settled(step, context)) for step in steps]
    name = torch.cuda.get_device_name(context.device) if on_gpu else "cpu"
    times: list[StepTime | None] = [None] * len(steps)
    if lookup(name) is not None:
        times = on_main(context, partial(in_own_process, step_times, steps, name, context.world_size, micro_batches))
    memory = [step.memory(context.world_size, on_gpu=on_gpu) for step in steps]
    return [Plan(*each) for each in zip(steps, memory, [free] * len(steps), times, strict=True)]


def step_times(steps: Sequence[PlannedStep], device_name: str, ranks: int, micro_batches: int) -> list[StepTime | None]:
    """The time of each step on a GPU that `hardware` knows; None for a strategy without a closed form."""
    gpu = lookup(device_name)

    def time(step: PlannedStep) -> StepTime | None:
        strategy = LIKE.get(step.strategy, step.strategy)
        if strategy not in TIMED:
            return None
        return estimate_step(
            step.model, strategy, machine_of(gpu, dtype=step.dtype), batch=step.batch, ranks=ranks, dtype=step.dtype,
            checkpointing=step.checkpointing, micro_batches=micro_batches,
        )  # fmt: skip

    return [time(step) for step in steps]
