"""Checkpoints as folders: whole or absent, checked by their own checksums, a few kept.

    checkpoints/
      step_00000050/        rank files, DCP's .metadata, and checkpoint.json, the marker, which was written last
      step_00000100/
      .tmp-step_00000150/   being written, or left by a process that died; never read
      rejected-step_…/      found damaged when a run resumed from the one before; never read, never deleted

A checkpoint is written under a temporary name, every file and the folder are flushed to the disk, and the folder
is renamed. So a name that a reader looks at is that of a complete checkpoint, whatever killed the writer; what a
disk does to it later shows in the SHA-256 that the marker holds for each file.

A marker is believed nothing: it may come from anywhere, with a checksum that fits. Every field is checked for its
form before any other file is opened, and what the fields say of each other must agree.
"""

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2
MARKER = "checkpoint.json"
METADATA = ".metadata"  # DCP's index
_NAME = re.compile(r"step_(\d{8,})", re.ASCII)
_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp", re.ASCII)  # what DCP calls them; no way out of the folder
_KEY = re.compile(r"model/.+|optimizer/[^/]+/.+|rng/\d+/[^/]+", re.ASCII)


class Damaged(ValueError):
    """A checkpoint that must not be loaded; the message names the file and what is wrong with it."""


class OtherFormat(ValueError):
    """A checkpoint of another version of this program."""


