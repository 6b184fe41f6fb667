"""All-reduce by copy engines: its arithmetic in one process, its refusals on gloo, itself
on GPUs.
"""

from functools import partial
from itertools import product

import pytest
import torch

from distlab.comm import collectives
from distlab.comm.copy_engine import CopyEngineTensors
from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel import BucketedDDP, CopyEngineDDP, ZeroOptimizer
from distlab.testing import run_ranks
from tests.parallel.cases import CASES, build, by_op
from tests.parallel.test_contract import on_two_ranks, run


def made_up(world_size):
    """Replicas of a tensor on all ranks, their mean, and memory for what arrives."""
    generator = torch.Generator().manual_seed(1)
    replicas = [torch.randn(5 * world_size, generator=generator) for _ in range(world_size)]
    mean = torch.stack(replicas).double().mean(0)
    return replicas, mean, torch.full((world_size - 1, 8), float("nan"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_doing_its_part_leaves_the_mean_everywhere(world_size):
    """What each rank does to memory that all share, one rank after the other."""
    replicas, expected, staging = made_up(world_size)
    with CollectiveRecorder() as recorder:
        for rank in range(world_size):
            torch.ops.distlab.all_reduce_mean_by_copy(replicas, staging, rank)
    for replica in replicas:
        assert torch.equal(replica, replicas[0])
    torch.testing.assert_close(replicas[0].double(), expected, rtol=1e-6, atol=1e-6)
    assert by_op(recorder) == {"all_reduce": (world_size, world_size * 5 * world_size * 4)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_slices_are_reduced_then_gathered(world_size):
    """The two halves of an all-reduce, with a step between them."""
    replicas, mean, staging = made_up(world_size)
    with CollectiveRecorder() as recorder:
        for rank in range(world_size):
            torch.ops.distlab.reduce_scatter_mean_by_copy(replicas, staging, rank)
        for rank in range(world_size):
            own = replicas[rank].chunk(world_size)[rank]
            torch.testing.assert_close(
                own.double(), mean.chunk(world_size)[rank], rtol=1e-6, atol=1e-6
            )
            own.fill_(rank)
        for rank in range(world_size):
            torch.ops.distlab.all_gather_by_copy(replicas, rank)
    for replica in replicas:
        assert torch.equal(replica, torch.arange(world_size).float().repeat_interleave(5))
    sent = (world_size, world_size * 5 * world_size * 4)
    assert by_op(recorder) == {"reduce_scatter": sent, "all_gather": sent}


@on_two_ranks
def test_cpu_ranks_are_refused(context):
    with pytest.raises(
        ValueError, match="copy engines reach the memory of NVIDIA GPUs of one host"
    ):
        CopyEngineDDP(torch.nn.Linear(2, 2), process_group=context.group)


def sums_many(context):
    numels = [8 * context.world_size, 2**20, 12 * context.world_size, 2**22]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    exchange = CopyEngineTensors(numels, dtypes, context.device, context.group)
    for round_number in range(20):
        inputs = [
            torch.randn(n, device=context.device).to(t) for n, t in zip(numels, dtypes, strict=True)
        ]
        for number, (tensor, mine) in enumerate(zip(exchange.tensors, inputs, strict=True)):
            tensor.copy_(mine)
            exchange.all_reduce_mean(number)
        exchange.wait()
        for tensor, mine in zip(exchange.tensors, inputs, strict=True):
            total = collectives.sum_tensor(mine.double(), context.group) / context.world_size
            eps = torch.finfo(tensor.dtype).eps
            torch.testing.assert_close(
                tensor.double(), total, rtol=4 * eps, atol=4 * eps, msg=str(round_number)
            )


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", [1, 2, 1, 4, 2])
def test_tensors_are_averaged_again_and_again(world_size):
    """One after the other, in processes that stay: some ranks have had a rendezvous before and some
    have not.
    """
    if world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
    run_ranks(sums_many, world_size, backend="nccl")


def trains_as_zero1(context):
    """ZeRO-1 by copy engines against ZeRO-1 by NCCL: every kind of model, both ways to gather."""
    for case, overlap in product(CASES, (False, True)):
        both = []
        for wrap in (CopyEngineDDP, BucketedDDP):
            module = build(case, context.rank, context.device)
            wrapper = wrap(module, bucket_size_mb=1e-4, process_group=context.group)
            options = {"lr": 0.1, "momentum": 0.9, "overlap_gather": overlap}
            optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, **options)
            for step in range(3):
                with wrapper.no_sync():
                    CASES[case].loss(wrapper, context.rank, 2 * step, context.device).backward()
                CASES[case].loss(wrapper, context.rank, 2 * step + 1, context.device).backward()
                wrapper.finish_gradient_synchronization()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            both.append((wrapper.full_state_dict(), optimizer.state_dict()["state"]))
        label = partial("{}, {}: {}".format, case, options)
        torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6, msg=label)


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_zero1_trains_by_copy_engines(world_size):
    run(trains_as_zero1, world_size, backend="nccl")


def refuses_to_free_buckets(context):
    wrapper = CopyEngineDDP(torch.nn.Linear(2, 2).to(context.device), process_group=context.group)
    with pytest.raises(ValueError, match="need buckets that keep their memory"):
        ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1, shard_gradients=True)


@pytest.mark.multigpu
def test_buckets_of_copy_engines_cannot_be_freed():
    run_ranks(refuses_to_free_buckets, 2, backend="nccl")
