"""The trainer as people run it: killed, stopped, restarted, on two machines, with bad input."""

import json
import math
import os
import re
import signal
import socket
import time
from unittest.mock import patch

import pytest
import torch.distributed.run as torchrun
from torch.distributed.launcher.api import elastic_launch

from distlab.report import Record, read_json, write_json
from distlab.testing import run_ranks
from distlab.train.config import DataConfig, TrainConfig
from distlab.train.metrics import read_journal
from distlab.train.sample import newest_usable
from launch import ranks, trainer
from tests.comm.test_parent_death import ends_within
from tests.commands import be_python, children, forked, python

REPORT = ("records.json", "records.csv", "table.md", "report.html")
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


def losses(out):
    return {
        line["step"]: line["loss_hex"]
        for line in read_journal(out / "train" / "run" / "metrics.jsonl")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    done = python("launch/train.py", "--nproc=2", *ARGUMENTS, f"--out={out}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["records"][0]["metrics"]["steps"] == STEPS
    folder = out / "train" / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "checkpoints", "loss.png", *REPORT}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "step_00000025",
        "step_00000030",
    }
    # of a CPU none is known
    assert f"step {STEPS}/{STEPS}" in done.stderr and "MFU" not in done.stderr
    found = losses(out)
    assert list(found) == list(range(1, STEPS + 1))
    return found


class Running:
    """A command in the background, what it says in a file."""

    def __init__(self, out, *command, be=be_python):
        self.log = out / f"said-{len(list(out.iterdir()))}"
        self.process = forked(command, self.log, self.log, be)

    def until(self, condition, seconds=60):
        """Wait for something that will come about; fail loudly if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.is_alive(), f"ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited in vain:\n{self.text()}"
            time.sleep(0.02)

    def workers(self):
        return children(self.process.pid)

    def text(self):
        return self.log.read_text()

    def end(self, seconds=90):
        self.process.join(seconds)
        return self.process.exitcode


@pytest.fixture
def running(tmp_path):
    """Starts commands that write to `tmp_path`, and ends those that a failed test leaves."""
    commands = []

    def start(*command, **options):
        commands.append(Running(tmp_path, *command, f"--out={tmp_path}", **options))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()


def started(out, step):
    path = out / "train" / "run" / "metrics.jsonl"
    return lambda: path.exists() and max(losses(out), default=0) >= step


TWO_RANKS = ("launch/train.py", "--nproc=2", *ARGUMENTS)


def test_killed_ranks_are_restarted_and_the_losses_are_those_of_an_undisturbed_run(
    undisturbed, tmp_path, running
):
    """Kill one rank during rendezvous, then the other in the middle of training."""
    run = running(*TWO_RANKS, "--max-restarts=2")
    run.until(lambda: len(run.workers()) == 2)
    first = run.workers()
    os.kill(first[1], signal.SIGKILL)  # both are still importing: nobody has met anybody
    run.until(lambda: len(run.workers()) == 2 and not set(first) & set(run.workers()))
    run.until(started(tmp_path, 12))
    os.kill(run.workers()[0], signal.SIGKILL)
    assert run.end() == 0, run.text()
    assert losses(tmp_path) == undisturbed
    assert re.search("resumed from step (5|10|15)", run.text())
    # the survivor
    assert "train: rank 1 lost another rank: it died, or did not join a collective" in run.text()


def test_a_rank_that_hangs_past_the_timeout_fails_the_run_with_a_message(tmp_path, running):
    """Stop a rank by SIGSTOP: its peer fails at the timeout of 4 s, and so does the run."""
    run = running(*TWO_RANKS, "--steps=5000", "--timeout=4")
    run.until(started(tmp_path, 3))
    begin = time.monotonic()
    stopped = run.workers()[1]
    os.kill(stopped, signal.SIGSTOP)
    run.until(
        lambda: "lost another rank: it died, or did not join a collective within 4 s" in run.text(),
        40,
    )
    assert time.monotonic() - begin > 2
    os.kill(stopped, signal.SIGKILL)  # the agent would do so in 30 s
    assert run.end() not in (None, 0)


def test_a_rank_of_torchruns_ends_with_its_agent(tmp_path, running):
    """Ranks that train on would meet the next run of the same name, which is what a person starts
    then.
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    run = running(*torchrun, "launch/train.py", *ARGUMENTS, "--steps=5000")
    run.until(started(tmp_path, 1))
    (rank,) = run.workers()
    run.process.kill()
    assert ends_within(rank, 2)


