"""Data that a run cannot use, and the journal of a run."""

from pathlib import Path

import pytest

from distlab.comm import RankContext
from distlab.report import OutputFolder
from distlab.testing import run_ranks
from distlab.train.journal import Journal, read_journal
from experiments.training import DataConfig, Training
from tests.train.cases import tiny


def refused(context: RankContext, root: str) -> None:
    for path, changes, message in (
        (f"{root}/short.txt", {}, "too few for one window"),
        (f"{root}/none.txt", {}, "No such file"),
        (None, {"batch": 5}, "a batch of 5 sequences cannot be divided among 2 ranks"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            Training(
                tiny(vocab=None, **changes), DataConfig(path), context, OutputFolder(root, "train", "run")
            )


def test_unusable_data_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "short.txt").write_text("hello")
    run_ranks(refused, 2, str(tmp_path))


def test_a_journal_forgets_what_a_lost_run_wrote_and_a_line_cut_short(tmp_path):
    path = Path(tmp_path / "metrics.jsonl")
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    journal = Journal(path, first_step=2)
    journal.write({"step": 2, "loss": 1.5})
    journal.close()
    assert read_journal(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.5}]
