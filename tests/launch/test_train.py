"""The trainer as people run it: killed, stopped, restarted, on two machines, with bad input."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.comm.rank_process import is_lost_peer
from distlab.report import Record, write_json
from distlab.train.config import DataConfig, TrainConfig
from distlab.train.metrics import read_journal
from distlab.train.sample import newest_usable
from launch import trainer
from tests.comm.test_parent import ends_within
from tests.commands import ROOT, environment, python

REPORT = ("records.json", "records.csv", "table.md", "table.tex", "report.html")
STEPS = 30
ARGUMENTS = [
    *(
        "--backend=gloo",
        "--context=16",
        "--vocab=61",
        "--batch=4",
        f"--steps={STEPS}",
        "--checkpoint-every=5",
    ),
    *("--dropout=0.1", "--timeout=8", "--name=run", "--log-every=1", "--bucket-size-mb=1"),
]


def losses(out: Path) -> dict[int, str]:
    return {line["step"]: line["loss_hex"] for line in read_journal(out / "train" / "run" / "metrics.jsonl")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, str]:
    out = tmp_path_factory.mktemp("undisturbed")
    done = python("launch/train.py", "--nproc=2", *ARGUMENTS, f"--out={out}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["records"][0]["metrics"]["steps"] == STEPS
    folder = out / "train" / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "checkpoints", "loss.png", *REPORT}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_00000025", "step_00000030"}
    assert f"step {STEPS}/{STEPS}" in done.stderr and "MFU n/a" in done.stderr
    found = losses(out)
    assert list(found) == list(range(1, STEPS + 1))
    return found


class Running:
    """A command in the background, its stderr in a file."""

    def __init__(self, out: Path, *command: str, extra: dict[str, str] | None = None):
        self.log = out / f"stderr-{len(list(out.iterdir()))}"
        variables = environment() | (extra or {})
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=variables, stdout=file, stderr=file
            )

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for something that will come about; fail loudly if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.text()}"
            time.sleep(0.02)

    def workers(self) -> list[int]:
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            found = [int(child) for child in file.read().split()]
        return [pid for pid in found if re.search(rb"train(\.py)?\0", Path(f"/proc/{pid}/cmdline").read_bytes())]

    def text(self) -> str:
        return self.log.read_text()

    def end(self, seconds: float = 90) -> int:
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()


def started(out: Path, step: int) -> Callable[[], bool]:
    path = out / "train" / "run" / "metrics.jsonl"
    return lambda: path.exists() and max(losses(out), default=0) >= step


def test_killed_ranks_are_restarted_and_the_losses_are_those_of_an_undisturbed_run(undisturbed, tmp_path):
    """RELIABILITY 46 and §0 B: SIGKILL of a rank during rendezvous, then of the other in the middle of training."""
    run = Running(
        tmp_path, "launch/train.py", "--nproc=2", "--max-restarts=2", *ARGUMENTS, f"--out={tmp_path}"
    )
    run.until(lambda: len(run.workers()) == 2)
    first = run.workers()
    os.kill(first[1], signal.SIGKILL)  # both are still importing torch: nobody has met anybody
    run.until(lambda: len(run.workers()) == 2 and not set(first) & set(run.workers()))
    run.until(started(tmp_path, 12))
    os.kill(run.workers()[0], signal.SIGKILL)
    assert run.end() == 0, run.text()
    assert losses(tmp_path) == undisturbed
    text = run.text()
    assert "resumed from step 10" in text or "resumed from step 5" in text or "resumed from step 15" in text
    assert "train: rank 1 lost another rank: it died, or did not join a collective" in text  # the survivor said why


def test_a_rank_that_hangs_past_the_timeout_fails_the_run_with_a_message(tmp_path):
    """The fault table: SIGSTOP. The peer errs at the timeout of 8 s, and the run is no success."""
    run = Running(tmp_path, "launch/train.py", "--nproc=2", *ARGUMENTS, "--steps=5000", f"--out={tmp_path}")
    run.until(started(tmp_path, 3))
    begin = time.monotonic()
    stopped = run.workers()[1]
    os.kill(stopped, signal.SIGSTOP)
    run.until(lambda: "lost another rank: it died, or did not join a collective within 8 s" in run.text(), 40)
    assert time.monotonic() - begin > 4
    os.kill(stopped, signal.SIGKILL)  # the agent would do so in 30 s
    assert run.end() != 0


OURS = ("launch/train.py", "--nproc=2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "launch/train.py")


@pytest.mark.parametrize("starts", [OURS, TORCHRUN], ids=["launcher", "torchrun"])
def test_ranks_end_with_a_launcher_that_is_killed_and_the_same_command_goes_on(undisturbed, tmp_path, starts):
    """Ranks that train on would meet the next run of the same name, which is what a person starts then."""
    command = [*starts, *ARGUMENTS, f"--out={tmp_path}"]
    run = Running(tmp_path, *command)
    run.until(started(tmp_path, 12))  # the checkpoint of step 5 is complete: that of 10 has waited for it
    ranks = run.workers()
    assert len(ranks) == 2
    run.process.kill()
    assert all(ends_within(rank, 2) for rank in ranks)
    assert max(losses(tmp_path)) < STEPS
    if starts == OURS:
        again = python(*command)
        assert again.returncode == 0 and "resumed from step" in again.stderr, again.stderr
        assert losses(tmp_path) == undisturbed
        assert "run.lock" not in {path.name for path in (tmp_path / "train" / "run").iterdir()}


def test_of_two_runs_at_once_the_second_is_refused_and_the_first_goes_on(tmp_path):
    """The same command again, by mistake, and one of other options and the same name."""
    arguments = [*ARGUMENTS, "--steps=5000", "--checkpoint-every=2", f"--out={tmp_path}"]
    first = Running(tmp_path, "launch/train.py", "--nproc=1", *arguments)
    first.until(started(tmp_path, 3))
    options = (["--nproc=1"], ["--nproc=2", "--lr=0.5", "--strategy=zero1", "--fresh"])
    others = [Running(tmp_path, "launch/train.py", *arguments, *added) for added in options]
    for other in others:
        assert other.end() == 2, other.text()
        (message,) = [line for line in other.text().splitlines() if "train: error:" in line]
        (rank,) = first.workers()
        assert (
            f"run is being written by another run (process {rank} on " in message
            and "Traceback" not in message
        )
    first.until(started(tmp_path, max(losses(tmp_path)) + 3))
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 128 + signal.SIGTERM, first.text()
    found = losses(tmp_path)
    assert list(found) == list(range(1, max(found) + 1))
    stored = newest_usable(tmp_path / "train" / "run" / "checkpoints")
    assert stored.step == max(found) and stored.content["extra"]["identity"]["lr"] == 1e-3
    assert stored.content["strategy"] == "bucketed"
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["run"]


def test_runs_are_named_by_data_size_and_strategy_and_stay_in_their_folder():
    config = TrainConfig(strategy="zero1")
    assert trainer.run_name(None, DataConfig("texts/my.txt"), config) == "my-tiny-zero1"
    assert trainer.run_name(None, DataConfig(), TrainConfig()) == "synthetic-tiny-bucketed"
    assert trainer.run_name("my-run.2", DataConfig(), config) == "my-run.2"
    for name in ("../../x", "..", ".", "", "a/b", "/x", "a/"):
        with pytest.raises(ValueError, match=r"--name .* cannot name a folder: use letters"):
            trainer.run_name(name, DataConfig(), config)


def test_a_run_has_its_record_once_the_last_file_is_written(tmp_path):
    """It may die between the record and its page; then the next start writes both."""
    record = Record("train", "bucketed", {}, {"steps": 4}, {}, None)
    assert not trainer.has_record(tmp_path, 4)
    write_json([record], tmp_path / "records.json")
    assert not trainer.has_record(tmp_path, 4)
    (tmp_path / "report.html").touch()
    assert trainer.has_record(tmp_path, 4) and not trainer.has_record(tmp_path, 5)
    os.utime(tmp_path / "report.html", (0, 0))  # of the run's earlier end
    assert not trainer.has_record(tmp_path, 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stopped_run_writes_a_checkpoint_and_goes_on_where_it_was(undisturbed, tmp_path, number):
    command = ["launch/train.py", "--nproc=2", *ARGUMENTS, "--checkpoint-every=0", f"--out={tmp_path}"]
    run = Running(tmp_path, *command)
    run.until(started(tmp_path, 4))
    run.process.send_signal(number)
    assert run.end() == 128 + number, run.text()
    assert (
        f"stopped by signal {int(number)} after step" in run.text()
        and "a checkpoint is written" in run.text()
    )
    (stored,) = (tmp_path / "train" / "run" / "checkpoints").iterdir()
    assert int(stored.name.removeprefix("step_")) == max(losses(tmp_path)) < STEPS
    if number == signal.SIGINT:
        return
    again = python(*command)
    assert again.returncode == 0 and "resumed from step" in again.stderr, again.stderr
    assert losses(tmp_path) == undisturbed
    complete = python(*command)
    assert complete.returncode == 0 and "this run is complete: 30 of 30 steps" in complete.stderr
    assert losses(tmp_path) == undisturbed


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_two_agents_train_together_and_restart_together(undisturbed, tmp_path):
    """Two machines, played by two agents on the loopback interface; a rank of one is killed on the way."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", *rendezvous]
    command = ["-m", "torch.distributed.run", *options, "launch/train.py", *ARGUMENTS, f"--out={tmp_path}"]
    # Several agents count restarts apart, so attempts cannot be told apart by a count: each has its own store.
    extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [Running(tmp_path, *command, extra=extra) for _ in range(2)]
    agents[0].until(started(tmp_path, 12))
    os.kill(agents[1].workers()[0], signal.SIGKILL)
    texts = [(agent.end(120), agent.text()) for agent in agents]
    assert [code for code, _ in texts] == [0, 0], texts
    assert any("resumed from step" in text for _, text in texts)
    assert losses(tmp_path) == undisturbed


@pytest.mark.parametrize(
    "said", ["Connection closed by peer [::1]:1", "Application timeout caused pair closure"]
)
def test_what_gloo_says_of_a_lost_rank_is_known(said):
    assert is_lost_peer(RuntimeError(f"[../gloo/transport/tcp/pair.cc:1] {said}"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
