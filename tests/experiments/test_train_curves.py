"""All strategies' loss curves and a killed run, as the command runs them."""

import pytest

from distlab.report import Record, read_json
from experiments.train_curves import (
    KILLED,
    MUON,
    REFERENCE,
    ROUNDING,
    check_restarts,
    verdicts,
)
from tests.commands import python
from tests.experiments.frame import refused

ARGUMENTS = [
    *("--backend=gloo", "--steps=14", "--batch=4", "--context=16"),
    *("--strategies=zero1,fsdp", "--timeout=15"),
]


def test_one_command_trains_kills_resumes_and_compares(tmp_path):
    text = tmp_path / "song.txt"
    text.write_text("na na na na, hey hey hey, good bye. " * 40)
    command = ["-m", "launch", "run", "train_curves", "--nproc=2", "--max-restarts=1"]
    done = python(*command, *ARGUMENTS, f"--text={text}", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "rank 1 kills itself" in done.stderr and "zero1: has its record" in done.stderr
    (folder,) = (tmp_path / "train_curves").iterdir()  # one for both attempts
    records = {record.variant: record for record in read_json(folder / "records.json")}
    assert set(records) == {REFERENCE, "zero1", "fsdp", ROUNDING, MUON, KILLED}
    killed = records[KILLED].metrics
    # Killed after step 7: the checkpoint of step 6, written meanwhile, may not be whole yet.
    assert killed["first_step"] in (3, 6) and killed["mean_abs_loss_diff"] == 0
    assert len(records["fsdp"].metrics["loss"]) == 14 == len(killed["loss"]) + killed["first_step"]
    assert verdicts(list(records.values())) == []
    assert (folder / "loss.png").stat().st_size > 10_000


def record(variant, **metrics):
    return Record(
        "train_curves", variant, {}, {"first_step": 0, "loss": [5.0, 2.0]} | metrics, {}, None
    )


def test_what_is_wrong_is_said():
    good = [record(REFERENCE, loss=[5.0, 2.0]), record(ROUNDING, loss=[5.02, 2.02])]
    assert verdicts(good) == []
    far = verdicts([*good, record("fsdp", loss=[5.06, 2.06])])
    assert far == ["fsdp: 0.0600 nats from bucketed's curve, noise is 0.0400"]
    # another optimizer, another curve
    assert verdicts([*good, record(MUON, loss=[5.5, 1.0])]) == []
    assert any(
        "did not fall" in problem for problem in verdicts([*good, record("flat", loss=[2.0, 5.0])])
    )
    killed = record(KILLED, loss=[5.0, 2.1])
    assert len(verdicts([*good, killed])) == 2  # not resumed, and different
    assert verdicts([*good, record(KILLED, loss=[2.01], first_step=1)]) == []


def test_nobody_is_killed_whom_nobody_starts_again():
    with pytest.raises(ValueError, match="--max-restarts 1"):
        check_restarts(("curves", "kill"), 0)
    check_restarts(("curves",), 0)
    check_restarts(("kill",), 1)


def test_restarts_by_torchrun_need_a_name(monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_MAX_RESTARTS": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert "needs a --name" in refused(capsys, "train_curves")
