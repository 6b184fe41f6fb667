"""A row for each bucket size, and the phases of what is timed."""

from distlab.bench.step_timing import Timing
from distlab.bench.variant import variants


def test_forward_and_backward_are_also_one_phase(one_rank):
    timing, sample = Timing(), {"forward": 1.0, "backward": 2.0, "optimizer": 4.0, "step": 7.0}
    timing.add([sample], one_rank)
    assert timing.phases["forward_backward"] == [3.0]


def test_a_row_for_each_bucket_size_has_that_size():
    rows = variants(["local", "bucketed"], [1.0, None])
    named = {row.name: row.bucket_size_mb for row in rows}
    assert named == {"local": 1.0, "bucketed-1": 1.0, "bucketed-unbounded": None}
