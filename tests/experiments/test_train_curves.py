"""All strategies' loss curves, a killed run and the cost of checkpoints, as torchrun runs them."""

import json

import pytest

from distlab.report import Record, read_json
from experiments.train_curves import check_restarts, headline, verdicts
from experiments.train_curves_pieces.config import COST, KILLED, REFERENCE, ROUNDING
from experiments.train_curves_pieces.verdicts import cost_is_noise
from tests.commands import torchrun

ARGUMENTS = [
    *("--backend=gloo", "--steps=14", "--kill-at=9", "--checkpoint-every=3", "--batch=4", "--context=16"),
    *("--cost-batch=4", "--block=3", "--rounds=2", "--strategies=zero1,fsdp", "--timeout=15"),
]


def test_one_command_trains_kills_resumes_and_compares(tmp_path):
    text = tmp_path / "song.txt"
    text.write_text("na na na na, hey hey hey, good bye. " * 40)
    out = f"--out={tmp_path / 'curves'}"
    done = torchrun(
        "--nproc-per-node=2",
        "--max-restarts=1",
        "experiments/train_curves.py",
        *ARGUMENTS,
        f"--text={text}",
        out,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 kills itself" in done.stderr and "zero1: has its record" in done.stderr
    folder = tmp_path / "curves" / "records"
    records = {record.variant: record for record in read_json(folder / "records.json")}
    assert set(records) == {REFERENCE, "zero1", "fsdp", ROUNDING, KILLED, COST}
    killed = records[KILLED].metrics
    assert 0 < killed["first_step"] < 9 and killed["max_abs_loss_diff"] == 0
    assert len(records["fsdp"].metrics["loss"]) == 14 == len(killed["loss"]) + killed["first_step"]
    assert records[COST].metrics["checkpoint_bytes"] > 12 * records[COST].config["num_parameters"]
    # On this machine steps take milliseconds, so only the price of a checkpoint may be out of bounds.
    assert all("checkpoints cost" in problem for problem in verdicts(list(records.values())))
    assert (folder / "loss.png").stat().st_size > 10_000
    assert json.loads(done.stdout.splitlines()[-1])["experiment"] == "train_curves"
    assert "14 steps" in headline(list(records.values()))


def record(variant: str, **metrics) -> Record:
    return Record("train_curves", variant, {}, {"first_step": 0, "loss": [5.0, 2.0]} | metrics, {}, None)


def test_what_is_wrong_is_said():
    good = [record(REFERENCE, loss=[5.0, 2.0]), record(ROUNDING, loss=[5.02, 2.02])]
    assert verdicts(good) == []
    far = verdicts([*good, record("fsdp", loss=[5.06, 2.06])])
    assert far == ["fsdp: 0.0600 nats from bucketed's curve, noise is 0.0400"]
    assert any("did not fall" in problem for problem in verdicts([*good, record("flat", loss=[2.0, 5.0])]))
    killed = record(KILLED, loss=[5.0, 2.1])
    assert len(verdicts([*good, killed])) == 2  # not resumed, and different
    assert verdicts([*good, record(KILLED, loss=[2.01], first_step=1)]) == []
    cost = Record("train_curves", COST, {}, {"checkpoint_cost_pct": 7.0}, {}, None)
    assert "more than 5 %" in verdicts([cost])[0]


def test_nobody_is_killed_whom_nobody_starts_again():
    for variables in ({}, {"TORCHELASTIC_MAX_RESTARTS": "0"}):
        with pytest.raises(ValueError, match="--max-restarts 1"):
            check_restarts(("curves", "kill"), variables)
        check_restarts(("curves", "cost"), variables)
    check_restarts(("kill",), {"TORCHELASTIC_MAX_RESTARTS": "1"})


def test_a_cost_inside_the_noise_of_its_blocks_is_a_tie_and_no_mistake():
    noisy = Record("train_curves", COST, {}, {"checkpoint_cost_pct": 7.0, "noise_floor_pct": 20.0}, {}, None)
    assert verdicts([noisy]) == [] and cost_is_noise(noisy)
    quiet = Record("train_curves", COST, {}, {"checkpoint_cost_pct": 7.0, "noise_floor_pct": 2.0}, {}, None)
    assert len(verdicts([quiet])) == 1 and not cost_is_noise(quiet)
