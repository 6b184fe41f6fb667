"""torch's own axes, which ours are measured beside: right, so that the comparison is of equals."""


import pytest

from distlab.bench.reference import parameter_difference
from distlab.bench.timing import Variant
from distlab.comm import RankContext
from distlab.parallel import Layout, get_strategy
from distlab.testing import run_ranks


def difference(context: RankContext) -> float:
    row = Variant("tp2", get_strategy("fsdp2"), layout=Layout.parse("tp2"))
    return parameter_difference(context, row, steps=2)


def test_tensor_parallelism_under_fsdp2():
    """The experiment pipeline_schedules checks torch's pipelines in the same way."""
    assert run_ranks(difference, 4)[0] < 1e-6


@pytest.mark.parametrize(
    ("strategy", "layout", "said"),
    [
        ("fsdp2", "pp2", "without data ranks"),
        ("fsdp2", "cp2", "tpN is measured"),
        ("torch-ddp", "tp2", "take bucketed"),
        ("hsdp", "tp2", "take bucketed"),
    ],
)
def test_what_is_not_measured_is_refused(strategy, layout, said):
    assert said in get_strategy(strategy).refusal(Layout.parse(layout))
