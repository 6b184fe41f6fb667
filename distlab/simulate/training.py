"""The lab's own training step, simulated: the Transformer, `TrainStep` and AdamW under a strategy."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer

from distlab.model import ModelConfig, TransformerLM, ops
from distlab.model.config import Checkpointing
from distlab.parallel import ParallelModel
from distlab.precision import DTYPES
from distlab.simulate.run import Mark, SimulatedStep, simulate_step
from distlab.theory.checks import at_least_one
from distlab.train.step import TrainStep, next_token_loss


def simulate_training(
    config: ModelConfig,
    strategy: str,
    *,
    batch: int,
    world_size: int,
    dtype: str = "bf16",
    bucket_size_mb: float | None = 25.0,
    checkpointing: Checkpointing = False,
) -> SimulatedStep:
    """One step of what ddp_bench times: full-length sequences, fused AdamW, computation in `dtype`.

    All is as on GPUs: NCCL's answers (see `fake_world`), and linear layers that write their weights' gradients in fp32
    straight to where they are wanted (see `model.ops.linear`).

    Args:
        config: the model; sequences have its context length.
        batch: sequences per rank.
        dtype: `fp32`, or `bf16`/`fp16` over fp32 parameters.
        checkpointing: see `TransformerLM`'s `checkpoint_blocks`.

    Raises:
        ValueError: an unknown strategy or dtype, one of torch's strategies, a size below one.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    at_least_one(batch=batch)
    compute_dtype = DTYPES[dtype]

    def make_step(wrapper: ParallelModel, optimizer: Optimizer, mark: Mark) -> Callable[[], Any]:
        tokens = torch.zeros(batch, config.context_length, dtype=torch.int64)
        train = TrainStep(wrapper, optimizer, next_token_loss, mark=mark)
        return lambda: train([(tokens, tokens)])

    with mock.patch.object(ops, "on_gpu", lambda x: True):
        return simulate_step(
            strategy,
            lambda: TransformerLM(config, device="cpu", checkpoint_blocks=checkpointing),
            make_step,
            world_size=world_size,
            bucket_size_mb=bucket_size_mb,
            compute_dtype=compute_dtype,
        )
