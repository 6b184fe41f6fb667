"""Traces of the lab's own strategies give the same account when nothing names their steps."""

import gzip
import json
from contextlib import closing

import pytest

from distlab.bench.trial import Trial
from distlab.bench.variant import BenchOptions, Variant
from distlab.parallel import get_strategy
from distlab.testing import run_ranks
from distlab.trace import explain_traces
from distlab.trace.explanation import parts_of

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded-optimizer", "fsdp")
# Traces of these look as those of bucketed: one bucket, or a message for each parameter.
AS_BUCKETED = ("flat", "overlap")
TRACED = 3  # steps, after one of warm-up


def record(context, folder, size, strategies):
    """Trace some steps of strategies on this rank."""
    options = BenchOptions(size=size, batch=4)
    for name in strategies:
        with closing(Trial(context, options, Variant(name, get_strategy(name), 1.0))) as trial:
            trial()
            trial.profile(folder / f"{name}_rank{context.rank}.json.gz", TRACED)


def without_ranges(path):
    """Write a copy without the lab's annotations. Return its path."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["traceEvents"] = [
        event for event in trace["traceEvents"] if not event["name"].startswith("distlab:")
    ]
    copy = path.with_name(f"stripped_{path.name}")
    copy.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return copy


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.commands if name in AS_BUCKETED else ())
        for name in STRATEGIES
    ],
)
def test_the_account_needs_no_ranges(tmp_path, strategy):
    run_ranks(record, 2, tmp_path, "tiny", [strategy])
    check_account_without_ranges(tmp_path, strategy)


def check_account_without_ranges(folder, strategy):
    """Assert that the parts of a step differ by less than 1 % of it without the lab's ranges."""
    files = [folder / f"{strategy}_rank{rank}.json.gz" for rank in range(2)]
    named = explain_traces(files)
    found = explain_traces([without_ranges(file) for file in files])
    for rank, stripped in zip(named.ranks, found.ranks, strict=True):
        assert stripped.found_by == "repetition of the work"
        # The first step that repeats is the warm-up. Without a GPU, the last one has no next step
        # to end at; a trace of a GPU also holds the beginning of the next.
        assert len(stripped.steps) == TRACED + stripped.trace.on_gpu
        step_ms = rank.mean.step_ms
        pairs = [(rank.steps[k - 1], stripped.steps[k]) for k in range(1, len(stripped.steps))]
        for part in parts_of(rank.mean):
            difference_ms = 0.0
            allowed_ms = 0.01 * step_ms * len(pairs)
            for step, same in pairs:
                named_parts, found_parts = parts_of(step.account), parts_of(same.account)
                difference_ms += named_parts[part] - found_parts[part]
                if part in ("step", "idle"):
                    # A step by repetition begins at its first operator, and the range before it. On
                    # a loaded machine Python takes long in between, in which nothing else is done.
                    allowed_ms += abs(named_parts["step"] - found_parts["step"])
            assert abs(difference_ms) < allowed_ms, (strategy, part)
