"""The pure plan: what is gathered together, what lies where, in one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distlab.parallel.fsdp.units import ALIGNMENT, FlatPlan, is_sharded, list_entries, plan_units


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 9))
def test_pieces_of_all_ranks_make_up_each_parameter(numels: list[int], world_size: int):
    """RELIABILITY 29: each element has one owner, padding has none, and slices are equal."""
    plan = FlatPlan(tuple(numels), world_size)
    assert plan.numel == plan.slice_numel * world_size
    flat = torch.arange(plan.numel)
    owned = torch.zeros(plan.numel, dtype=torch.int)
    for index, (offset, numel) in enumerate(zip(plan.offsets, numels, strict=True)):
        assert offset % ALIGNMENT == 0
        end = 0
        for rank in range(world_size):
            first, last = plan.piece(index, rank)
            assert 0 <= first <= last <= numel
            if first < last:
                assert first == end
                end = last
            start, stop = plan.place(index, rank)
            assert stop - start == last - first and 0 <= start <= stop <= plan.slice_numel
            mine = flat[rank * plan.slice_numel : (rank + 1) * plan.slice_numel][start:stop]
            assert torch.equal(mine, flat[offset + first : offset + last])
            owned[mine] += 1
        assert end == numel
    assert owned.sum() == sum(numels) and (owned <= 1).all()
    assert plan.numel < sum(numels) + ALIGNMENT * len(numels) + world_size  # little padding


def units(module: nn.Module) -> dict[str, list[str]]:
    return {u.name: [e.name for e in u.entries] for u in plan_units(module, list_entries(module, None))}


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)


def test_a_unit_per_child_of_a_module_list_and_per_owner_elsewhere():
    module = Layered()
    assert units(module) == {
        "embedding": ["embedding.weight"],
        "layers.0": ["layers.0.0.weight", "layers.0.1.weight"],
        "layers.1": ["layers.1.weight"],
        "head": ["head.weight"],
    }
    small = [entry.name for entry in list_entries(module, None) if not is_sharded(entry)]
    assert small == ["layers.0.0.bias", "layers.0.1.bias", "layers.1.bias", "norm.weight", "norm.bias"]


def test_tied_weights_and_those_of_the_root_join_the_root_unit():
    """RELIABILITY 30."""
    module = Layered()
    module.head.weight = module.embedding.weight
    module.positions = nn.Parameter(torch.zeros(3, 4))
    found = units(module)
    assert found["(root)"] == ["positions", "embedding.weight"]
    assert list_entries(module, None)[1].names == ["embedding.weight", "head.weight"]


def test_weights_tied_within_one_unit_stay_in_it():
    module = Layered()
    module.layers[0][1].weight = module.layers[0][0].weight
    assert units(module)["layers.0"] == ["layers.0.0.weight"]


def test_one_block_registered_twice_is_one_unit():
    module = Layered()
    module.layers.append(module.layers[0])
    assert list(units(module)) == ["embedding", "layers.0", "layers.1", "head"]


def test_the_outermost_module_list_decides_and_containers_are_no_units():
    module = nn.Module()
    module.stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Module()])
    module.stages[1].inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert units(module) == {
        "stages.0.0": ["stages.0.0.weight"],
        "stages.0.1": ["stages.0.1.weight"],
        "stages.1": ["stages.1.inner.0.weight", "stages.1.inner.1.weight"],
    }


def test_a_module_that_reads_its_childs_weight_holds_it():
    module = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    assert units(module) == {"0": ["0.in_proj_weight", "0.out_proj.weight"], "1": ["1.weight"]}


def test_types_of_masters_and_of_computation():
    """RELIABILITY 31: masters are fp32 or wider; BatchNorm and integers keep their type."""
    module = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).double(), nn.BatchNorm1d(2))
    masters = {e.name: e.master_dtype for e in list_entries(module, torch.float16)}
    compute = {e.name: e.compute_dtype for e in list_entries(module, torch.float16)}
    assert masters["0.weight"] == torch.float32 and masters["1.weight"] == torch.float64
    assert compute["0.weight"] == compute["1.bias"] == torch.float16
    assert compute["2.weight"] == torch.float32
    assert list_entries(module, None)[0].compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    "like", [torch.zeros(3, 4), torch.zeros(4, 3).t(), torch.zeros(2, 3, 4, 5).permute(0, 3, 1, 2)]
)
def test_a_parameter_keeps_its_memory_order(like: torch.Tensor):
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(like.shape).as_strided(like.shape, like.stride()))
    entry = list_entries(module, None)[0]
    flat = entry.flatten(module.weight)
    assert torch.equal(entry.unflatten(flat), module.weight)
    assert entry.unflatten(flat).stride() == like.stride()
    entry.forget_values()
    assert torch.equal(entry.unflatten(flat), module.weight)
