"""The contract on CUDA tensors without NCCL: gloo ranks that share one GPU, so that one GPU tests
several ranks.

gloo copies its results back to the GPU from a thread of its own, at any time before `wait()`
returns.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from traceback import format_exc

import pytest
import torch.distributed as dist

from distlab.comm import RankContext
from distlab.testing import run_ranks
from tests.parallel import test_contract as contract
from tests.parallel.cases import CASES
from tests.parallel.test_accumulation import no_sync_and_then_a_step
from tests.parallel.test_build import norms

OURS = ("naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "zero2", "fsdp")
TIMEOUT_S = 10  # of a row's collectives, after a rank that raised in it


def rows() -> dict[str, Callable[[RankContext], None]]:
    found = {}
    for name in OURS:
        found[f"{name}, clipping"] = partial(norms, case="plain", names=(name,))
        found[f"{name}, accumulation"] = partial(
            no_sync_and_then_a_step, strategy=name, nested=True
        )
    for name in contract.STRATEGIES:
        for case in CASES:
            job = partial(
                contract.train_beside_reference, strategy=name, case=case, set_to_none=True
            )
            found[f"contract of {name}, {case}"] = job
    return found


def failures(context: RankContext) -> dict[str, str]:
    """Each row in a process group of its own, so that a rank that raised in one joins the others in
    the next.
    """
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
    lines = []
    for rank, failed in enumerate(found):
        for name, text in failed.items():
            lines.append(f"rank {rank}, {name}: {text}")
    assert not lines, "\n".join(lines)
