"""Files that are either whole or absent.

A file is written under a temporary name in its final folder, flushed to the disk and then renamed.
A rename within one folder is atomic, so a reader (or a sweep that resumes) never finds half a file
under a final name, whatever killed the writer.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

AnyPath = str | os.PathLike


@contextlib.contextmanager
def atomic_path(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``.

    On a clean exit the file there becomes ``path``, else it is removed.

    The temporary name keeps the suffix, because libraries choose the format by it (``.png``,
    ``.gz``).

    Raises:
        OSError: the folder cannot be written, or nothing was written to the temporary path.
    """
    path = Path(path)
    # The process is part of the name, so two writers do not share a temporary file.
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            # The data must be on the disk before the name is, or a power cut leaves an empty file.
            os.fsync(written.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # not every platform lets a folder be opened
            sync_folder(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: AnyPath, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def digest_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of plain values without their own `digest`, in canonical JSON."""
    body = {key: value for key, value in body.items() if key != "digest"}
    # Sorted keys and fixed separators give one text for equal values.
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (names, renames) to the disk, so that they survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
