"""Kill training runs at random moments, restart them, and compare every loss with one whole run.

    python -m tests.kill_runs --moments 50

Each start draws a strategy and one to four ranks. Every loss must agree within 1e-5.
(tests/launch/test_train.py checks that one strategy on two ranks repeats every bit.) SIGKILL hits
the launcher, one rank, or all at once. It comes at the start (imports, rendezvous, reading of the
checkpoint) or some steps later, at any point of a step or of a checkpoint. Ranks whose launcher was
killed must be gone within two seconds. Ranks that had not finished their imports may take longer,
but must not train.

It takes 5 to 15 seconds per moment, so it is not a part of the suite.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from distlab.train.metrics import read_journal
from tests.comm.test_parent_death import ends_within, is_alive
from tests.commands import ROOT, children, environment

STRATEGIES = (
    "bucketed",
    "naive",
    "flat",
    "overlap",
    "zero1",
    "zero2",
    "sharded-optimizer",
    "fsdp",
    "torch-ddp",
    "fsdp2",
)
STEPS = 40
OPTIONS = (
    "--backend=gloo --context=8 --vocab=31 --batch=12 --checkpoint-every=3 --lr=1e-4 --clip=0 "
    f"--timeout=30 --name=run --bucket-size-mb=0.05 --validate-sequences=4 --steps={STEPS}"
).split()
TOLERANCE = 1e-5  # nats; other groupings of the same sums, through forty AdamW steps of 1e-4
START_S = 6.0  # moments of the start lie within these seconds


class Failed(Exception):
    """A run was not as it should be."""


class Series:
    """Runs that are killed and started again until they are complete."""

    def __init__(self, out: Path):
        self.out, self.chance = out, random.Random(0)
        self.kills: Counter[str] = Counter()
        self.worst = 0.0

    def command(self, folder: Path) -> list[str]:
        options = (
            f"--nproc={self.chance.randint(1, 4)}",
            f"--strategy={self.chance.choice(STRATEGIES)}",
        )
        return [sys.executable, "launch/train.py", *options, f"--out={folder}", *OPTIONS]

    def run(self, moments: int) -> None:
        """Kill runs at this number of moments.

        Raises:
            Failed: a run was not as it should be.
        """
        undisturbed = self.out / "undisturbed"
        self.complete(self.command(undisturbed))
        number = 0
        while self.kills.total() < moments:
            number += 1
            folder = self.out / str(number)
            while self.kills.total() < moments and not self.is_killed_too_late(folder):
                pass
            self.finish(folder, losses(undisturbed))

    def is_killed_too_late(self, folder: Path) -> bool:
        """Start the run and kill it. Return True if it was complete before."""
        before = max(losses(folder), default=0)
        begin = time.monotonic()
        with open(self.out / "stderr", "w") as log:
            launcher = subprocess.Popen(
                self.command(folder), cwd=ROOT, env=environment(), stdout=log, stderr=log
            )
        if self.chance.random() < 0.4:
            moment, delay = "start", self.chance.uniform(0, START_S)
            while time.monotonic() - begin < delay and launcher.poll() is None:
                time.sleep(0.01)
        else:
            moment, steps = "steps", self.chance.randint(0, 12)
            while launcher.poll() is None and max(losses(folder), default=0) < before + steps:
                time.sleep(0.005)
            time.sleep(self.chance.uniform(0, 0.1))
        if launcher.poll() is not None:
            if launcher.returncode != 0:
                raise Failed(
                    f"ended with {launcher.returncode}:\n{(self.out / 'stderr').read_text()}"
                )
            return True
        ranks = ranks_of(launcher.pid)
        victims = {"launcher": [launcher.pid], "all": [*ranks, launcher.pid]}
        if ranks:
            victims["rank"] = [self.chance.choice(ranks)]
        victim = self.chance.choice(sorted(victims))
        for pid in victims[victim]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            launcher.wait(60)  # after the death of a rank the others notice, and it ends by itself
        except subprocess.TimeoutExpired:
            launcher.kill()
            raise Failed(f"the launcher outlived the death of a {victim} by 60 s") from None
        what = f"{victim} at {moment}"
        trained = max(losses(folder), default=0)
        if not all([ends_within(rank, 2) for rank in ranks]):
            late = [rank for rank in ranks if is_alive(rank)]
            if moment != "start" or not all(ends_within(rank, 60) for rank in late):
                raise Failed(
                    f"{what}: ranks {late} outlived it:\n{(self.out / 'stderr').read_text()}"
                )
        if max(losses(folder), default=0) != trained:
            raise Failed(f"{what}: ranks trained on:\n{(self.out / 'stderr').read_text()}")
        self.kills[what] += 1
        print(
            f"{self.kills.total()}: {what}, step {max(losses(folder), default=0)} of {STEPS}",
            flush=True,
        )
        return False

    def finish(self, folder: Path, expected: dict[int, float]) -> None:
        self.complete(self.command(folder))
        found = losses(folder)
        if list(found) != list(range(1, STEPS + 1)):
            raise Failed(f"{folder}: the journal has steps {list(found)}")
        differences = {step: abs(found[step] - loss) for step, loss in expected.items()}
        self.worst = max(self.worst, *differences.values())
        if self.worst > TOLERANCE:
            raise Failed(f"{folder}: losses differ by {self.worst:.2e}: {differences}")
        run = folder / "train" / "run"
        record = json.loads((run / "records.json").read_text())["records"][0]["metrics"]
        if record["steps"] != STEPS or record["final_loss"] != found[STEPS]:
            raise Failed(f"{folder}: the record says {record}")
        left = [
            path.name for path in (*run.glob("run.lock*"), *(run / "checkpoints").glob("[!s]*"))
        ]
        if left:
            raise Failed(f"{folder}: left behind: {left}")

    def complete(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Failed(f"{command} ended with {done.returncode}:\n{done.stderr}")


def losses(folder: Path) -> dict[int, float]:
    path = folder / "train" / "run" / "metrics.jsonl"
    try:
        return {line["step"]: float.fromhex(line["loss_hex"]) for line in read_journal(path)}
    except FileNotFoundError:
        return {}


def ranks_of(launcher: int) -> list[int]:
    try:
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(launcher)}
        return [pid for pid, line in lines.items() if re.search(rb"train(\.py)?\0", line)]
    except FileNotFoundError:
        return []


def main() -> int:
    p = argparse.ArgumentParser(
        "kill_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--moments", type=int, default=50, help="how many [%(default)s]")
    moments, begin = p.parse_args().moments, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distlab-kill-runs-") as out:
        series = Series(Path(out))
        try:
            series.run(moments)
        except Failed as error:
            print(f"FAILED after {series.kills.total()} kills: {error}", file=sys.stderr)
            return 1
    kills = ", ".join(f"{count} × {what}" for what, count in sorted(series.kills.items()))
    print(
        f"{moments} kills ({kills}), largest |Δloss| {series.worst:.1e}, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
