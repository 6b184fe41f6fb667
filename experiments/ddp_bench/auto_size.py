"""Choice of `--size auto`: the largest model and batch that the memory of these GPUs admits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from distlab.comm import RankContext
from distlab.train.memory_budget import ROOM, memory_of_a_rank

if TYPE_CHECKING:
    from experiments.ddp_bench import DDPBenchConfig

# Models that may be chosen, the largest first, each with the divisor of --batch. On an H100 and on
# an H200, 8 × 2,048 tokens of `medium` with compiled blocks keep the GPU busy for more than 90 % of
# a step. Larger models do that as well, but their run takes longer than two minutes. A half of the
# batch still keeps the GPU busier than a smaller model.
CHOICES = (
    ("medium", 1),
    ("medium", 2),
    ("small", 1),
    ("small", 2),
    ("small", 4),
    ("tiny", 1),
    ("tiny", 4),
)


def sized(config: DDPBenchConfig, context: RankContext) -> DDPBenchConfig:
    """Replace `--size auto` by a model and batch that fit, and bf16 by fp16 on older GPUs.

    All ranks agree: the rank with the least free memory decides. If nothing fits, the smallest
    choice is returned, and the run ends with the message of a model that does not fit.
    """
    if config.size != "auto":
        return config
    if config.factory is not None:
        # The model is the user's. The size of a preset only fills the field.
        return replace(config, size="tiny")
    if config.dtype == "bf16" and not computes_in_bf16(context.device):
        config = replace(config, dtype="fp16")
    free = memory_of_a_rank(context.device, context)
    for size, divisor in CHOICES:
        # The batch is never 0, also where --batch is smaller than the divisor.
        choice = replace(config, size=size, batch=max(1, config.batch // divisor))
        # ROOM is left for what the closed form does not count. An unknown amount of memory takes
        # the first choice.
        if free is None or peak_bytes(choice, context) <= ROOM * free:
            return choice
    return choice


def peak_bytes(config: DDPBenchConfig, context: RankContext) -> int:
    """Return the predicted peak memory of the row that needs most, in bytes on each rank."""
    on_gpu = context.device.type == "cuda"
    peaks = []
    for strategy in config.strategies:
        # Buckets and copies differ between strategies, and one run must hold the largest.
        plan = config.planned(strategy)
        peaks.append(plan.memory(context.world_size, on_gpu=on_gpu).peak.total)
    return max(peaks)


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether the device has instructions for bf16; GPUs before Ampere emulate it slowly."""
    if device.type != "cuda":
        # Runs on a CPU are for correctness, so a slow dtype is allowed there.
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)
