"""Synthetic data: a pure function of seed, rank and step."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.train.data import SyntheticTokens


def _data(seed=0, rank=0, vocab_size=97, batch_size=3, context_length=11, **options):
    return SyntheticTokens(vocab_size, batch_size, context_length, seed=seed, rank=rank, **options)


@given(
    st.integers(1, 50),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(0, 10**12),
    st.integers(1, 60),
)
def test_shapes_range_and_successors(vocab_size, batch_size, context_length, step, branching):
    data = _data(
        vocab_size=vocab_size,
        batch_size=batch_size,
        context_length=context_length,
        branching=branching,
    )
    tokens, targets = data.batch(step)
    assert tokens.shape == targets.shape == (batch_size, context_length)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert min(tokens.min(), targets.min()) >= 0
    assert max(tokens.max(), targets.max()) < vocab_size
    # Every target is one of the possible successors: 1 … branching further on.
    assert ((targets - tokens - 1) % vocab_size < min(branching, vocab_size)).all()


def test_seeds_ranks_and_steps_all_matter():
    batches = set()
    for seed, rank, step in itertools.product(range(4), repeat=3):
        tokens, _ = _data(seed=seed, rank=rank).batch(step)
        batches.add(tuple(tokens.flatten().tolist()))
    assert len(batches) == 64
