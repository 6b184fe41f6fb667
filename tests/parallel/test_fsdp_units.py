"""The pure plan: what is gathered together, what lies where, in one process."""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distlab.model import preset
from distlab.parallel.fsdp import layout as planning
from distlab.parallel.fsdp.layout import (
    ALIGNMENT,
    WORTH_A_BUFFER,
    RowLayout,
    list_entries,
    plan_buffers,
    plan_units,
)
from distlab.parallel.fsdp.unit import NotGathered
from distlab.theory.model_shape import ModelShape

SHAPES = st.lists(
    st.lists(st.integers(0, 9), min_size=2, max_size=4).map(tuple), min_size=1, max_size=6
)


@given(SHAPES, st.integers(1, 9), st.sampled_from([0, WORTH_A_BUFFER]))
def test_shards_of_all_ranks_make_up_each_parameter(shapes, world_size, worth):
    """Check that each element has one owner, padding has none, and slices are equal.

    Rows are never cut.
    """
    with mock.patch.object(planning, "WORTH_A_BUFFER", worth):
        buffers = plan_buffers(shapes, world_size)
    assert sorted(itertools.chain.from_iterable(buffers)) == list(range(len(shapes)))
    for indices in buffers:
        assert indices == sorted(indices)
        plan = RowLayout(tuple(shapes[i] for i in indices), world_size)
        assert plan.numel == plan.slice_numel * world_size
        owned = torch.zeros(plan.numel, dtype=torch.int)
        for index in range(len(indices)):
            check_shards(plan, index, owned)
        assert owned.sum() == sum(plan.numels) and (owned <= 1).all()


def check_shards(plan, index, owned):
    """Check one parameter's shards, and count in `owned` the owners of each of its elements."""
    shape = plan.sizes[index]
    flat = torch.arange(plan.numel)
    offset = plan.offsets[index]
    end = 0  # first element of the parameter that no rank before has
    assert offset % ALIGNMENT == 0
    for rank in range(plan.world_size):
        first, last = plan.shard_range(index, rank)
        assert 0 <= first <= last <= math.prod(shape)
        if first < last:
            assert first == end
            end = last
        place = plan.place(index, rank)
        assert place.stop - place.start == last - first
        assert 0 <= place.start <= place.stop <= plan.slice_numel
        slice_of_rank = flat[rank * plan.slice_numel : (rank + 1) * plan.slice_numel]
        mine = slice_of_rank[place]
        assert torch.equal(mine, flat[offset + first : offset + last])
        owned[mine] += 1
        sizes = plan.shard_sizes(index, rank)
        assert math.prod(sizes) == last - first and len(sizes) == len(shape)
        if shape[0] >= plan.world_size:
            assert sizes[1:] == shape[1:]
    assert end == math.prod(shape)


@pytest.mark.parametrize(
    "name, expected", [("large", [(1, 0.0), (1, 0.0)]), ("10B", [(2, 0.0), (1, 3.7)])]
)
def test_padding_of_a_real_block(name, expected):
    """One buffer and at most 0.3 % of padding up to 64 ranks.

    At 512 and 1,024 the numbers of docs/learn/fsdp.md.
    """
    shapes = ModelShape.of(preset(name)).matrix_shapes_per_block
    elements = sum(map(math.prod, shapes))

    def padding(world_size):
        buffers = plan_buffers(shapes, world_size)
        padded_elements = 0
        for indices in buffers:
            shapes_of_buffer = tuple(shapes[index] for index in indices)
            padded_elements += RowLayout(shapes_of_buffer, world_size).numel
        return len(buffers), round(100 * (padded_elements / elements - 1), 1)

    for world_size in (3, 8, 64):
        buffers, percent = padding(world_size)
        assert buffers == 1 and percent <= 0.3
    assert [padding(512), padding(1024)] == expected


def test_what_is_found_where_nothing_is_gathered():
    """Shape and types, which modules ask of each other's weights, and no values: neither operators
    nor addresses.
    """
    like = nn.Parameter(torch.empty(3, 4, device="meta").t())
    found = NotGathered(like, torch.bfloat16, torch.device("cpu"), "read elsewhere")
    assert isinstance(found, torch.Tensor) and found.requires_grad and found.dtype == torch.bfloat16
    assert found.shape == (4, 3) and found.stride() == (1, 4) and found.device.type == "cpu"
    assert (
        found.untyped_storage().nbytes() == 0
        and repr(found) == "NotGathered((4, 3), torch.bfloat16)"
    )
    for read in (
        lambda: nn.functional.linear(torch.ones(2, 3, dtype=torch.bfloat16), found),
        lambda: found.detach(),
        lambda: torch.stack([found, found]),
        found.data_ptr,  # what a Triton kernel asks for
    ):
        for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
            with mode, pytest.raises(RuntimeError, match="read elsewhere"):
                read()


def units(module):
    """Return unit → names of its parameters."""
    found = {}
    for unit in plan_units(module, list_entries(module, None)):
        found[unit.name] = [entry.name for entry in unit.entries]
    return found


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)]
        )
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)


def test_a_unit_per_child_of_a_module_list_and_per_owner_elsewhere():
    """And one for a block that is registered twice."""
    module = Layered()
    module.layers.append(module.layers[0])
    assert units(module) == {
        "embedding": ["embedding.weight"],
        "layers.0": ["layers.0.0.weight", "layers.0.1.weight"],
        "layers.1": ["layers.1.weight"],
        "head": ["head.weight"],
    }
    small = [entry.name for entry in list_entries(module, None) if not entry.is_sharded]
    assert small == [
        "layers.0.0.bias",
        "layers.0.1.bias",
        "layers.1.bias",
        "norm.weight",
        "norm.bias",
    ]


def test_the_outermost_module_list_decides_and_containers_are_no_units():
    module = nn.Module()
    module.stages = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Identity()]
    )
    module.stages[1].inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert units(module) == {
        "stages.0.0": ["stages.0.0.weight"],
        "stages.0.1": ["stages.0.1.weight"],
        "stages.1": ["stages.1.inner.0.weight", "stages.1.inner.1.weight"],
    }


def test_types_of_masters_and_of_computation():
    """Check that masters are fp32 or wider, and that BatchNorm and integers keep their type."""
    module = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).double(), nn.BatchNorm1d(2))
    masters = {e.name: e.master_dtype for e in list_entries(module, torch.float16)}
    compute = {e.name: e.compute_dtype for e in list_entries(module, torch.float16)}
    assert masters["0.weight"] == torch.float32 and masters["1.weight"] == torch.float64
    assert compute["0.weight"] == compute["1.bias"] == torch.float16
    assert compute["2.weight"] == torch.float32
    assert list_entries(module, None)[0].compute_dtype == torch.bfloat16


def test_a_parameter_keeps_its_memory_order():
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2))
    entry = list_entries(module, None)[0]
    for _ in range(2):
        shape, strides, first = entry.place_of(entry.sizes, offset=8)
        assert (shape, strides, first) == (module.weight.shape, module.weight.stride(), 8)
        entry.forget_values()
