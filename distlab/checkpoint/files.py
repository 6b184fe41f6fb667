"""Checkpoints as folders: whole or absent, checked by their own checksums, a few kept.

    checkpoints/
      step_00000050/        files of tensors, and checkpoint.json, the marker and index, which was written last
      step_00000100/
      .tmp-step_00000150/   being written, or left by a process that died; never read
      rejected-step_…/      found damaged when a run resumed from the one before; never read, never deleted

A checkpoint is written under a temporary name, every file and the folder are flushed to the disk,
and the folder is renamed. So a name that a reader looks at is that of a complete checkpoint,
whatever killed the writer; what a disk does to it later shows in the SHA-256 that the marker holds
for each file.

A marker is believed nothing: it may come from anywhere, with a checksum that fits. Every field is
checked for its form before any other file is opened, and what the fields say of each other must
agree. No file is executed or unpickled: the marker is JSON, and everything else is the raw bytes of
tensors (`distlab.checkpoint.tensors`).
"""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.files import AnyPath, digest_of, sync_folder
from distlab.parallel.shard import Box

Content = Mapping[str, Any]  # of a marker
FORMAT = 3
MARKER = "checkpoint.json"
_NAME = re.compile(r"step_(\d{8}|[1-9]\d{8,})", re.ASCII)
_FILE = re.compile(r"rank_\d+_\d+\.bin", re.ASCII)  # no way out of the folder
_KEY = re.compile(r"model/.+|optimizer/[^/]+/.+|rng/\d+/[^/]+", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}")
# A made-up marker could ask for any work and any memory by a number. These are far above what the
# largest run writes.
LARGEST_COUNT = 2**63 - 1  # of elements and bytes, as torch counts them
LARGEST_MARKER = 2**30  # bytes
MOST_DIMENSIONS = 64
MOST_BOXES = 1024  # of a tensor: ranks that share matrices, times the ranges that each of them has
LARGEST_GENERATOR = 2**16  # numbers of a random generator's state; torch's on the CPU has 5,056
# dtype → bytes per element
DTYPES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the message says which, on which rank, and why."""


class Damaged(ValueError):
    """A checkpoint that must not be loaded. The message names the file and the fault."""


class OtherFormat(ValueError):
    """A checkpoint of an earlier or later version of this program."""


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint.

    Attributes:
        path: folder of the checkpoint.
        step: number of optimizer steps done.
        content: fields of the marker: `world_size`, `strategy`, `optimizer`, `groups`, `extra`,
            `files` (name → size and SHA-256) and `tensors` (the index, see
            `distlab.checkpoint.tensors`).
    """

    path: Path
    step: int
    content: Content


