"""The closed forms against worked examples, against torch's own rule and against the
executed plan.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.parallel import STRATEGIES
from distlab.parallel.buckets import plan_buckets
from distlab.parallel.fsdp.layout import RowLayout, plan_buffers
from distlab.theory import volume as closed_form
from distlab.theory.volume import (
    CommunicationVolume,
    bucketed,
    each_gradient,
    sharded_buffers,
    torch_ddp,
    zero1,
)

MIB = 2**20
# Parameters as (numel, dtype); sizes around the limits below, ties included.
PARAMETERS = st.lists(
    st.tuples(
        st.integers(0, 300) | st.sampled_from([32, 64, 128, 256]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ),
    max_size=25,
)
LIMITS = st.sampled_from([1, 64, 100, 128, 256, 1000]) | st.integers(1, 2000)  # bytes


def _split(parameters):
    numels = [numel for numel, _ in parameters]
    dtypes = [dtype for _, dtype in parameters]
    return numels, [dtype.itemsize for dtype in dtypes], dtypes


def test_worked_example():
    # 4 fp32 parameters of 1 MiB, 1 MiB, 12 bytes and 2 MiB, limit 2 MiB; reversed: 2 MiB | 12 + 1
    # MiB | 1 MiB.
    numels, sizes = [MIB // 4, MIB // 4, 3, MIB // 2], [4] * 4
    gradients = 4 * MIB + 12
    assert each_gradient(numels, sizes) == CommunicationVolume(5, gradients + 16)
    assert bucketed(numels, sizes, None) == CommunicationVolume(1, gradients + 16)
    assert bucketed(numels, sizes, 2.0) == CommunicationVolume(3, gradients + 16)
    # Three elements and their neighbours are an odd number: padded to two ranks.
    assert zero1(numels, sizes, 2.0, world_size=2) == CommunicationVolume(
        7, 2 * (gradients + 4) + 16
    )
    # torch: the first bucket closes at 1 MiB, that is with the 2 MiB; the rest stays below 25 MiB.
    assert torch_ddp(numels, sizes) == CommunicationVolume(2, gradients)


@given(PARAMETERS, LIMITS, LIMITS)
@settings(max_examples=200, deadline=None)
def test_torch_ddp_is_torchs_rule(parameters, first, later):
    numels, sizes, dtypes = _split(parameters)
    volume = torch_ddp(
        numels, sizes, first_bucket_mb=first / MIB, bucket_cap_mb=later / MIB, dtypes=dtypes
    )
    if not parameters:
        return
    # As the reducer rebuilds: tensors in the order in which they became ready, limits first and
    # later.
    ready = [torch.empty(numel, dtype=dtype) for numel, dtype in reversed(parameters)]
    order = list(range(len(parameters)))[::-1]
    buckets, _ = dist._compute_bucket_assignment_by_size(ready, [first, later], [], order)
    assert volume.collectives == len(buckets)
    assert volume.bytes == sum(tensor.numel() * tensor.itemsize for tensor in ready)


def _sent(plan):
    """The calls and bytes of one collective per bucket."""
    return CommunicationVolume(
        len(plan), sum(bucket.numel * bucket.dtype.itemsize for bucket in plan)
    )


@given(PARAMETERS, st.none() | LIMITS, st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_buckets_are_those_of_the_plan(parameters, limit, ranks):
    numels, sizes, dtypes = _split(parameters)
    limit_mb = None if limit is None else limit / MIB
    padded = plan_buckets(numels, dtypes, limit_mb, world_size=ranks)
    assert bucketed(numels, sizes, limit_mb, world_size=ranks, dtypes=dtypes) == _sent(padded)
    without_flags = plan_buckets(numels, dtypes, limit_mb, world_size=ranks, has_flags=False)
    flags = CommunicationVolume(1, 4 * len(numels))
    volume = zero1(numels, sizes, limit_mb, world_size=ranks, dtypes=dtypes)
    assert volume == _sent(without_flags) * 2 + flags


def test_fsdp_aligns_parameters_pads_units_and_sends_norms_apart():
    # Unit a: 10 elements end at 10, the next begins at 16: 16 + 5 = 21, padded to 24 on four ranks;
    # unit b: 8.
    volume = closed_form.fsdp(
        [10, 3, 5, 8], [4] * 4, ["a", None, "a", "b"], world_size=4, compute_itemsize=2
    )
    assert volume.collectives == 3 * 2 + 1
    assert volume.bytes == 2 * (24 + 8) * 2 + (24 + 8) * 4 + (3 + 1) * 4


def test_hybrid_sharding_and_two_levels_worked_by_hand():
    """Two hosts of four ranks: messages of 10 and 8 fp32 numbers are padded to 12 and 8."""
    sent = closed_form.all_reduced([(10, 4), (8, 4)], (2, 4))
    assert sent == CommunicationVolume(6, 4 * (12 + 3 + 12) + 4 * (8 + 2 + 8))
    for one_level in ((1, 4), (2, 1)):
        assert closed_form.all_reduced([(10, 4), (8, 4)], one_level) == CommunicationVolume(2, 72)
    # A matrix of 16 rows of 8 in bf16 compute: gathered twice, reduced, and its quarter averaged; a
    # norm of 8.
    sizes = ([128, 8], [4, 4], ["a", None])
    options = {"world_size": 4, "compute_itemsize": 2, "shapes": [(16, 8), (8,)]}
    inside = closed_form.fsdp(*sizes, **options)
    assert inside == CommunicationVolume(4, 2 * 256 + 512 + 4 * 9)
    assert closed_form.fsdp(*sizes, replicas=2, **options) == CommunicationVolume(
        5, inside.bytes + 512 // 4
    )
    # Three micro-batches gather twice and are reduced each. The quarter is averaged once.
    of_three = closed_form.fsdp(*sizes, replicas=2, micro_batches=3, reductions=3, **options)
    assert of_three == CommunicationVolume(
        3 * (2 + 1) + 1 + 1, 3 * (2 * 256 + 512) + 512 // 4 + 4 * 9
    )
    by_default, by_host, by_all = (
        closed_form.step_volume(
            STRATEGIES["hsdp"], [1024], [4], units=["a"], world_size=16, shard_size=size
        )
        for size in (None, 8, 16)
    )
    assert by_default == by_host != by_all
    with pytest.raises(ValueError, match="shard_size=3 does not divide the 8 ranks"):
        closed_form.step_volume(STRATEGIES["hsdp"], [8], [4], world_size=8, shard_size=3)


SIZES = st.integers(0, 12) | st.sampled_from([128, 147, 1000, 4096, 11008])
MATRICES = st.lists(st.lists(SIZES, min_size=2, max_size=4).map(tuple), min_size=1, max_size=6)


@given(MATRICES, st.integers(1, 9) | st.sampled_from([64, 1000, 1024]))
@settings(max_examples=300, deadline=None)
def test_fsdps_buffers_are_those_of_the_plan(shapes, world_size):
    numels = []
    for indices in plan_buffers(shapes, world_size):
        shapes_of_buffer = tuple(shapes[index] for index in indices)
        numels.append(RowLayout(shapes_of_buffer, world_size).numel)
    assert sharded_buffers(shapes, world_size) == numels
