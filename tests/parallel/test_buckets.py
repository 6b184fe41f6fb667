"""The bucket plan, tested in one process, and the buffers that execute it."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distlab.parallel.bucketed import GradientBucket
from distlab.parallel.buckets import MIB, plan_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
parameters = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from(DTYPES)), min_size=1, max_size=20
)
limits = st.one_of(st.none(), st.floats(1e-5, 1e-2))


@given(parameters, limits, st.integers(1, 5))
def test_a_plan_holds_every_parameter_once_within_its_limit(sizes, limit, world_size):
    numels = [numel for numel, _ in sizes]
    dtypes = [dtype for _, dtype in sizes]
    plan = plan_buckets(numels, dtypes, limit, world_size=world_size)

    indices = itertools.chain.from_iterable(bucket.indices for bucket in plan)
    assert sorted(indices) == list(range(len(sizes)))
    for bucket in plan:
        expected_offset = 0
        # contiguous, of one type
        for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
            assert offset == expected_offset
            assert dtypes[index] is bucket.dtype
            expected_offset += numels[index]
        size = bucket.payload * bucket.dtype.itemsize
        assert limit is None or len(bucket.indices) == 1 or size <= limit * MIB
        assert bucket.numel % world_size == 0 and bucket.numel >= bucket.payload + len(
            bucket.indices
        )
        slices = [bucket.slice_of(rank) for rank in range(world_size)]
        assert slices[0].start == 0 and slices[-1].stop == bucket.numel
        assert all(a.stop == b.start for a, b in itertools.pairwise(slices))

    last = [min(bucket.indices) for bucket in plan]
    assert last == sorted(last, reverse=True)  # buckets leave in the order in which they fill up


def test_buckets_follow_reversed_registration_order_and_their_limit():
    mib = MIB // 4  # elements of fp32 in one MiB
    plan = plan_buckets([mib, mib, 5 * mib, mib, mib], [torch.float32] * 5, 2.0)
    assert [bucket.indices for bucket in plan] == [(4, 3), (2,), (1, 0)]


@pytest.mark.parametrize("size", [0, -1.0, math.nan])
def test_a_bucket_size_must_be_positive(size):
    with pytest.raises(ValueError, match="positive number of MiB"):
        plan_buckets([1], [torch.float32], size)


def test_views_take_over_a_dense_parameter_s_strides_and_no_others():
    transposed = nn.Parameter(torch.zeros(3, 2).t())
    holey = nn.Parameter(torch.zeros(2, 6)[:, ::2])
    plan = plan_buckets([6, 6], [torch.float32] * 2, None)
    bucket = GradientBucket(plan[0], [transposed, holey])
    by_parameter = dict(zip(plan[0].indices, bucket.views, strict=True))
    assert by_parameter[0].stride() == transposed.stride()
    assert by_parameter[1].is_contiguous()
