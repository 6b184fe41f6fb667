"""torch's own axes, which ours are measured beside: right, so that the comparison is of equals."""

from dataclasses import replace

import pytest
import torch

from distlab.bench.reference import parameter_difference
from distlab.bench.timing import Variant
from distlab.comm import RankContext
from distlab.parallel import Layout, get_strategy
from distlab.parallel.schedules import SCHEDULES
from distlab.testing import run_ranks
from tests.parallel.test_pipeline import one_process, train

TORCHS = replace(get_strategy("local"), is_peer=True)


def differences(context: RankContext, layouts: list[str]) -> list[float]:
    fsdp2 = get_strategy("fsdp2")
    rows = [Variant(layout, fsdp2, layout=Layout.parse(layout)) for layout in layouts]
    return [parameter_difference(context, row, steps=2) for row in rows]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism_under_fsdp2(ranks):
    assert run_ranks(differences, ranks, ["tp2"])[0][0] < 1e-6


def schedules(context: RankContext) -> list[tuple]:
    return [train(context, Layout(pipeline=2, schedule=name), TORCHS, torch.float32, None) for name in SCHEDULES]


def test_its_pipelines_have_the_same_reference():
    losses, _, parameters = one_process(torch.float32, None)
    for found in run_ranks(schedules, 2, deadline_s=240):
        for name, (ours, _, last) in zip(SCHEDULES, found, strict=True):
            assert ours == losses, name
            for parameter, _, _, values in last:
                assert torch.equal(values, parameters[parameter].flatten()), f"{name}: {parameter}"


def refused(context: RankContext) -> list[str]:
    found = []
    for strategy, layout in (("fsdp2", "pp2"), ("fsdp2", "cp2"), ("torch-ddp", "tp2"), ("hsdp", "tp2")):
        with pytest.raises(ValueError) as error:
            train(context, Layout.parse(layout), strategy, torch.float32, None)
        found.append(str(error.value))
    return found


def test_what_is_not_measured_is_refused():
    pipeline, sequences, ddp, mesh = run_ranks(refused, 2)[0]
    assert "without data ranks" in pipeline and "tpN is measured" in sequences
    assert "take bucketed" in ddp and "take bucketed" in mesh
