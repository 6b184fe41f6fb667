"""Rings of sends and receives against what the collectives are, and smaller jobs within one."""

import pytest
import torch

from distlab.comm import ring
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest

LENGTHS = (1, 2, 7, 12, 1000)  # fewer elements than ranks, unequal pieces


@pytest.mark.ranks(3)
def test_every_ring_gives_what_the_collective_means(context):
    """On the first 1, 2 and 3 ranks."""
    for ranks in (1, 2, 3):
        with first_ranks(context, ranks) as group:
            assert (group is None) == (context.rank >= ranks)
            if group is not None:
                check_rings(group.group, context.rank, ranks)
        rest(context, f"rings-{ranks}", ranks)


def check_rings(group, rank, ranks):
    for length in LENGTHS:
        everyones = [torch.arange(length) + 100.0 * other for other in range(ranks)]
        for function in (ring.all_reduce, ring.all_reduce_whole):
            tensor = everyones[rank].clone()
            function(tensor, group)
            assert torch.equal(tensor, sum(everyones)), (function, length)
        gathered, scattered = torch.empty(length * ranks), torch.empty(length)
        ring.all_gather(gathered, everyones[rank], group)
        assert torch.equal(gathered, torch.cat(everyones)), length
        sources = [torch.arange(length * ranks) + 1000.0 * other for other in range(ranks)]
        kept = sources[rank].clone()
        ring.reduce_scatter(scattered, sources[rank], group)
        assert torch.equal(sources[rank], kept)  # the input is nobody's scratch memory
        assert torch.equal(scattered, sum(sources).chunk(ranks)[rank]), length


@pytest.mark.ranks(2)
def test_refusals(context):
    with pytest.raises(
        ValueError, match="2 chunks of 2 elements do not make a contiguous tensor of 5: pad it"
    ):
        ring.all_gather(torch.empty(5), torch.empty(2), context.group)
    with (
        pytest.raises(ValueError, match="between 1 and the 2 of this job"),
        first_ranks(context, 3),
    ):
        pass
    assert doubling_sizes(1) == (1,) and doubling_sizes(6) == (1, 2, 4, 6)
