"""A run in its folder: one writer, the data that it was, its journal, and its record."""

import functools
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distlab.checkpoint import lock as lock_module
from distlab.checkpoint.lock import NAME, FolderIsHeld, Holder, RunLock
from distlab.comm import RankContext
from distlab.report import OutputFolder, read_json
from distlab.testing import run_ranks
from distlab.train.journal import Journal, read_journal
from experiments.training import DataConfig, Training
from tests.train.cases import tiny


def training(context: RankContext, root: str | Path, data: DataConfig | None = None, **changes) -> Training:
    config = tiny(**({"steps": 2, "validate_sequences": 4, "vocab": 31 if data is None else None} | changes))
    return Training(config, data or DataConfig(), context, OutputFolder(root, "train", "run"))


def refused(context: RankContext, root: str) -> None:
    for path, changes, message in (
        (f"{root}/short.txt", {}, "too few for one window"),
        (f"{root}/two.txt", {}, r"two.txt \(2 tokens, 0 of them to train on\): 0 tokens are too few"),
        (f"{root}/one.txt", {}, r"one.txt \(1 tokens, 0 of them to train on\): 0 tokens are too few"),
        (f"{root}/none.txt", {}, "No such file"),
        (None, {"batch": 5}, "a batch of 5 sequences cannot be divided among 2 ranks"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            training(context, root, DataConfig(path), **changes)


def test_unusable_data_is_an_error_on_every_rank(tmp_path):
    """Each one gives its folder free again, or the next would be refused for another reason."""
    for name, text in (("short", "hello"), ("two", "ab"), ("one", "a")):
        (tmp_path / f"{name}.txt").write_text(text)
    run_ranks(refused, 2, str(tmp_path))
    with pytest.raises(ValueError, match=r"--val-data x\.txt needs --data"):
        DataConfig(validation="x.txt")


# -- one writer --------------------------------------------------------------------------------------------


def second_run(context: RankContext, root: str) -> str:
    with pytest.raises(FolderIsHeld) as caught:
        training(context, root)
    return str(caught.value)


def test_a_second_run_is_refused_on_every_rank_and_touches_nothing(tmp_path):
    folder = OutputFolder(tmp_path, "train", "run").path
    live = folder / "checkpoints" / ".tmp-step_00000007"
    live.mkdir(parents=True)
    first = RunLock(folder)
    assert first.try_take()
    messages = run_ranks(second_run, 2, str(tmp_path))
    assert messages[0] == messages[1] and "is being written by another run" in messages[0]
    assert {path.name for path in folder.iterdir()} == {"checkpoints", NAME} and live.exists()
    first.check()
    first.release()


def go_on_after_another_machine(context: RankContext, root: str) -> int:
    lock_module.RunLock = functools.partial(RunLock, stale_s=1.0)
    try:
        run = training(context, root)
    finally:
        lock_module.RunLock = RunLock
    run.close()
    return run.trainer.step


def test_a_run_of_a_machine_that_died_is_waited_for_and_then_taken_over(tmp_path):
    """Rank 0 of a restarted job may be on another machine than before."""
    folder = OutputFolder(tmp_path, "train", "run").path
    (folder / NAME).write_text(json.dumps(asdict(replace(Holder.me(), machine="other"))))
    assert run_ranks(go_on_after_another_machine, 2, str(tmp_path)) == [0, 0]
    assert list(folder.iterdir()) == []


def test_a_run_whose_folder_was_taken_over_writes_no_checkpoint_and_no_record(tmp_path, one_rank):
    run = training(one_rank, tmp_path)
    checkpoints = tmp_path / "train" / "run" / "checkpoints"
    live = checkpoints / ".tmp-step_00000002"  # of the run that has the folder now

    def taken_over() -> None:
        run.lock.path.write_text(json.dumps(asdict(Holder.me())))
        live.mkdir(parents=True)

    step = run.trainer.one_step
    run.trainer.one_step = lambda: (taken_over() if run.trainer.step == 1 else None, step())[1]
    with pytest.raises(OSError, match=r"step 2 could not be written .*no longer this run's to write"):
        run.run()
    assert list(checkpoints.iterdir()) == [live]
    assert not (tmp_path / "train" / "run" / "records.json").exists() and run.lock.path.exists()
    run.trainer.close()


# -- the data is what it was -------------------------------------------------------------------------------


def resume_with_changed_data(context: RankContext, root: str) -> list[str]:
    """A run of two steps, and what is said when it is to go on with other data."""
    text, other = Path(root, "text.txt"), Path(root, "other.txt")
    first = training(context, root, DataConfig(str(text)))
    first.run()
    first.close()
    found = []

    def attempt(data: DataConfig) -> None:
        run = training(context, root, data, steps=3)
        try:
            run.trainer.resume()
            found.append(f"resumed from step {run.trainer.step}")
        except ValueError as error:
            found.append(str(error))
        finally:
            run.close()

    def rewrite(place: int) -> None:
        if context.is_main:
            changed = bytearray(text.read_bytes())
            changed[place] ^= 1
            text.write_bytes(changed)
        context.group.barrier().wait()

    attempt(DataConfig(str(text)))
    attempt(DataConfig(str(text), str(other)))  # all of the text would be trained on, what was held out too
    for place in (-1, 1_100_000):  # in what is held out; behind the first MiB
        rewrite(place)
        attempt(DataConfig(str(text)))
        rewrite(place)
    with open(text, "ab") as file:
        file.write(b"more" if context.is_main else b"")
    context.group.barrier().wait()
    attempt(DataConfig(str(text)))
    return found


def test_a_run_goes_on_with_the_data_that_it_was_begun_with_or_not_at_all(tmp_path):
    """Other text of the same length, anywhere in the file; held-out text that would be trained on; more text."""
    (tmp_path / "text.txt").write_bytes(b"na na na na, hey hey hey, good bye. " * 35_000)  # 1.2 MiB
    (tmp_path / "other.txt").write_bytes(b"la la la la, " * 100)
    same, held_out, end, middle, longer = run_ranks(resume_with_changed_data, 2, str(tmp_path))[0]
    assert same == "resumed from step 2"
    for message in (held_out, end, middle, longer):
        assert "belongs to another run: data." in message and "\n" not in message
    assert "data.validation is 'the last 63000 tokens' there and '1300 tokens of a file' here" in held_out
    assert "data.trained_on is 1197000 there and 1260000 here" in held_out
    for message in (end, middle):
        assert message.count(" there and ") == 1 and "data.sha256 is" in message
    assert "data.count is 1260000 there and 1260004 here" in longer


def test_validation_data_of_its_own_may_not_change_either(tmp_path, one_rank):
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_bytes(b"na na na na, hey hey hey, good bye. " * 10)
    other.write_bytes(b"la la la la, " * 10)
    first = training(one_rank, tmp_path, DataConfig(str(text), str(other)))
    first.run()
    first.close()
    other.write_bytes(other.read_bytes()[:-1] + b"?")
    run = training(one_rank, tmp_path, DataConfig(str(text), str(other)))
    with pytest.raises(ValueError, match=r"data.validation_sha256 is '\w{64}' there and '\w{64}' here"):
        run.trainer.resume()
    run.close()


# -- journal and record ------------------------------------------------------------------------------------


def test_a_journal_forgets_what_a_lost_run_wrote_and_a_line_cut_short(tmp_path):
    path = Path(tmp_path / "metrics.jsonl")
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    journal = Journal(path, first_step=2)
    journal.write({"step": 2, "loss": 1.5})
    journal.close()
    assert read_journal(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.5}] == journal.lines


def test_what_is_no_line_of_a_journal_is_left_out(tmp_path):
    path = Path(tmp_path / "metrics.jsonl")
    path.write_bytes(
        b'7\n[]\n{"loss": 1.0}\n\xff\xfe\n{"step": "x", "loss": 1}\n{"step": 1, "loss": 3.0}\n' + b"[" * 10**5
    )
    assert read_journal(path) == [{"step": 1, "loss": 3.0}]


def test_the_record_is_of_this_run_whatever_stands_in_its_files(tmp_path, one_rank):
    """Another program's last line was once recorded as this run's loss."""
    run = training(one_rank, tmp_path, steps=2)
    report = run.trainer.report

    def report_and_disturb(step) -> None:
        report(step)
        with open(tmp_path / "train" / "run" / "metrics.jsonl", "a") as file:
            file.write('{"step": 99, "loss": 1234.5}\n')

    run.trainer.report = report_and_disturb
    _, record = run.run()
    run.close()
    assert 3 < record.metrics["final_loss"] < 4 and record.metrics["steps"] == 2


def test_a_run_that_died_before_its_record_writes_it_when_it_is_started_again(tmp_path, one_rank):
    def go(steps: int):
        run = training(one_rank, tmp_path, steps=steps, checkpoint_every=1)
        outcome, record = run.run()
        run.close()
        return outcome, record

    folder = tmp_path / "train" / "run"
    go(2)
    shutil.copytree(folder, tmp_path / "of-two-steps")
    outcome, written = go(4)
    for name in ("records.json", "report.html"):  # as if it had died behind its last checkpoint
        shutil.copy(tmp_path / "of-two-steps" / name, folder)
    outcome, late = go(4)
    assert outcome.first_step == outcome.last_step == 4
    for metric in ("steps", "final_loss", "validation_loss"):
        assert late.metrics[metric] == written.metrics[metric] is not None
    assert late.metrics["step_p50_ms"] > 0
    assert read_json(folder / "records.json")[0].metrics["steps"] == 4
    assert go(4)[1] is None  # it has its record
    (folder / "report.html").unlink()  # it died between the first file and the last
    assert go(4)[1] is not None and (folder / "report.html").exists()
    assert NAME not in {path.name for path in folder.iterdir()}


def test_what_does_not_fit_is_refused_before_anything_is_built_or_read(tmp_path, one_rank):
    """A context of 100,000,000 built for minutes without a line."""
    config = replace(tiny(), context=100_000_000)
    with pytest.raises(MemoryError, match=r"context 100,000,000 .* does not fit in the memory of cpu.* --context \d+"):
        Training(config, DataConfig(), one_rank, OutputFolder(tmp_path, "train", "run"))
