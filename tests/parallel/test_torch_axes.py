"""torch's own axes, which ours are measured beside: right, so that the comparison is of equals."""

import pytest

from distlab.bench.reference import parameter_difference
from distlab.bench.variant import Variant
from distlab.parallel import Layout, get_strategy
from tests.parallel.test_contract import on_four_ranks


@on_four_ranks
def test_tensor_parallelism_under_fsdp2(context):
    """The experiment pipeline_schedules checks torch's pipelines in the same way."""
    row = Variant("tp2", get_strategy("fsdp2"), layout=Layout.parse("tp2"))
    assert parameter_difference(context, row, steps=2) < 1e-6


@pytest.mark.parametrize(
    "strategy, layout, said",
    [
        ("fsdp2", "pp2", "Take bucketed, zero1 or fsdp"),
        ("fsdp2", "cp2", "measured with tpN alone"),
        ("torch-ddp", "tp2", "take bucketed"),
        ("hsdp", "tp2", "take bucketed"),
    ],
)
def test_what_is_not_measured_is_refused(strategy, layout, said):
    assert said in get_strategy(strategy).refusal(Layout.parse(layout))
