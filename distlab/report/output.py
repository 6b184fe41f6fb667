"""Where results go: one folder per run."""

import contextlib
import itertools
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from distlab.ending import results_go_to


class OutputFolder:
    """The folder ``<root>/<experiment>/<stamp>/`` of one run, created at once so that a bad ``--out`` fails
    early.

    Args:
        root: the folder of all results, such as ``outputs``.
        experiment: name of the experiment.
        stamp: name of the run. None makes a fresh UTC ``YYYYmmdd-HHMMSS``, with ``-2``, ``-3``, … appended if
            a run of the same second exists. A stamp that is given is used as it is and may exist already:
            that is how a sweep resumes, and how the other ranks join the folder that rank 0 made.

    Attributes:
        path: the folder.

    Raises:
        ValueError: a name is not usable as a folder name.
        OSError: the folder cannot be made or written; the message names it and says to pass ``--out``.
    """

    def __init__(self, root: str | os.PathLike, experiment: str, stamp: str | None = None) -> None:
        for what, name in (("experiment", experiment), ("stamp", stamp)):
            if name is not None and (not name or name != Path(name).name or name == ".."):
                raise ValueError(f"{what} {name!r} cannot name a folder: use letters, digits, '-' and '_'")
        parent = Path(root) / experiment
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = _fresh_folder(parent) if stamp is None else parent / stamp
            self.path.mkdir(exist_ok=True)
            # Making the folder is not enough: an existing one may be read-only, and a full disk shows only
            # here.
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".tmp-probe-") as probe:
                probe.write(b"x")
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(
                f"results cannot be written under {parent} ({reason}): "
                "pass --out FOLDER with a folder that you can write to"
            ) from error
        results_go_to(self.path)


def _fresh_folder(parent: Path) -> Path:
    """Make and return a folder named after this second that no other run has."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()  # mkdir itself decides between two runs that race for one name
            return folder
    raise AssertionError("unreachable")
