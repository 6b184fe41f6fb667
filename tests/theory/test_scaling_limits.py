"""The limits against brute force over the times they were derived from."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distlab.theory import scaling_limits as limits
from distlab.theory.scaling_limits import Block

BLOCKS = st.builds(
    Block,
    d_model=st.sampled_from([256, 1024, 4096]),
    d_ff=st.sampled_from([1024, 4096, 16384]),
    flops_per_s=st.floats(1e12, 1e15),
    bytes_per_s=st.floats(1e9, 1e12),
    matrices=st.sampled_from([2, 3]),
    element_bytes=st.sampled_from([1, 2, 4]),
)


@given(BLOCKS, st.integers(2, 10**7))
def test_data_parallel(block, tokens):
    largest = limits.largest_data_parallel(block, tokens)

    def bound(ranks, **options):
        return limits.block_time(block, tokens, ranks, 1, **options).is_compute_bound()

    for options in ({}, {"backward": True}, {"backward": True, "sharded": False}):
        assert largest == 1 or bound(largest, **options)
        assert not bound(largest + 1, **options)
    assert limits.block_time(block, tokens, largest + 1, 1, sharded=False).weights == 0


@given(BLOCKS, st.integers(1, 10**6), st.booleans(), st.booleans())
def test_tensor_parallel(block, tokens, backward, keeps_input):
    options = {"backward": backward, "keeps_input": keeps_input}
    largest = limits.largest_tensor_parallel(block, **options)
    compute_bound = [
        size
        for size in limits.divisors(block.d_ff)
        if limits.block_time(block, tokens, 1, size, **options).is_compute_bound()
    ]
    assert compute_bound == [size for size in limits.divisors(block.d_ff) if size <= largest]


@given(BLOCKS, st.floats(64, 1e7), st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_best_split_is_no_worse_than_any(block, tokens, log2_devices, shared):
    devices = 2**log2_devices
    assume(tokens >= devices)
    data, tensor, time = limits.best_split(block, tokens, devices, shared_links=shared)
    assert data * tensor == devices
    for size in limits.divisors(devices):
        other = limits.block_time(block, tokens, devices // size, size)
        assert max(time.compute, time.communication(shared)) <= max(
            other.compute, other.communication(shared)
        )


def test_published_rules():
    """Two matrices in bf16: B/X > C/W, Y < f·W/C, B/N > (C/W)²/f. TPU v5p: C/W = 4.59e14/9e10 = 2,550 per axis."""
    block = Block(4096, 16384, 4.59e14, 9e10 * 2)
    assert block.intensity == pytest.approx(2550)
    assert limits.largest_tensor_parallel(block) == 6
    assert limits.largest_tensor_parallel(block, backward=True) == 12
    assert limits.largest_tensor_parallel(block, backward=True, keeps_input=False) == 8
    assert limits.least_tokens_per_device_mixed(block) == pytest.approx(2550**2 / 16384)
    assert limits.least_tokens_per_device_mixed(block, shared_links=True) == pytest.approx(
        4 * 2550**2 / 16384
    )
    assert limits.BlockTime(9.0, 2.0, 3.0).communication(shared_links=True) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda block: limits.block_time(block, 8, 1, 7),
            "tensor=7 does not divide d_ff=1024; the nearest that does is 8",
        ),
        (lambda block: limits.block_time(block, 8, 0, 1), "data=0"),
        (lambda block: limits.best_split(block, 2, 4096), "2 tokens on 4096 devices"),
        (lambda block: limits.best_split(block, 2, 0), "devices=0"),
        (lambda block: limits.best_split(block, 0, 1), "tokens=0"),
        (lambda block: Block(1, 1, 0, 1), "flops_per_s=0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(Block(256, 1024, 1e14, 1e11))
