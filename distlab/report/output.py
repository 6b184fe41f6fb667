"""Where results go: one folder per run, and files that are either whole or absent.

Every file is written under a temporary name in its final folder, flushed to the disk and then renamed. A
rename within one folder is atomic, so a reader (or a sweep that resumes) never finds half a file under a
final name, whatever killed the writer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from distlab.ending import results_go_to


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on a clean exit the file there becomes ``path``, else it is
    removed.

    The temporary name keeps the suffix, because libraries choose the format by it (``.png``, ``.gz``).

    Raises:
        OSError: the folder cannot be written, or nothing was written to the temporary path.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the platform lets a folder be opened (POSIX)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
