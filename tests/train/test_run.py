"""A run in its folder: one writer, the data that it was, its journal, and its record."""

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from distlab.checkpoint.lock import NAME, Holder
from distlab.cli_errors import message_of
from distlab.testing import run_ranks
from distlab.train.config import DataConfig
from distlab.train.data import DataChanged, TokenWindows
from distlab.train.loop import Outcome, Trainer
from distlab.train.metrics import Journal, read_journal
from distlab.train.run import train
from tests.train.cases import tiny


def run(context, folder, data=None, /, **changes):
    """Two steps, or a run of the same folder that goes on."""
    return run_and_measure(context, folder, data, **changes)[0]


def run_and_measure(me, folder, data=None, /, *, progress=lambda text: None, **changes):
    """How it ended, and the metrics of its results; None where they were written before."""
    config = tiny(
        **({"steps": 2, "validate_sequences": 4, "vocab": 31 if data is None else None} | changes)
    )
    folder, written = Path(folder), []
    folder.mkdir(exist_ok=True)

    def write_results(config, outcome, metrics, lines):
        written.append(metrics)
        (folder / "steps").write_text(str(metrics["steps"]))

    outcome = train(
        config,
        data or DataConfig(),
        me,
        folder,
        write_results=write_results,
        log_every=1,
        progress=progress,
        has_results=lambda steps: (
            (folder / "steps").exists() and (folder / "steps").read_text() == str(steps)
        ),
    )
    return outcome, written[0] if written else None


