"""The one run in small of every experiment, for all tests that look at what comes out of it."""

import fcntl
import os
import pickle

import pytest

from distlab.parallel import strategies_on
from experiments.memory_breakdown import STRATEGIES
from launch.registry import load
from tests.experiments.frame import measured

FIELDS = {  # what tests want to see, over the preset
    "collectives": {
        "operations": ("all_reduce", "broadcast", "whole_all_reduce"),
        "group_sizes": (2, 3),
        "repeats": 5,
    },
    # No test looks at what depends on the number of blocks. Two have a first and a last one.
    "ddp_bench": {"strategies": strategies_on("cpu"), "shard_size": 1, "layers": 2},
    "ir": {"kernels": ("lesson_banks", "average.average_kernel"), "workers": 1},
    # One of each kind; every kernel is compared with float64 in tests/kernels.
    "kernel_roofline": {
        "only": ("add_rms_norm", "rope", "cross_entropy", "adamw", "matmul", "add+layer_norm")
    },
    "memory_breakdown": {"strategies": STRATEGIES},
    "muon_placements": {"layers": 2},
    "pipeline_schedules": {"layers": 4},  # two stages, each in two parts where they interleave
}


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """The rows of an experiment's run in small and its folder: made once, also where several
    processes test, and left alone."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def of(name):
        rows = root / f"{name}.pickle"
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not rows.exists():
                experiment, fields = load(name).EXPERIMENT, FIELDS.get(name, {})
                found = measured(experiment, root / "smoke", draws=True, **fields)
                rows.write_bytes(pickle.dumps(found))
        return pickle.loads(rows.read_bytes()), root / "smoke" / name / "run"

    return of


@pytest.fixture
def few_resamples(monkeypatch):
    """Make intervals of 300 resamples, for tests of many runs: sentences and tests see the same
    ones.
    """
    monkeypatch.setattr("distlab.measure.interleaved.RESAMPLES", 300)
