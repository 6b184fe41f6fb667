"""Checkpoints as folders: whole or absent, checked by their own checksums, a few kept.

    checkpoints/
      step_00000050/        rank files, DCP's .metadata, and checkpoint.json, the marker, which was written last
      step_00000100/
      .tmp-step_00000150/   being written, or left by a process that died; never read

A checkpoint is written under a temporary name, every file and the folder are flushed to the disk, and the folder
is renamed. So a name that a reader looks at is that of a complete checkpoint, whatever killed the writer; what a
disk does to it later shows in the SHA-256 that the marker holds for each file.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MARKER = "checkpoint.json"
_NAME = re.compile(r"step_(\d{8,})")


class Damaged(ValueError):
    """A checkpoint that must not be loaded; the message names the file and what is wrong with it."""


class FormatIsNewer(ValueError):
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
        return sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)

    def path_of(self, step: int) -> Path:
        """The folder of a complete checkpoint of that step."""
        return self.path / f"step_{step:08d}"

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

    def prune(self, keep: int) -> list[int]:
        """Delete all but the `keep` newest complete checkpoints; returns the steps deleted.

        One that is visibly damaged does not count as kept, so the last that can be loaded is never deleted.
        """
        kept, deleted = 0, []
        for step in self.steps():
            try:
                check_sizes(self.open(step))
            except (Damaged, FormatIsNewer):
                continue
            kept += 1
            if kept > keep:
                # Renamed first: a deletion that is cut short must not leave half a checkpoint under its name.
                doomed = self.path / f".tmp-deleted-{self.path_of(step).name}"
                self.path_of(step).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                deleted.append(step)
        return deleted

    # -- reading -------------------------------------------------------------------------------------------

    def open(self, step: int) -> Stored:
        """Read the marker.

        Raises:
            Damaged: there is none, or it is not what `commit` writes. FormatIsNewer: of a later version.
        """
        return open_checkpoint(self.path_of(step))


def open_checkpoint(path: Path) -> Stored:
    """Read the marker of the checkpoint in this folder; raises as `CheckpointFolder.open`."""
    marker = path / MARKER
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{marker}: {error.strerror or error}: the checkpoint was not completed") from None
    except ValueError:
        raise Damaged(f"{marker} is truncated or altered") from None
    version = content.get("format") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise FormatIsNewer(
            f"{path} has checkpoint format {version}, this version reads up to {FORMAT}: update distlab"
        )
    if version != FORMAT or not {"step", "files", "tensors", "digest"} <= content.keys():
        raise Damaged(f"{marker} is not a marker of this program")
    digest = content.pop("digest")
    if digest != digest_of(content):
        raise Damaged(f"{marker} was altered: its own checksum does not match")
    return Stored(path, content["step"], content)


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a marker's content without its digest, in canonical JSON."""
    body = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def check_sizes(stored: Stored) -> None:
    """Every file is there and as long as it was; cheap. Raises Damaged."""
    for name, expected in stored.content["files"].items():
        try:
            size = (stored.path / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{stored.path / name}: {error.strerror}") from None
        if size != expected["bytes"]:
            raise Damaged(f"{stored.path / name} has {size} bytes instead of {expected['bytes']}")


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