def refused(context, root):
    for path, changes, message in (
        (f"{root}/short.txt", {}, "too few for one window"),
        (
            f"{root}/two.txt",
            {},
            r"two.txt \(2 tokens, 0 of them to train on\): 0 tokens are too few",
        ),
        (
            f"{root}/one.txt",
            {},
            r"one.txt \(1 tokens, 0 of them to train on\): 0 tokens are too few",
        ),
        (f"{root}/none.txt", {}, "No such file"),
        (None, {"batch": 5}, "a batch of 5 sequences cannot be divided among 2 ranks"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            run(context, root, DataConfig(path), **changes)


def test_unusable_data_is_an_error_on_every_rank(tmp_path):
    """Each one gives its folder free again, or the next would be refused for another reason."""
    for name, text in (("short", "hello"), ("two", "ab"), ("one", "a")):
        (tmp_path / f"{name}.txt").write_text(text)
    run_ranks(refused, 2, str(tmp_path))
    with pytest.raises(ValueError, match=r"--val-data x\.txt needs --data"):
        DataConfig(val_data="x.txt")


# -- one writer ------------------------------------------------------------------------------------


def test_a_run_whose_folder_was_taken_over_writes_no_checkpoint_and_no_results(
    tmp_path, one_rank, monkeypatch
):
    live = tmp_path / "checkpoints" / ".tmp-step_00000002"  # of the run that has the folder now
    step = Trainer.one_step

    def taken_over(trainer):
        if trainer.step == 1:
            (tmp_path / NAME).write_text(json.dumps(asdict(Holder.me())))
            live.mkdir(parents=True)
        step(trainer)

    monkeypatch.setattr(Trainer, "one_step", taken_over)
    with pytest.raises(
        OSError, match=r"step 2 could not be written .*no longer this run's to write"
    ):
        run(one_rank, tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [live]
    assert not (tmp_path / "steps").exists() and (tmp_path / NAME).exists()


# -- the data is what it was -----------------------------------------------------------------------


def resume_with_changed_data(context, root):
    """A run of two steps, and what is said when it is to go on with other data."""
    text = Path(root, "text.txt")
    other = Path(root, "other.txt")
    folder = Path(root, "run")
    run(context, folder, DataConfig(str(text)))
    found = []

    def attempt(data):
        try:
            run(context, folder, data, steps=3)
            found.append("accepted")
        except ValueError as error:
            found.append(str(error))

    def rewrite():
        """A bit behind the first MiB."""
        if context.is_main:
            changed = bytearray(text.read_bytes())
            changed[1_100_000] ^= 1
            text.write_bytes(changed)
        context.group.barrier().wait()

    # all of the text would be trained on, what was held out too
    attempt(DataConfig(str(text), str(other)))
    rewrite()
    attempt(DataConfig(str(text)))
    rewrite()
    attempt(DataConfig(str(text)))
    with open(text, "ab") as file:
        file.write(b"more" if context.is_main else b"")
    context.group.barrier().wait()
    attempt(DataConfig(str(text)))
    return found


def test_a_run_goes_on_with_the_data_that_it_was_begun_with_or_not_at_all(tmp_path):
    """Other text of the same length; held-out text that would be trained on; more text."""
    (tmp_path / "text.txt").write_bytes(b"na na na na, hey hey hey, good bye. " * 35_000)  # 1.2 MiB
    (tmp_path / "other.txt").write_bytes(b"la la la la, " * 100)
    held_out, edited, same, longer = run_ranks(resume_with_changed_data, 2, str(tmp_path))[0]
    assert same == "accepted"
    for message in (held_out, edited, longer):
        assert "belongs to another run: data." in message and "\n" not in message
    assert (
        "data.validation is 'the last 63000 tokens' there and '1300 tokens of a file' here"
        in held_out
    )
    assert "data.trained_on is 1197000 there and 1260000 here" in held_out
    assert edited.count(" there and ") == 1 and "data.sha256 is" in edited
    assert "data.count is 1260000 there and 1260004 here" in longer


def test_validation_data_of_its_own_may_not_change_either(tmp_path, one_rank):
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_bytes(b"na na na na, hey hey hey, good bye. " * 10)
    other.write_bytes(b"la la la la, " * 10)
    data = DataConfig(str(text), str(other))
    run(one_rank, tmp_path / "run", data)
    other.write_bytes(other.read_bytes()[:-1] + b"?")
    with pytest.raises(
        ValueError, match=r"data.validation_sha256 is '\w{64}' there and '\w{64}' here"
    ):
        run(one_rank, tmp_path / "run", data, steps=3)


def read_while_it_changes(context, root, name, how):
    """What is said when the last rank's file changes, and the step at which a run with the old
    files goes on.
    """
    files = {name: Path(root, f"{name}-{context.rank}.txt") for name in ("text", "other")}
    before = b"na na na na, hey hey hey, good bye. " * 40
    for path in files.values():
        path.write_bytes(before)
    data = DataConfig(data=str(files["text"]), val_data=str(files["other"]))
    changes = context.rank + 1 == context.world_size
    one_step = Trainer.one_step
    save = Trainer.save
    rows = TokenWindows.rows

    def shrinks_after(action, step):
        def acts(trainer):
            action(trainer)
            if changes and trainer.step == step:
                os.truncate(files[name], 0)

        return acts

    def changes_below(windows, numbers):
        seen.append(windows.file[0])
        if changes and windows.file[0] == str(files[name]) and len(seen) > 3:
            files[name].write_bytes(before[::-1])
        return rows(windows, numbers)

    seen: list[str] = []
    if how == "in place":
        TokenWindows.rows = changes_below
    elif name == "text":
        Trainer.one_step = shrinks_after(one_step, 3)
    else:
        Trainer.save = shrinks_after(save, 6)
    try:
        with pytest.raises(DataChanged) as caught:
            run(context, root, data, steps=6)
    finally:
        Trainer.one_step = one_step
        Trainer.save = save
        TokenWindows.rows = rows
    for path in files.values():
        path.write_bytes(before)
    context.group.barrier().wait()
    return str(caught.value), run(context, root, data, steps=6).first_step


@pytest.mark.parametrize("name, good", [("text", 3), ("other", 6)], ids=["training", "validation"])
@pytest.mark.parametrize("how, ranks", [("shorter", 1), ("in place", 2)])
def test_data_that_changes_ends_the_run_with_a_checkpoint_of_the_last_good_step(
    tmp_path, name, good, how, ranks
):
    """A file that shrinks under a mapping ends the process with SIGBUS.

    Another text was trained on unnoticed.
    """
    for rank, (said, resumed) in enumerate(
        run_ranks(read_while_it_changes, ranks, str(tmp_path), name, how)
    ):
        assert resumed == good
        assert f"{name}-{rank}.txt was changed while this run read it; training stopped" in said
        assert f"The checkpoint of step {good} is good" in said
        assert (
            said.endswith("With the file as it was, the same command continues")
            and "\n" not in said
        )


def test_a_checkpoint_comes_before_the_validation_that_fails(tmp_path, one_rank, monkeypatch):
    def fails(trainer):
        trainer.checkpoints.wait()
        raise MemoryError(f"after the checkpoint of step {trainer.checkpoints.last_saved}")

    monkeypatch.setattr(Trainer, "validation_loss", fails)
    with pytest.raises(MemoryError, match="after the checkpoint of step 2"):
        run(one_rank, tmp_path)


# -- journal and record ----------------------------------------------------------------------------


def test_a_journal_forgets_what_a_lost_run_wrote_and_a_line_cut_short(tmp_path):
    path = Path(tmp_path / "metrics.jsonl")
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    journal = Journal(path, first_step=2)
    journal.write({"step": 2, "loss": 1.5})
    journal.close()
    assert (
        read_journal(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.5}] == journal.lines
    )


def test_a_full_disk_under_a_journal_is_named(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.close()
    journal._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    with pytest.raises(OSError) as caught:
        journal.write({"step": 1, "loss": 3.0})
    with suppress(OSError):
        journal.close()
    assert message_of(caught.value).startswith(
        "/dev/full: No space left on device: make room there"
    )


def test_what_is_no_line_of_a_journal_is_left_out(tmp_path):
    path = Path(tmp_path / "metrics.jsonl")
    path.write_bytes(
        b'7\n[]\n{"loss": 1.0}\n\xff\xfe\n{"step": "x", "loss": 1}\n{"step": 1, "loss": 3.0}\n'
        + b"[" * 10**5
    )
    assert read_journal(path) == [{"step": 1, "loss": 3.0}]


def test_a_run_that_died_before_its_results_writes_them_when_it_is_started_again(
    tmp_path, one_rank
):
    _, written = run_and_measure(one_rank, tmp_path, steps=4, checkpoint_every=1)
    (tmp_path / "steps").write_text("2")  # as if it had died behind its last checkpoint
    outcome, late = run_and_measure(one_rank, tmp_path, steps=4, checkpoint_every=1)
    assert outcome.first_step == outcome.last_step == 4
    for metric in ("steps", "final_loss", "validation_loss"):
        assert late[metric] == written[metric] is not None
    assert late["step_p50_ms"] > 0
    said: list[str] = []
    again, nothing = run_and_measure(
        one_rank, tmp_path, steps=4, checkpoint_every=1, progress=said.append
    )
    assert nothing is None and again == Outcome(4, 4, None, [])
    assert "this run is complete: 4 of 4 steps" in said[-1]
    assert NAME not in {path.name for path in tmp_path.iterdir()}


def test_what_does_not_fit_is_refused_before_anything_is_built_or_read(tmp_path, one_rank):
    """A context of 100,000,000 built for minutes without a line."""
    with pytest.raises(
        MemoryError,
        match=r"context 100,000,000 .* does not fit in the memory of cpu.* --context \d+",
    ):
        run(one_rank, tmp_path, context=100_000_000)
