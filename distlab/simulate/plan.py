"""Memory and time of a training step, before anything is allocated: `--plan` of every command."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from distlab.comm import RankContext
from distlab.hardware import GPUSpec, lookup
from distlab.parallel import STRATEGIES
from distlab.simulate.estimate import estimate_step, machine_of
from distlab.theory.memory.peak import StepMemory
from distlab.theory.step_time import StepTime, has_closed_form
from distlab.train.memory_budget import (
    GIB,
    PlannedStep,
    memory_of_a_rank,
    settled,
    with_shard_size,
)


@dataclass(frozen=True)
class Plan:
    """Prediction of a step.

    Args:
        step: step with `checkpointing` and `shard_size` resolved.
        memory: memory of a rank.
        free_bytes: bytes that a rank may allocate now. None if they are not known.
        time: time of the step. None if the device's speed is not known, or if there is no closed
            form for the strategy or the attention.
    """

    step: PlannedStep
    memory: StepMemory
    free_bytes: int | None
    time: StepTime | None

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f" of {self.free_bytes / GIB:,.1f} free"
        time = (
            "whose time is not known" if self.time is None else f"of {1e3 * self.time.step:,.0f} ms"
        )
        peak = f"{self.memory.peak.total / GIB:,.1f} GiB"
        most = f"{peak}{free} on each rank ({self.memory.peak_phase})"
        return f"{self.step}: blocks keep {self.step.checkpointing}, at most {most}, a step {time}"


def plan_steps(
    steps: Sequence[PlannedStep], context: RankContext, micro_batches: int = 1
) -> list[Plan]:
    """Predict each of these steps on the ranks of this context. A collective.

    Args:
        steps: steps to predict.
        context: context of this rank.
        micro_batches: number of micro-batches accumulated in a step.
    """
    on_gpu = context.device.type == "cuda"
    # One look for all steps, so that they are compared with the same number.
    free = memory_of_a_rank(context.device, context)
    gpu = lookup(torch.cuda.get_device_name(context.device)) if on_gpu else None
    plans = []
    for planned in steps:
        step = with_shard_size(planned, context)
        # `auto` becomes the least recomputation that fits.
        step = replace(step, checkpointing=settled(step, context))
        memory = step.memory(context.world_size, on_gpu=on_gpu)
        time = step_time(step, gpu, context.world_size, micro_batches)
        plans.append(Plan(step, memory, free, time))
    return plans


def step_time(
    step: PlannedStep, gpu: GPUSpec | None, ranks: int, micro_batches: int = 1
) -> StepTime | None:
    """Return the time of a step. None if there is no closed form, or if the GPU is unknown.

    Args:
        step: step with `checkpointing` resolved.
        gpu: datasheet of the GPU, or None.
        ranks: number of ranks.
        micro_batches: number of micro-batches accumulated in a step.
    """
    if gpu is None or step.model.attention == "naive":
        return None
    if not has_closed_form(STRATEGIES[step.strategy]):
        return None
    return estimate_step(
        step.model,
        step.strategy,
        machine_of(gpu, dtype=step.dtype, head_dim=step.model.head_dim),
        batch=step.batch,
        ranks=ranks,
        dtype=step.dtype,
        checkpointing=step.checkpointing,
        micro_batches=micro_batches,
        group=step.shard_size,
        kernels="fused" if step.compiled else None,
        layout=step.layout,
        optimizer=step.optimizer,
    )
