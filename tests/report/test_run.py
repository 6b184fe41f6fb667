"""A run's folder fails early and clearly."""

import re

import pytest

from distlab.files import write_whole
from distlab.report import OutputFolder


def test_each_run_gets_its_own_folder(tmp_path):
    folders = [OutputFolder(tmp_path, "ddp_bench").path for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(re.fullmatch(r"\d{8}-\d{6}(-\d+)?", folder.name) for folder in folders)
    assert all(folder.parent == tmp_path / "ddp_bench" and not list(folder.iterdir()) for folder in folders)


def test_a_given_stamp_is_joined(tmp_path):
    write_whole(OutputFolder(tmp_path, "sweep", "first").path / "a.txt", "µs")
    assert (OutputFolder(tmp_path, "sweep", "first").path / "a.txt").read_text(encoding="utf-8") == "µs"


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.ddp_bench.*--out"):
        OutputFolder(tmp_path / "file", "ddp_bench")


@pytest.mark.parametrize(
    "experiment, stamp", [("", None), ("a/b", None), ("..", None), ("a", "x/y"), ("a", "")]
)
def test_names_that_leave_the_folder_are_refused(tmp_path, experiment, stamp):
    with pytest.raises(ValueError, match="cannot name a folder"):
        OutputFolder(tmp_path, experiment, stamp)
