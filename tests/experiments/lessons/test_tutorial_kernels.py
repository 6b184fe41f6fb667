"""The errors of tutorial kernels: hidden by benign inputs, shown by hostile ones, and absent from ours."""

from dataclasses import replace

import pytest
import torch

from distlab.experiment import lone_context
from experiments.lessons import tutorial_kernels
from kernels.layernorm import layer_norm
from kernels.softmax import softmax
from tests.experiments.lessons.test_lessons import ON_CPU

EXPERIMENT = tutorial_kernels.EXPERIMENT


def test_benign_inputs_hide_each_error_and_hostile_ones_show_it(smoke):
    records, _ = smoke("tutorial_kernels")
    assert len(records) == 8 and EXPERIMENT.wrong(records) == []
    for record in records:
        benign, hostile, ours = (record.metrics[case] for case in ("benign", "hostile", "ours"))
        assert benign < 1e-5 and not hostile < 0.05 and ours < 1e-4, record.variant


@pytest.mark.parametrize("case, value", [("benign", 1.0), ("hostile", 0.0), ("ours", float("nan"))])
def test_an_error_that_shows_elsewhere_is_called_wrong(smoke, case, value):
    first, *others = smoke("tutorial_kernels")[0]
    first = replace(first, metrics=first.metrics | {case: value})
    assert EXPERIMENT.wrong([first, *others]) == ["small last group"]


@ON_CPU
@pytest.mark.parametrize("cols", [16384 + 24, 32768 + 24])
def test_ours_merges_blocks_of_long_rows_by_count_and_maximum(cols):
    """Rows that are processed in pieces, with a short last one that holds the maximum, far from a mean of 0."""
    x = (torch.randn(2, cols) + 100).sort().values
    expected = torch.layer_norm(x.double(), (cols,))
    torch.testing.assert_close(
        layer_norm(x, torch.ones(cols)).double(), expected, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(softmax(x).double(), x.double().softmax(1), atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_the_errors_show_in_compiled_kernels(tmp_path):
    config, context = tutorial_kernels.TutorialKernelsConfig(), lone_context("cuda")
    run = EXPERIMENT.open(config, context, tmp_path)
    tutorial_kernels.measure(config, context, run)
    assert EXPERIMENT.finish(run, json_only=True) == 0