class CheckpointFolder:
    """The checkpoints of one run. Only one rank calls what writes.

    Args:
        path: made when the first checkpoint is written.
    """

    def __init__(self, path: AnyPath):
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint of a final name, newest first; nothing is opened."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(
            (int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True
        )

    def path_of(self, step: int) -> Path:
        """Return the folder of a complete checkpoint of that step."""
        return self.path / _name_of(step)

    def temporary_path_of(self, step: int) -> Path:
        """Return the folder in which a checkpoint of that step is written."""
        return self.path / f".tmp-{self.path_of(step).name}"

    # -- writing -------------------------------------------------------------------------------------------

    def clean(self) -> list[str]:
        """Remove what dead writers left; returns the names."""
        left = sorted(self.path.glob(".tmp-*")) if self.path.is_dir() else []
        for folder in left:
            _remove(folder)
        return [folder.name for folder in left]

    def begin(self, step: int) -> Path:
        """Make an empty temporary folder for the files of all ranks."""
        temporary = self.temporary_path_of(step)
        _remove(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, step: int, content: Content) -> Path:
        """Write the marker and give the folder its final name."""
        temporary, final = self.temporary_path_of(step), self.path_of(step)
        body = {"format": FORMAT, "step": step, **content}
        check_marker(body, final.name)  # what is wrong now could not be read again
        body["digest"] = digest_of(body)
        text = json.dumps(body)
        too_large = f"its marker would have {len(text)} bytes, more than {LARGEST_MARKER}"
        _require(len(text) <= LARGEST_MARKER, too_large)
        with open(temporary / MARKER, "x", encoding="utf-8") as marker:
            marker.write(text)
            marker.flush()
            os.fsync(marker.fileno())
        sync_folder(temporary)
        aside = self.path / f".tmp-replaced-{final.name}"
        if final.exists():  # damaged, or the same step written again after a restart
            _remove(aside)
            final.rename(aside)
        temporary.rename(final)
        sync_folder(self.path)
        shutil.rmtree(aside, ignore_errors=True)
        return final

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is not used again. Return its path."""
        name = f"rejected-{_name_of(step)}"
        paths = (self.path / (name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
        aside = next(path for path in paths if not path.exists())
        self.path_of(step).rename(aside)
        return aside

    def prune(self, keep: int, known_good: Collection[int]) -> list[int]:
        """Delete checkpoints older than the `keep` newest good ones. Return the deleted steps.

        Args:
            keep: number, at least one.
            known_good: steps whose checkpoints were written, or checked in full, by this run.
                Others do not count: one that is damaged unseen must not be what is kept.
        """
        kept, deleted = 0, []
        for step in self.steps():
            if kept == keep:
                # Renamed first: a deletion that is cut short must not leave half a checkpoint under
                # its name.
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
            Damaged: there is none, or it is not what `commit` writes. OtherFormat: of another
                version.
        """
        path = self.path_of(step)
        marker = path / MARKER
        try:
            size = _size_of(marker)
            if size > LARGEST_MARKER:
                raise Damaged(
                    f"{marker} has {size} bytes, and no marker has more than {LARGEST_MARKER}"
                )
            content = json.loads(marker.read_text(encoding="utf-8"))
            intact = isinstance(content, dict) and content.pop("digest", None) == digest_of(content)
        except OSError as error:
            raise Damaged(
                f"{marker}: {error.strerror or error}: the checkpoint was not completed"
            ) from None
        except Damaged:
            raise
        except (ValueError, RecursionError):
            raise Damaged(f"{marker} is truncated or altered") from None
        version = content.get("format") if isinstance(content, dict) else None
        if not _is_count(version):
            raise Damaged(f"{marker} is not a marker of this program")
        if version != FORMAT:
            what = "start over with --fresh, or use the version that wrote it"
            what = "update distlab" if version > FORMAT else what
            raise OtherFormat(
                f"{path} has checkpoint format {version}, this version reads {FORMAT}: {what}"
            )
        if not intact:
            raise Damaged(f"{marker} was altered: its own checksum does not match")
        try:
            check_marker(content, path.name)
        except ValueError as error:
            raise Damaged(f"{marker} is not a marker of this program: {error}") from None
        return Stored(path, content["step"], content)


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link as far as possible. The target of a link stays."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _name_of(step: int) -> str:
    return f"step_{step:08d}"


def check_marker(content: Content, folder: str) -> None:
    """Check the form of every field, and what fields say of each other.

    Args:
        folder: name of the checkpoint's folder, with which the step must agree.

    Raises:
        ValueError: a field is wrong. The message says how.
    """
    for name, (has_form, form) in _FORMS.items():
        _require(name in content, f"'{name}' is missing")
        _require(has_form(content[name]), f"'{name}' is not {form}")
    _require(folder == _name_of(content["step"]), f"it says step {content['step']}")
    files, tensors = content["files"], content["tensors"]
    for name, entry in files.items():
        _require(_FILE.fullmatch(name), f"it names a file {name!r}, which no checkpoint has")
        _require(_is_file(entry), f"what it says of {name} is not a size and checksum")
    for key, entry in tensors.items():
        _require(_KEY.fullmatch(key), f"it names a tensor {key!r}, which no checkpoint has")
        _check_tensor(key, entry, files)
    _check_places(files, tensors)
    for key, entry in tensors.items():
        if key.startswith("optimizer/"):
            kind, parameter = key.split("/", 2)[1:]
            whole = tensors.get(f"model/{parameter}")
            _require(whole is not None, f"it has {kind} of {parameter}, and no such parameter")
            fits = entry["shape"] == whole["shape"] or math.prod(entry["shape"]) == 1
            _require(fits, f"{key} has shape {entry['shape']}, and the parameter {whole['shape']}")
    _check_generators(tensors, content["world_size"])


