"""All-reduces in two levels: the mean over all ranks, in whatever order messages are waited for."""

import pytest
import torch

from distlab.comm import collectives
from distlab.comm.subgroups import MeshGroups, hybrid_mesh
from distlab.comm.two_level import TwoLevelAllReduce
from tests.parallel.cases import drawn
from tests.parallel.test_contract import run

SHAPES = [(8,), (3,), (1,), (0,), (2, 5), (1000,), (7, 3)]  # two ranks do not divide them all


def values(rank, message, shape):
    return drawn(100 * rank + message, *shape)


def means(context, shard_size, first):
    """All messages under way at once.

    From `first` on they are waited for in the order in which they were started.
    """
    mesh = hybrid_mesh(context.group, shard_size)
    sender = TwoLevelAllReduce(MeshGroups(context.group, mesh.get_group(0), mesh.get_group(1)))
    for _ in range(2):  # nothing is left over from the first round
        tensors = [
            values(context.rank, number, shape).to(context.device)
            for number, shape in enumerate(SHAPES)
        ]
        in_flight = [sender.start(tensor) for tensor in tensors]
        for message in in_flight[first:] + in_flight[:first]:
            message.wait()
        for number, (tensor, shape) in enumerate(zip(tensors, SHAPES, strict=True)):
            everyones = [values(rank, number, shape) for rank in range(context.world_size)]
            torch.testing.assert_close(
                tensor.cpu(), sum(everyones) / context.world_size, msg=str(shape)
            )
        bits = [tensor.cpu() for tensor in tensors]
        for other in collectives.gather_objects(bits, context.group):
            assert all(map(torch.equal, other, bits))


@pytest.mark.parametrize(
    "backend, ranks, shard_size",
    [
        ("gloo", 4, 2),
        ("gloo", 6, 3),
        *(
            pytest.param("nccl", *sizes, marks=pytest.mark.multigpu)
            for sizes in ((2, 1), (2, 2), (4, 2), (8, 4))
        ),
    ],
)
def test_messages_become_the_mean_over_all_ranks(backend, ranks, shard_size):
    """On two GPUs one of the levels is a single rank, and all three steps are taken
    nevertheless.
    """
    for first in (0, 4):
        run(means, ranks, shard_size, first, backend=backend)