def test_a_run_that_was_stopped_or_lost_its_launcher_goes_on_where_it_was(
    undisturbed, tmp_path, running
):
    command = [*TWO_RANKS, "--checkpoint-every=0"]
    run = running(*command)
    run.until(started(tmp_path, 4))
    run.process.terminate()
    assert run.end() == 128 + signal.SIGTERM, run.text()
    assert f"stopped by signal {int(signal.SIGTERM)} after step" in run.text()
    assert "a checkpoint is written" in run.text()
    folder = tmp_path / "train" / "run"
    (stored,) = (folder / "checkpoints").iterdir()
    step = max(losses(tmp_path))
    assert stored.name == f"step_{step:08}" and step < STEPS

    run = running(*command)
    run.until(started(tmp_path, step + 3))
    ranks = run.workers()
    assert len(ranks) == 2
    run.process.kill()
    assert all(ends_within(rank, 2) for rank in ranks)
    assert max(losses(tmp_path)) < STEPS

    command.append(f"--out={tmp_path}")
    again = python(*command)
    assert again.returncode == 0 and f"resumed from step {step}" in again.stderr, again.stderr
    assert losses(tmp_path) == undisturbed and not (folder / "run.lock").exists()
    complete = python(*command, "--json")
    assert complete.returncode == 0 and "this run is complete: 30 of 30 steps" in complete.stderr
    assert json.loads(complete.stdout)["records"][0]["metrics"]["steps"] == STEPS
    assert losses(tmp_path) == undisturbed


def test_of_two_runs_at_once_the_second_is_refused_and_the_first_goes_on_until_ctrl_c(
    tmp_path, running
):
    """One of other options and the same name."""
    command = ["launch/train.py", *ARGUMENTS, "--steps=5000", "--checkpoint-every=2"]
    first = running(*command, "--nproc=1")
    first.until(started(tmp_path, 3))
    (rank,) = first.workers()
    other = python(
        *command, "--nproc=2", "--lr=0.5", "--strategy=zero1", "--fresh", f"--out={tmp_path}"
    )
    assert other.returncode == 2, other.stderr
    (message,) = [line for line in other.stderr.splitlines() if "train: error:" in line]
    assert f"run is being written by another run (process {rank} on " in message
    assert "Traceback" not in other.stderr
    first.until(started(tmp_path, max(losses(tmp_path)) + 3))
    os.kill(first.process.pid, signal.SIGINT)
    assert first.end() == 128 + signal.SIGINT, first.text()
    found = losses(tmp_path)
    assert list(found) == list(range(1, max(found) + 1))
    stored = newest_usable(tmp_path / "train" / "run" / "checkpoints")
    assert stored.step == max(found) and stored.content["extra"]["identity"]["lr"] == 1e-3
    assert stored.content["strategy"] == "bucketed"
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["run"]


def resumed(context, folder):
    """What is said of a run that another strategy continues."""
    data, options = DataConfig(f"{folder}/my.txt"), trainer.RunOptions(out=folder, name="mine")
    said = []
    with patch.object(trainer, "Progress") as progress:
        progress.return_value.keep = said.append
        for strategy, steps in (("bucketed", 2), ("zero1", 4)):
            size = {
                "context": 8,
                "d_model": 8,
                "layers": 1,
                "heads": 1,
                "kv_heads": 1,
                "validate_every": 1,
            }
            trainer.train(
                context, TrainConfig(strategy=strategy, steps=steps, batch=2, **size), data, options
            )
    return said


def test_a_run_says_who_trained_it_and_counts_bits_of_bytes(tmp_path):
    (tmp_path / "my.txt").write_text("a text of which bytes are the tokens. " * 40)
    said = run_ranks(resumed, 1, str(tmp_path))[0]
    (record,) = read_json(tmp_path / "train" / "mine" / "records.json")
    loss = record.metrics["validation_loss"]
    assert record.metrics["validation_bits_per_byte"] == pytest.approx(loss / math.log(2))
    assert (
        f"validation loss after step 4: {loss:.4f} nats per token ({loss / math.log(2):.2f} bits "
        "per byte)" in said
    )
    page = (tmp_path / "train" / "mine" / "report.html").read_text()
    assert (
        "sequences (bucketed × 1 to step 2, zero1 × 1 to step 4)" in page
        and "bits per byte" in page
    )
    assert "MFU" not in page.split("<table")[1]


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


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def be_agent(command):
    """Be `torchrun COMMAND…` for the trainer, with ranks that are forks."""
    # Several agents count restarts apart, so attempts cannot be told apart by a count: each has its
    # own store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    args = torchrun.parse_args(command)
    config, *_ = torchrun.config_from_args(args)
    elastic_launch(config, ranks._forked)(args.training_script_args)


def test_two_agents_train_together_and_restart_together(undisturbed, tmp_path, running):
    """Two machines, played by two agents on the loopback interface.

    A rank of one is killed on the way.
    """
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=job",
    ]
    options = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=2",
        "--start-method=fork",
        *rendezvous,
    ]
    agents = [
        running(*options, "launch/train.py", "train", *ARGUMENTS, be=be_agent) for _ in range(2)
    ]
    agents[0].until(started(tmp_path, 12))
    os.kill(agents[1].workers()[0], signal.SIGKILL)
    assert [agent.end(120) for agent in agents] == [0, 0], [agent.text() for agent in agents]
    assert any("resumed from step" in agent.text() for agent in agents)
    assert losses(tmp_path) == undisturbed