def _check_generators(tensors: Content, world_size: int) -> None:
    """Check that each rank that wrote the checkpoint, and no other, has random generators.

    Their states have the size of one.
    """
    ranks = set()
    for key, entry in tensors.items():
        if key.startswith("rng/"):
            shape = entry["shape"]
            fits = len(shape) == 1 and shape[0] <= LARGEST_GENERATOR
            _require(fits, f"{key} has shape {shape}, which the state of no random generator has")
            ranks.add(int(key.split("/")[1]))
    # Without range(world_size), which a made-up number would make as long as it says.
    complete = len(ranks) == world_size and max(ranks, default=0) == world_size - 1
    shown = f"{sorted(ranks)}"
    if len(ranks) > 16:
        shown = f"{min(ranks)} to {max(ranks)} ({len(ranks)} of them)"
    _require(complete, f"it has the generators of ranks {shown}, and {world_size} ranks wrote it")


def _check_tensor(key: str, entry: Any, files: Content) -> None:
    """Check the form of an index entry, and that its parts cover all of its elements in order."""
    whole = isinstance(entry, dict) and entry.keys() == {"shape", "dtype", "parts"}
    _require(whole, f"what it says of {key} is not a shape, dtype and parts")
    shape, dtype, parts = entry["shape"], entry["dtype"], entry["parts"]
    _require(
        isinstance(shape, list) and all(map(_is_count, shape)), f"the shape of {key} is {shape!r}"
    )
    _require(len(shape) <= MOST_DIMENSIONS, f"{key} has {len(shape)} dimensions")
    known = isinstance(dtype, str) and dtype in DTYPES
    _require(known, f"the dtype of {key} is {dtype!r}; allowed: {', '.join(DTYPES)}")
    form = "lists of first element, elements, file and offset, and perhaps a box"
    fit = isinstance(parts, list) and all(_is_part(part, shape) for part in parts)
    _require(fit, f"the parts of {key} are not {form}")
    covered = {}  # of each box, how many elements
    for start, count, name, _, *cut in parts:
        box = tuple(map(tuple, cut[0])) if cut else tuple((0, size) for size in shape)
        _require(
            name in files, f"{key} is stored in {name!r}, which is not a file of this checkpoint"
        )
        _require(
            start == covered.get(box, 0),
            f"{key} has a hole or an overlap at element {covered.get(box, 0)}",
        )
        covered[box] = start + count
    for box, elements in covered.items():
        size = math.prod(last - first for first, last in box)
        _require(elements == size, f"{key} has {elements} of {size} elements")
    _check_boxes(key, list(covered))
    total = sum(covered.values())
    _require(total == math.prod(shape), f"{key} has {total} of {math.prod(shape)} elements")


def _check_boxes(key: str, boxes: Sequence[Box]) -> None:
    """Check that boxes do not overlap.

    A tensor is cut along one dimension, in which they are ranges of one line.
    """
    too_many = f"{key} has {len(boxes)} boxes, and no tensor has more than {MOST_BOXES}"
    _require(len(boxes) <= MOST_BOXES, too_many)
    if len(boxes) < 2:
        return
    by_dimension = zip(*boxes, strict=True)
    cut = [ranges for ranges in by_dimension if len(set(ranges)) > 1]
    several = f"{key} has boxes that are cut along {len(cut)} dimensions, and not along one"
    _require(len(cut) == 1, several)
    ranges = sorted(cut[0])
    for (_, last), (first, _) in itertools.pairwise(ranges):
        _require(last <= first, f"{key} has boxes that overlap")


