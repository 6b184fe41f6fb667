"""All-reduce by copy engines: its arithmetic in one process, its refusals on gloo, itself
on GPUs.
"""

import pytest
import torch

from distlab.comm import collectives
from distlab.comm.copy_engine import CopyEngineAllReduce
from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel import CopyEngineDDP, ZeroOptimizer
from distlab.testing import run_ranks
from tests.parallel.cases import by_op
from tests.parallel.test_contract import on_two_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_doing_its_part_leaves_the_mean_everywhere(world_size):
    """What each rank does to memory that all share, one rank after the other."""
    generator = torch.Generator().manual_seed(1)
    replicas = [torch.randn(5 * world_size, generator=generator) for _ in range(world_size)]
    expected = torch.stack(replicas).double().mean(0)
    staging = torch.full((world_size - 1, 8), float("nan"))
    with CollectiveRecorder() as recorder:
        for rank in range(world_size):
            torch.ops.distlab.all_reduce_mean_by_copy(replicas, staging, rank)
    for replica in replicas:
        assert torch.equal(replica, replicas[0])
    torch.testing.assert_close(replicas[0].double(), expected, rtol=1e-6, atol=1e-6)
    assert by_op(recorder) == {"all_reduce": (world_size, world_size * 5 * world_size * 4)}


@on_two_ranks
def test_cpu_ranks_are_refused(context):
    with pytest.raises(
        ValueError, match="copy engines reach the memory of NVIDIA GPUs of one host"
    ):
        CopyEngineDDP(torch.nn.Linear(2, 2), process_group=context.group)


def sums_many(context):
    numels = [8 * context.world_size, 2**20, 12 * context.world_size, 2**22]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    exchange = CopyEngineAllReduce(numels, dtypes, context.device, context.group)
    for round_number in range(20):
        inputs = [
            torch.randn(n, device=context.device).to(t) for n, t in zip(numels, dtypes, strict=True)
        ]
        for number, (tensor, mine) in enumerate(zip(exchange.tensors, inputs, strict=True)):
            tensor.copy_(mine)
            exchange.start(number)
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


def is_no_base_for_zero(context):
    wrapper = CopyEngineDDP(torch.nn.Linear(2, 2).to(context.device), process_group=context.group)
    with pytest.raises(ValueError, match="give ZeroOptimizer a BucketedDDP"):
        ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1)


@pytest.mark.multigpu
def test_zero_needs_a_reduce_scatter():
    run_ranks(is_no_base_for_zero, 2, backend="nccl")
