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
from tests.parallel.axes import one_process, train
from tests.parallel.test_pipeline import TRAINING

TORCHS = replace(get_strategy("local"), is_peer=True)
IN_FP32 = replace(TRAINING, dtype=torch.float32, max_norm=None)


def differences(context: RankContext, layouts: list[str]) -> list[float]:
    fsdp2 = get_strategy("fsdp2")
    rows = [Variant(layout, fsdp2, layout=Layout.parse(layout)) for layout in layouts]
    return [parameter_difference(context, row, steps=2) for row in rows]


def test_tensor_parallelism_under_fsdp2():
    assert run_ranks(differences, 4, ["tp2"])[0][0] < 1e-6


def schedules(context: RankContext) -> list[tuple]:
    return [train(context, IN_FP32, Layout(pipeline=2, schedule=name), TORCHS) for name in SCHEDULES]


def test_its_pipelines_have_the_same_reference():
    losses, _, parameters = one_process(IN_FP32)
    for found in run_ranks(schedules, 2, deadline_s=240):
        for name, (ours, _, last) in zip(SCHEDULES, found, strict=True):
            assert ours == losses, name
            for parameter, _, _, values in last:
                assert torch.equal(values, parameters[parameter].flatten()), f"{name}: {parameter}"


def refused(context: RankContext) -> list[str]:
    found = []
    for strategy, layout in (("fsdp2", "pp2"), ("fsdp2", "cp2"), ("torch-ddp", "tp2"), ("hsdp", "tp2")):
        with pytest.raises(ValueError) as error:
            train(context, IN_FP32, Layout.parse(layout), get_strategy(strategy))
        found.append(str(error.value))
    return found


def test_what_is_not_measured_is_refused():
    pipeline, sequences, ddp, mesh = run_ranks(refused, 2)[0]
    assert "without data ranks" in pipeline and "tpN is measured" in sequences
    assert "take bucketed" in ddp and "take bucketed" in mesh