def _check_places(files: Content, tensors: Content) -> None:
    """Check that the parts tile each file: inside it, without overlaps, and without gaps."""
    ends = dict.fromkeys(files, 0)
    places = [
        (name, offset, count * DTYPES[entry["dtype"]], key)
        for key, entry in tensors.items()
        for _, count, name, offset, *_ in entry["parts"]
    ]
    for name, offset, size, key in sorted(places):
        _require(
            offset == ends[name],
            f"{name} has a gap or an overlap at byte {ends[name]}, before {key}",
        )
        ends[name] += size
    for name, end in ends.items():
        size = files[name]["bytes"]
        _require(end == size, f"{name} has {size} bytes, and tensors of {end}")


def _require(condition: Any, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _is_part(value: Any, shape: Sequence[int]) -> bool:
    """Return whether a value is [first element, elements, file, offset] with an optional box."""
    fits = isinstance(value, list) and len(value) in (4, 5) and isinstance(value[2], str)
    counts = fits and all(map(_is_count, (*value[:2], value[3]))) and value[1] > 0
    return counts and (len(value) == 4 or _is_box(value[4], shape))


def _is_box(value: Any, shape: Sequence[int]) -> bool:
    if not (isinstance(value, list) and len(value) == len(shape)):
        return False
    pairs = all(
        isinstance(each, list) and len(each) == 2 and all(map(_is_count, each)) for each in value
    )
    return pairs and all(
        first < last <= size for (first, last), size in zip(value, shape, strict=True)
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_group(value: Any) -> bool:
    names = value.get("params") if isinstance(value, dict) else None
    return isinstance(names, list) and all(map(_is_text, names))


def _is_file(value: Any) -> bool:
    digest = value.get("sha256") if isinstance(value, dict) else None
    return (
        isinstance(digest, str)
        and bool(_SHA256.fullmatch(digest))
        and _is_count(value.get("bytes"))
    )


_FORMS = {
    "step": (_is_count, "a whole number"),
    "world_size": (lambda v: _is_count(v) and v > 0, "a number of ranks"),
    "strategy": (_is_text, "a name"),
    "torch": (_is_text, "a version"),
    "optimizer": (_is_text, "a name"),
    "groups": (
        lambda v: isinstance(v, list) and v and all(map(_is_group, v)),
        "a list of parameter groups",
    ),
    "extra": (lambda v: isinstance(v, dict), "a table"),
    "files": (lambda v: isinstance(v, dict) and v, "a table of files"),
    "tensors": (lambda v: isinstance(v, dict) and v, "a table of tensors"),
}


def check_files(stored: Stored, rank: int = 0, world_size: int = 1) -> None:
    """Check that every file has its size, and that this rank's share of them has its hash.

    Raises:
        Damaged: the first file that differs.
    """
    check_sizes(stored)
    for name, written in sorted(stored.content["files"].items())[rank::world_size]:
        path = stored.path / name
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        if found != written["sha256"]:
            raise Damaged(f"{path} was altered: its checksum does not match what was written")


def check_sizes(stored: Stored) -> None:
    """Every file is there and as long as it was; cheap. Raises Damaged."""
    for name, written in stored.content["files"].items():
        try:
            size = _size_of(stored.path / name)
        except OSError as error:
            raise Damaged(f"{stored.path / name}: {error.strerror or error}") from None
        if size != written["bytes"]:
            raise Damaged(f"{stored.path / name} has {size} bytes instead of {written['bytes']}")


def _size_of(path: Path) -> int:
    """Return the bytes of a regular file. Raise OSError for anything else.

    Opening a pipe would wait, and a link leads elsewhere.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")
    return found.st_size
