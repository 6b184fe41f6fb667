"""What a training step will take of memory and of time, before anything is allocated: `--plan` of every command."""

from dataclasses import dataclass, replace

import torch

from distlab.comm import RankContext
from distlab.hardware import lookup
from distlab.parallel import STRATEGIES
from distlab.simulate.estimate import estimate_step, machine_of
from distlab.theory.memory.peak import StepMemory
from distlab.theory.step_time import StepTime
from distlab.train.requirements import GIB, PlannedStep, memory_of_a_rank, settled


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


def plan_step(step: PlannedStep, context: RankContext, micro_batches: int = 1) -> Plan:
    """Predict a step on the ranks of this context. A collective.

    Args:
        micro_batches: accumulated in a step.

    Raises:
        ValueError: an unknown strategy.
    """
    on_gpu = context.device.type == "cuda"
    step = replace(step, checkpointing=settled(step, context))
    spec = lookup(torch.cuda.get_device_name(context.device)) if on_gpu else None
    like = {"fsdp2": "fsdp", "torch-ddp": "bucketed", "torch-ddp-tuned": "bucketed", "bucketed-dma": "bucketed"}
    strategy = like.get(step.strategy, step.strategy)
    time = None
    if spec is not None and not (STRATEGIES[step.strategy].is_peer and strategy == step.strategy):
        time = estimate_step(
            step.model, strategy, machine_of(spec, dtype=step.dtype), batch=step.batch, ranks=context.world_size,
            dtype=step.dtype, checkpointing=step.checkpointing, micro_batches=micro_batches,
        )  # fmt: skip
    memory = step.memory(context.world_size, on_gpu=on_gpu)
    return Plan(step, memory, memory_of_a_rank(context.device, context), time)
