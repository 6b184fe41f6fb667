"""The recorder sees every strategy's collectives alike: op, bytes, dtype, order."""

import pytest
import torch
import torch.distributed as dist

from distlab.measure.collectives import CollectiveRecorder
from distlab.testing import run_ranks
from tests.parallel.cases import by_op


def seen(recorder):
    return [(call.op, call.numel, call.dtype, call.bytes, call.sequence) for call in recorder.calls]


def every_collective(context):
    full, part = torch.ones(6), torch.ones(3)
    parts = [torch.ones(3), torch.ones(3)]
    half = torch.ones(5, dtype=torch.bfloat16)
    peer = 1 - context.rank
    with CollectiveRecorder() as recorder:
        dist.all_reduce(half, group=context.group, async_op=True).wait()
        dist.all_gather(parts, part)
        dist.all_gather_into_tensor(full, part)
        dist.reduce_scatter_tensor(part, full)
        dist.reduce_scatter(part, parts)
        dist.broadcast(full, 0)
        dist.reduce(part, 0)
        dist.gather(part, parts if context.rank == 0 else None)
        dist.scatter(part, parts if context.rank == 0 else None)
        dist.all_to_all_single(torch.empty(6), full)
        dist.all_reduce_coalesced([part, full])
        if context.rank == 0:
            dist.send(part, peer)
        else:
            dist.recv(part, peer)
        dist.barrier()
    return seen(recorder), recorder.others


def test_every_collective_is_counted_once_by_its_payload():
    (first, others), (second, _) = run_ranks(every_collective, 2)
    f32 = torch.float32
    assert first == [
        ("all_reduce", 5, torch.bfloat16, 10, 0),
        ("all_gather", 6, f32, 24, 1),
        ("all_gather", 6, f32, 24, 2),
        ("reduce_scatter", 6, f32, 24, 3),
        ("reduce_scatter", 6, f32, 24, 4),
        ("broadcast", 6, f32, 24, 5),
        ("reduce", 3, f32, 12, 6),
        ("gather", 3, f32, 12, 7),
        ("scatter", 3, f32, 12, 8),
        ("all_to_all", 6, f32, 24, 9),
        ("all_reduce", 9, f32, 36, 10),
        ("send", 3, f32, 12, 11),
    ]
    assert second[:-1] == first[:-1] and second[-1] == ("recv", 3, f32, 12, 11)
    assert others == ["barrier"]


@pytest.mark.ranks(2)
def test_functional_collectives_count_by_the_same_rule(context):
    from torch.distributed import _functional_collectives as functional

    with CollectiveRecorder() as recorder:
        functional.all_gather_tensor(torch.ones(3), 0, context.group)
        functional.reduce_scatter_tensor(torch.ones(6), "sum", 0, context.group)
        functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", context.group))
    assert by_op(recorder) == {
        "all_gather": (1, 24),
        "reduce_scatter": (1, 24),
        "all_reduce": (1, 16),
    }
