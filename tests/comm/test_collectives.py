"""The collectives give the mean, in every form a strategy uses, and wait only when asked to."""

import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import collectives
from distlab.parallel import FSDP, BucketedDDP, NaiveDDP
from tests.parallel.test_contract import BACKENDS, on_two_ranks, run


def means(context):
    group = context.group
    device = context.device
    n = context.world_size
    mean = (n + 1) / 2
    plain = torch.full((5,), context.rank + 1.0, device=device)
    collectives.all_reduce_mean(plain, group).wait()
    assert torch.allclose(plain, torch.full_like(plain, mean))

    scale = 1.0 if collectives.averages_in_reduction(device, group) else 1.0 / n
    scaled = torch.full((5,), (context.rank + 1.0) * scale, device=device)
    collectives.all_reduce_mean(scaled, group, prescaled=True).wait()
    assert torch.equal(scaled, plain)

    whole = torch.arange(n * 3.0, device=device) + context.rank
    shard = torch.empty(3, device=device)
    collectives.reduce_scatter_mean(shard, whole, group).wait()
    first = 3.0 * context.rank + (n - 1) / 2
    assert torch.allclose(shard, torch.arange(first, first + 3, device=device))

    gathered = torch.empty(2 * n, device=device)
    mine = torch.full((2,), float(context.rank), device=device)
    collectives.all_gather(gathered, mine, group).wait()
    # Two elements of each rank.
    assert torch.equal(gathered.cpu(), torch.arange(float(n)).repeat_interleave(2))

    value = torch.full((2,), float(context.rank), device=device)
    collectives.broadcast(value, group, source=n - 1).wait()
    assert value.tolist() == [n - 1.0] * 2
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_collective_gives_its_mean_or_its_copy(world_size, backend):
    run(means, world_size, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@on_two_ranks
def test_ranks_come_to_one_answer(context, backend):
    group, device = context.group, context.device
    matrix = torch.full((2, 3), float(context.rank), device=device).t()  # not contiguous
    collectives.broadcast_all([matrix], group)
    assert not matrix.any()
    assert collectives.all_ranks_agree(True, device, group)
    assert not collectives.all_ranks_agree(context.rank != 1, device, group)
    assert collectives.sum_over_ranks(context.rank + 0.5, device, group) == 2
    assert collectives.gather_objects({"rank": context.rank}, group) == [{"rank": 0}, {"rank": 1}]


@on_two_ranks
def test_a_collective_returns_before_it_is_done(context):
    """On gloo `all_reduce_mean` returns before the slow peer has joined: it does not block."""
    if context.rank == 1:
        time.sleep(0.5)
    work = collectives.all_reduce_mean(torch.ones(4), context.group)
    assert context.rank == 1 or not work.is_completed()
    work.wait()


def test_no_group_is_an_error_that_says_how_to_get_one():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"(?s)init_process_group.*rank_context"):
        collectives.resolve_group(None)


UNKNOWN_TO_GLOO = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32),
)


def of_rank(context, dtype, *shape):
    """Return a tensor whose bytes are all 1 on rank 0, and all 2 on rank 1."""
    raw = torch.full(
        (*shape, dtype.itemsize), 1 + context.rank, dtype=torch.uint8, device=context.device
    )
    return raw.view(dtype).view(shape)


@on_two_ranks
def test_what_only_copies_sends_any_dtype(context):
    for dtype in UNKNOWN_TO_GLOO:
        tensors = [
            of_rank(context, dtype, 4, 6),
            of_rank(context, dtype),
            of_rank(context, dtype, 0, 2),
        ]
        tensors.append(of_rank(context, dtype, 4, 6).t())
        collectives.broadcast_all(tensors, context.group)
        for tensor in tensors:
            sent = tensor.contiguous().view(-1).view(torch.uint8)
            assert (sent == 1).all(), dtype
        mine = of_rank(context, dtype, 2)
        all_ranks = torch.empty(2 * context.world_size, dtype=dtype)
        collectives.wait(
            collectives.all_gather(all_ranks, mine, context.group), context.group, "gathering"
        )
        by_rank = all_ranks.view(torch.uint8).view(context.world_size, -1)
        for rank, sent in enumerate(by_rank):
            assert (sent == 1 + rank).all(), dtype


@on_two_ranks
def test_a_wrapper_sends_buffers_of_any_dtype(context):
    """gloo said "Invalid scalar type", and the message of ours was of a failed connection."""
    for wrapper in (NaiveDDP, BucketedDDP, FSDP):
        for dtype in UNKNOWN_TO_GLOO:
            module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
            module.register_buffer("table", of_rank(context, dtype, 3))
            module.register_buffer("number", of_rank(context, dtype))
            wrapped = wrapper(module, process_group=context.group)
            for buffer in (module.table, module.number):
                assert buffer.view(-1).view(torch.uint8).unique().tolist() == [1], (wrapper, dtype)
            module.table.copy_(of_rank(context, dtype, 3))
            wrapped.sync_buffers()
            assert module.table.view(torch.uint8).unique().tolist() == [1], (wrapper, dtype)
            wrapped.close()


@on_two_ranks
def test_a_parameter_whose_gradient_cannot_be_averaged_is_refused_by_name(context):
    module = torch.nn.Linear(3, 3)
    module.scale = torch.nn.Parameter(of_rank(context, torch.float8_e4m3fn, 3))
    for wrapper in (NaiveDDP, BucketedDDP):
        with pytest.raises(
            ValueError,
            match=r"'scale' is torch\.float8_e4m3fn, in which gradients cannot be averaged",
        ):
            wrapper(module, process_group=context.group)
    module.scale.requires_grad_(False)
    BucketedDDP(module, process_group=context.group).close()
    assert module.scale.view(torch.uint8).tolist() == [1, 1, 1]


@on_two_ranks
def test_a_dtype_that_cannot_be_reduced_is_said_to_be_the_reason(context):
    with pytest.raises(
        RuntimeError,
        match="was summing a number, and the backend cannot send tensors of this dtype",
    ):
        collectives.sum_tensor(of_rank(context, torch.float8_e4m3fn, 3), context.group)