class FormatIsNewer(OtherFormat):
    """A checkpoint of a later version of this program."""


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        content: what the marker says: `world_size`, `strategy`, `tensors` (key → shape), `groups`, `extra`, `files`.
    """

    path: Path
    step: int
    content: Mapping[str, Any]


class CheckpointFolder:
    """The checkpoints of one run. Only one rank calls what writes.

    Args:
        path: made when the first checkpoint is written.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint of a final name, newest first; nothing is opened."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        steps = {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
        return sorted((step for name, step in steps.items() if name == _name_of(step)), reverse=True)

    def path_of(self, step: int) -> Path:
        """The folder of a complete checkpoint of that step."""
        return self.path / _name_of(step)

    def temporary_path_of(self, step: int) -> Path:
        """The folder in which a checkpoint of that step is written."""
        return self.path / f".tmp-{self.path_of(step).name}"

    # -- writing -------------------------------------------------------------------------------------------

    def clean(self) -> list[str]:
        """Remove what dead writers left; returns the names."""
        left = sorted(self.path.glob(".tmp-*")) if self.path.is_dir() else []
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        return [folder.name for folder in left]

    def begin(self, step: int) -> Path:
        """An empty temporary folder for the files of all ranks."""
        temporary = self.temporary_path_of(step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, step: int, content: Mapping[str, Any]) -> Path:
        """Write the marker and give the folder its final name."""
        temporary, final = self.temporary_path_of(step), self.path_of(step)
        body = {"format": FORMAT, "step": step, **content}
        body["digest"] = digest_of(body)
        with open(temporary / MARKER, "x", encoding="utf-8") as marker:
            json.dump(body, marker, indent=1)
            marker.flush()
            os.fsync(marker.fileno())
        sync_folder(temporary)
        if final.exists():  # damaged, or the same step written again after a restart
            aside = self.path / f".tmp-replaced-{final.name}"
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        temporary.rename(final)
        sync_folder(self.path)
        shutil.rmtree(self.path / f".tmp-replaced-{final.name}", ignore_errors=True)
        return final

    def abandon(self, step: int) -> None:
        """Delete what was written of a checkpoint that was not completed."""
        shutil.rmtree(self.temporary_path_of(step), ignore_errors=True)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint so that it is neither read nor counted again; returns where it is."""
        names = [
            f"rejected-{self.path_of(step).name}{suffix}"
            for suffix in ("", *(f"-{n}" for n in range(2, 100)))
        ]
        aside = next(path for name in names if not (path := self.path / name).exists())
        self.path_of(step).rename(aside)
        return aside

    def prune(self, keep: int, known_good: Collection[int]) -> list[int]:
        """Delete what is older than the `keep` newest checkpoints that are known to be good; returns the steps deleted.

        Args:
            keep: at least one.
            known_good: steps whose checkpoints were written, or checked in full, by this run. Others do not count:
                one that is damaged unseen must not be what is kept.
        """
        kept, deleted = 0, []
        for step in self.steps():
            if kept == keep:
                # Renamed first: a deletion that is cut short must not leave half a checkpoint under its name.
                doomed = self.path / f".tmp-deleted-{self.path_of(step).name}"
                self.path_of(step).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                deleted.append(step)
            elif step in known_good:
                kept += 1
        return deleted

    # -- reading -------------------------------------------------------------------------------------------

    def open(self, step: int) -> Stored:
        """Read the marker.

        Raises:
            Damaged: there is none, or it is not what `commit` writes. OtherFormat: of another version.
        """
        return open_checkpoint(self.path_of(step))


def _name_of(step: int) -> str:
    return f"step_{step:08d}"


def open_checkpoint(path: Path) -> Stored:
    """Read the marker of the checkpoint in this folder, and no other file; raises as `CheckpointFolder.open`."""
    marker = path / MARKER
    try:
        _size_of(marker)
        content = json.loads(marker.read_text(encoding="utf-8"))
        intact = isinstance(content, dict) and content.pop("digest", None) == digest_of(content)
    except OSError as error:
        raise Damaged(f"{marker}: {error.strerror or error}: the checkpoint was not completed") from None
    except (ValueError, RecursionError):
        raise Damaged(f"{marker} is truncated or altered") from None
    version = content.get("format") if isinstance(content, dict) else None
    if _is_count(version) and version != FORMAT:
        kind, what = (
            (FormatIsNewer, "update distlab")
            if version > FORMAT
            else (OtherFormat, "begin anew with --fresh, or use the version that wrote it")
        )
        raise kind(f"{path} has checkpoint format {version}, this version reads {FORMAT}: {what}")
    if not _is_count(version):
        raise Damaged(f"{marker} is not a marker of this program")
    if not intact:
        raise Damaged(f"{marker} was altered: its own checksum does not match")
    problem = problem_of_marker(content, path.name)
    if problem is not None:
        raise Damaged(f"{marker} is not a marker of this program: {problem}")
    return Stored(path, content["step"], content)


def problem_of_marker(content: Mapping[str, Any], folder: str) -> str | None:
    """What is wrong with the content of a marker, or None.

    Args:
        folder: name of the checkpoint's folder, which the step must agree with.
    """
    forms = {
        "step": (_is_count, "a whole number"),
        "world_size": (lambda v: _is_count(v) and v > 0, "a number of ranks"),
        "strategy": (lambda v: isinstance(v, str), "a name"),
        "torch": (lambda v: isinstance(v, str), "a version"),
        "optimizer": (lambda v: isinstance(v, str), "a name"),
        "groups": (lambda v: _is_filled(v, list) and all(map(_is_group, v)), "a list of parameter groups"),
        "extra": (lambda v: isinstance(v, dict), "a table"),
        "files": (lambda v: _is_filled(v, dict), "a table of files"),
        "tensors": (lambda v: _is_filled(v, dict), "a table of shapes"),
    }
    for name, (has_form, form) in forms.items():
        if name not in content:
            return f"'{name}' is missing"
        if not has_form(content[name]):
            return f"'{name}' is not {form}"
    if folder != _name_of(content["step"]):
        return f"it says step {content['step']}"
    for name, entry in content["files"].items():
        if not _FILE.fullmatch(name):
            return f"it names a file {name!r}, which no checkpoint has"
        if (
            not isinstance(entry, dict)
            or not _is_count(entry.get("bytes"))
            or not _is_sha256(entry.get("sha256"))
        ):
            return f"what it says of {name} is no size and checksum"
    if METADATA not in content["files"]:
        return f"it lists no {METADATA}"
    return _problem_of_tensors(content["tensors"], content["world_size"])


def _problem_of_tensors(tensors: Mapping[str, Any], world_size: int) -> str | None:
    for key, shape in tensors.items():
        if not _KEY.fullmatch(key):
            return f"it names a tensor {key!r}, which no checkpoint has"
        if not isinstance(shape, list) or not all(map(_is_count, shape)):
            return f"the shape of {key} is {shape!r}"
    for key, shape in tensors.items():
        if key.startswith("optimizer/"):
            kind, parameter = key.split("/", 2)[1:]
            whole = tensors.get(f"model/{parameter}")
            if whole is None:
                return f"it has {kind} of {parameter}, and no such parameter"
            if shape != whole and math.prod(shape) != 1:
                return f"{key} has shape {shape}, and the parameter {whole}"
    generators = {int(key.split("/")[1]) for key in tensors if key.startswith("rng/")}
    if generators != set(range(world_size)):
        return f"it has the generators of ranks {sorted(generators)}, and {world_size} ranks wrote it"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_filled(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and len(value) > 0


def _is_group(value: Any) -> bool:
    names = value.get("params") if isinstance(value, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a marker's content without its digest, in canonical JSON."""
    body = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def check_sizes(stored: Stored) -> None:
    """Every file is there and as long as it was; cheap. Raises Damaged."""
    for name, expected in stored.content["files"].items():
        try:
            size = _size_of(stored.path / name)
        except OSError as error:
            raise Damaged(f"{stored.path / name}: {error.strerror or error}") from None
        if size != expected["bytes"]:
            raise Damaged(f"{stored.path / name} has {size} bytes instead of {expected['bytes']}")


def _size_of(path: Path) -> int:
    """Bytes of a regular file; OSError for anything else: opening a pipe would wait, a link leads elsewhere."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")
    return found.st_size


def check_contents(stored: Stored, rank: int = 0, world_size: int = 1) -> None:
    """This rank's share of the files hashes to what was written. Raises Damaged."""
    for name in sorted(stored.content["files"])[rank::world_size]:
        path = stored.path / name
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        if found != stored.content["files"][name]["sha256"]:
            raise Damaged(f"{path} was altered: its checksum does not match what was written")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (names, renames) to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
