"""Rings of sends and receives against what the collectives are, and smaller jobs within one."""

import itertools

import pytest
import torch

from distlab.comm import ring
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest
from distlab.testing import run_ranks

LENGTHS = (1, 2, 7, 12, 1000)  # fewer elements than ranks, unequal pieces


def on_every_size(context):
    """Results of all rings on the first 1, 2 and 3 ranks."""
    found = {}
    for ranks in doubling_sizes(context.world_size):
        with first_ranks(context, ranks) as group:
            if group is not None:
                found[ranks] = rings(group)
        rest(context, f"rings-{ranks}", ranks)
    return found


def rings(context):
    group, rank, ranks = context.group, context.rank, context.world_size
    found = {}
    for length in LENGTHS:
        mine = torch.arange(length) + 100.0 * rank
        for name, function in (("ring", ring.all_reduce), ("whole", ring.all_reduce_whole)):
            tensor = mine.clone()
            function(tensor, group)
            found[name, length] = tensor
        gathered, scattered = torch.empty(length * ranks), torch.empty(length)
        ring.all_gather(gathered, mine, group)
        source = torch.arange(length * ranks) + 1000.0 * rank
        kept = source.clone()
        ring.reduce_scatter(scattered, source, group)
        assert torch.equal(source, kept)  # the input is nobody's scratch memory
        found["gather", length], found["scatter", length] = gathered, scattered
    return found


def test_every_ring_gives_what_the_collective_means():
    answers = run_ranks(on_every_size, 3)
    assert [set(answer) for answer in answers] == [{1, 2, 3}, {2, 3}, {3}]
    for ranks, length in itertools.product((1, 2, 3), LENGTHS):
        total = ranks * torch.arange(length) + 100.0 * sum(range(ranks))
        everyone = torch.cat([torch.arange(length) + 100.0 * r for r in range(ranks)])
        whole = ranks * torch.arange(length * ranks) + 1000.0 * sum(range(ranks))
        for rank in range(ranks):
            found = answers[rank][ranks]
            assert torch.equal(found["ring", length], total), (ranks, length)
            assert torch.equal(found["whole", length], total)
            assert torch.equal(found["gather", length], everyone)
            assert torch.equal(found["scatter", length], whole.chunk(ranks)[rank])


def refusals(context):
    with pytest.raises(
        ValueError, match="2 chunks of 2 elements do not make a contiguous tensor of 5: pad it"
    ):
        ring.all_gather(torch.empty(5), torch.empty(2), context.group)
    with pytest.raises(ValueError, match="between 1 and the 2 of this job"), first_ranks(context, 3):
        pass


def test_refusals():
    run_ranks(refusals, 2)
    assert doubling_sizes(1) == (1,) and doubling_sizes(6) == (1, 2, 4, 6)
