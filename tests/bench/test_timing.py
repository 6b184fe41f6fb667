"""A row for each bucket size, and the phases of what is timed."""

import pytest
import torch

from distlab.bench.step_timing import Timing, time_rounds
from distlab.bench.variant import BenchOptions, variants


def test_forward_and_backward_are_also_one_phase(one_rank):
    timing, sample = Timing(), {"forward": 1.0, "backward": 2.0, "optimizer": 4.0, "step": 7.0}
    timing.add([sample], one_rank)
    assert timing.phases["forward_backward"] == [3.0]


def test_a_row_for_each_bucket_size_has_that_size():
    rows = variants(["local", "bucketed"], [1.0, None])
    named = {row.name: row.bucket_size_mb for row in rows}
    assert named == {"local": 1.0, "bucketed-1": 1.0, "bucketed-unbounded": None}


@torch.compiler.set_stance(force_backend="eager")
def test_compiled_rows_are_inspected_after_as_many_steps_as_others(one_rank):
    losses = {}
    for compile in ("off", "blocks"):
        time_rounds(
            BenchOptions(size="tiny", d_model=32, d_ff=64, heads=2, vocab=64, compile=compile),
            variants(["local"], [1.0]),
            one_rank,
            rounds=1,
            warmup=1,
            steps=2,
            inspect=lambda row, trial, key=compile: losses.update({key: trial.last_loss.item()}),
        )
    assert losses["blocks"] == pytest.approx(losses["off"], rel=1e-5)
