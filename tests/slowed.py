"""Does `distlab compare --fail-above 100%` find a strategy that was made slower, and only that?

    python -m tests.slowed [--out FOLDER]

It runs ddp_bench on two gloo ranks: as it is, with a sleep of 20 ms after the last bucket (about
four steps), with one of 10 µs, and as it is again. It is not a test, because other work on two
cores changes the times by up to 40 % from run to run. The exit code is 1 if the 20 ms are not
found, or if anything else is found.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from dataclasses import replace
from unittest import mock

from torch import nn

from distlab.compare import SavedRun, compared, failures, findings
from distlab.experiment import RankContext, run_folder
from distlab.parallel import STRATEGIES, BucketedDDP, Wrapping
from distlab.testing import run_ranks
from experiments.ddp_bench import EXPERIMENT

ROWS = ("local", "bucketed", "torch-ddp")
# run → seconds of sleep
RUNS = {"as_it_is": 0.0, "slower_20ms": 20e-3, "slower_10us": 10e-6, "again": 0.0}


class Slowed(BucketedDDP):
    """BucketedDDP that sleeps when all messages have arrived.

    An earlier sleep would be hidden on a host whose messages are slow.
    """

    sleep_s = 0.0

    def _synchronize(self) -> None:
        super()._synchronize()
        time.sleep(self.sleep_s)


def measure(context: RankContext, out: str, name: str, sleep_s: float) -> None:
    """Measure one run on this rank."""

    def wrap_slowed(module: nn.Module, how: Wrapping) -> Slowed:
        model = Slowed(module, how.bucket_size_mb, process_group=how.process_group)
        model.sleep_s = sleep_s
        return model

    changed = {"bucketed": replace(STRATEGIES["bucketed"], wrap=wrap_slowed)} if sleep_s else {}
    config = EXPERIMENT.config(
        **EXPERIMENT.preset("smoke", on_gpu=False)
        | {
            "strategies": ROWS,
            "rounds": 30,
            "warmup": 3,
            "steps": 10,
            "check_steps": 0,
            "profile_steps": 0,
        }
    )
    with (
        mock.patch.dict(STRATEGIES, changed),
        contextlib.redirect_stderr(None),
        run_folder(context, out, "ddp_bench", name) as folder,
    ):
        run = EXPERIMENT.open(config, context, folder)
        EXPERIMENT.measure(config, context, run)


def main() -> int:
    """Measure all runs, and compare each with the first."""
    parser = argparse.ArgumentParser("python -m tests.slowed", description=__doc__)
    parser.add_argument("--out", help="folder of the runs [one that is deleted]")
    with tempfile.TemporaryDirectory() as folder:
        out = parser.parse_args().out or folder
        for name, sleep_s in RUNS.items():
            run_ranks(measure, 2, out, name, sleep_s, deadline_s=300)
        saved = {name: SavedRun.read(f"{out}/ddp_bench/{name}") for name in RUNS}
    wrong = []
    for name in list(RUNS)[1:]:
        rows = compared([saved["as_it_is"], saved[name]], control="torch-ddp")
        found = failures(rows, 100.0)
        print(f"{name}: above 100 %: {', '.join(found) or 'none'}", *findings(rows), sep="\n  ")
        if found != (["bucketed"] if name == "slower_20ms" else []):
            wrong.append(name)
    print(f"wrong: {', '.join(wrong)}" if wrong else "as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
