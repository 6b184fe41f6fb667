"""The contract on CUDA tensors without NCCL: gloo ranks that share one GPU, so that one GPU tests several ranks.

gloo copies its results back to the GPU from a thread of its own, at any time before `wait()` returns.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from traceback import format_exc

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankContext
from distlab.parallel import STRATEGIES
from distlab.precision import autocast
from distlab.testing import run_ranks
from tests.parallel import test_contract as contract
from tests.parallel.cases import CASES, Reference, build

OURS = ["naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "fsdp"]
REGIMES = ["fp32", "bf16", "accumulation", "clipping"]
MAX_NORM = 0.05  # below every gradient's norm here
TIMEOUT_S = 10  # of a row's collectives, after a rank that raised in it


def tolerance(strategy: str, regime: str, world_size: int) -> float:
    """How far parameters may lie from the reference's, in parts of how far these have moved."""
    plain = strategy in contract.STRATEGIES  # whose parameters stay where the reference's are, and as they are
    if plain and world_size == 2 and regime != "clipping":
        return 0.0
    if regime == "bf16":
        return 2**-6  # an ulp of a parameter may turn the rounding to 8 bits, and FSDP casts in other places
    # Sums of three, norms, and products of weights that lie elsewhere are added up in other orders. That is ulps of
    # parameters that move little: far above them, and far below the error of a message in half precision, 2⁻⁸.
    return 1e-3


def train(strategy: str, regime: str, context: RankContext) -> None:
    """Three steps beside one process; parameters follow the reference's and are the same on all ranks."""
    module = build("plain", context.rank, context.device)  # rank 0's seed is the reference's
    dtype = torch.bfloat16 if regime == "bf16" else None
    model, optimizer = STRATEGIES[strategy].build(
        module, context.group, torch.optim.SGD, {"lr": 0.1}, compute_dtype=dtype, bucket_size_mb=1e-4
    )
    reference = Reference("plain", context.world_size, context.device)
    expected = dict(reference.model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in expected.items()}
    parts = 2 if regime == "accumulation" else 1
    for step in range(3):
        optimizer.zero_grad()
        for part in range(parts):
            with model.no_sync() if part < parts - 1 else nullcontext():
                with model.autocast():
                    loss = CASES["plain"].loss(model, context.rank, parts * step + part, context.device)
                loss.backward()
            with autocast(context.device, dtype):
                reference.backward(parts * step + part)
        model.finish_gradient_synchronization()
        if regime == "clipping":
            norm = model.clip_grad_norm_(MAX_NORM)
            expected_norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), MAX_NORM)
            assert norm > MAX_NORM
            torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)  # an fp64 sum of squares and an fp32 one
        optimizer.step()
        model.shards_changed()
        reference.step()
    found = model.full_parameters()
    contract.assert_same_on_all_ranks([found[name] for name in expected], context)
    for name, parameter in expected.items():
        error = (found[name] - parameter).norm() / (parameter - start[name]).norm()
        allowed = tolerance(strategy, regime, context.world_size)
        assert error <= allowed, f"{name} is off by {error:.2g} of its way, {allowed:.2g} are allowed"
    model.close()


def rows() -> dict[str, Callable[[RankContext], None]]:
    found = {f"{name}, {regime}": partial(train, name, regime) for name in OURS for regime in REGIMES}
    for name in contract.STRATEGIES:
        for case in CASES:
            job = partial(contract.train_beside_reference, strategy=name, case=case, set_to_none=True)
            found[f"contract of {name}, {case}"] = job
    return found


def failures(context: RankContext) -> dict[str, str]:
    """Each row in a process group of its own, so that a rank that raised in one joins the others in the next."""
    found = {}
    for name, row in rows().items():
        dist.barrier(context.group)  # whose timeout is longer
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        try:
            row(replace(context, group=group))
        except Exception:
            found[name] = format_exc(limit=-2)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_on_one_gpu_train_as_one_process_does(world_size):
    found = run_ranks(failures, world_size, device="cuda:0", deadline_s=240, group_timeout_s=60)
    assert not any(found), "\n".join(
        f"rank {rank}, {name}: {text}" for rank, failed in enumerate(found) for name, text in failed.items()
    )
