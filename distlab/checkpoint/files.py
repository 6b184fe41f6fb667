"""Checkpoints as folders that are complete or absent, with checksums of all their files.

    checkpoints/
      step_00000050/        files of tensors, and checkpoint.json, the marker, which is written last
      step_00000100/
      .tmp-step_00000150/   being written, or left by a process that died; never read
      rejected-step_…/      found damaged when a run resumed from the previous checkpoint; never
                            read, never deleted

A checkpoint is written under a temporary name. Every file and the folder are flushed to the disk,
and then the folder is renamed. So a folder with a final name is a complete checkpoint, whatever
killed the writer. The marker has the SHA-256 of each file, which shows if a disk damages it later.

The marker also has the index of the tensors. It is not trusted, because it may come from anywhere,
with a checksum that fits. The form of every field is checked before any other file is opened, and
the fields must agree with each other. No file is executed or unpickled: the marker is JSON, and the
other files are the raw bytes of tensors (`distlab.checkpoint.tensors`).
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

Content = Mapping[str, Any]  # fields of a marker
FORMAT = 3  # version of the form of checkpoints
MARKER = "checkpoint.json"
# At least eight digits, and no zeros in front of more: one name for each step.
_NAME = re.compile(r"step_(\d{8}|[1-9]\d{8,})", re.ASCII)
_FILE = re.compile(r"rank_\d+_\d+\.bin", re.ASCII)  # cannot lead out of the folder
_KEY = re.compile(r"model/.+|optimizer/[^/]+/.+|rng/\d+/[^/]+", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}")
# Limits on the numbers in a marker. A forged marker could otherwise ask for any amount of work and
# memory. They are far above the numbers that the largest run writes.
LARGEST_COUNT = 2**63 - 1  # elements or bytes; torch counts them in int64
LARGEST_MARKER = 2**30  # bytes
MOST_DIMENSIONS = 64
MOST_BOXES = 1024  # per tensor: ranks that share matrices, times the ranges that each of them has
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
    """A checkpoint could not be written or read. The message says which, on which rank, and why."""


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
    """The checkpoints of one run. Only one rank calls the methods that write.

    Args:
        path: folder of the checkpoints. It is made when the first checkpoint is written.
    """

    def __init__(self, path: AnyPath):
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, newest first. Opens no file."""
        if not self.path.is_dir():
            return []
        found = []
        for entry in self.path.iterdir():
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                found.append(int(match[1]))
        return sorted(found, reverse=True)

    def path_of(self, step: int) -> Path:
        """Return the folder of a complete checkpoint of that step."""
        return self.path / _name_of(step)

    def temporary_path_of(self, step: int) -> Path:
        """Return the folder in which a checkpoint of that step is written."""
        return self.path / f".tmp-{self.path_of(step).name}"

    # -- writing -----------------------------------------------------------------------------------

    def clean(self) -> list[str]:
        """Remove the temporary folders of writers that died. Return their names."""
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
        """Write the marker and give the folder its final name. Return its path.

        Args:
            step: number of optimizer steps done.
            content: fields of the marker; see `Stored`.

        Raises:
            ValueError: a marker of this content could not be read again.
        """
        temporary = self.temporary_path_of(step)
        final = self.path_of(step)
        body = {"format": FORMAT, "step": step, **content}
        check_marker(body, final.name)
        # After the check and over all other fields. `open` takes it out again before it compares.
        body["digest"] = digest_of(body)
        text = json.dumps(body)
        too_large = f"its marker would have {len(text)} bytes, more than {LARGEST_MARKER}"
        _require(len(text) <= LARGEST_MARKER, too_large)
        with open(temporary / MARKER, "x", encoding="utf-8") as marker:
            marker.write(text)
            marker.flush()
            os.fsync(marker.fileno())
        # Names of files are entries of their folder. Without this flush a crash could leave it
        # without them.
        sync_folder(temporary)
        aside = self.path / f".tmp-replaced-{final.name}"
        if final.exists():  # damaged, or the same step written again after a restart
            _remove(aside)
            # A folder cannot be renamed onto one that is not empty.
            final.rename(aside)
        temporary.rename(final)
        sync_folder(self.path)
        shutil.rmtree(aside, ignore_errors=True)
        return final

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is not used again. Return its path."""
        name = f"rejected-{_name_of(step)}"
        aside = self.path / name
        number = 1
        while aside.exists():
            number += 1
            aside = self.path / f"{name}-{number}"
        self.path_of(step).rename(aside)
        return aside

    def prune(self, keep: int, known_good: Collection[int]) -> list[int]:
        """Delete checkpoints older than the `keep` newest good ones. Return the deleted steps.

        Args:
            keep: number of good checkpoints to keep, at least one.
            known_good: steps whose checkpoints were written, or checked in full, by this run. Other
                checkpoints do not count, because they may be damaged.
        """
        kept = 0
        deleted = []
        for step in self.steps():
            if kept == keep:
                # Renamed first, so that a deletion that is interrupted does not leave half a
                # checkpoint under a final name.
                doomed = self.path / f".tmp-deleted-{self.path_of(step).name}"
                self.path_of(step).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                deleted.append(step)
            elif step in known_good:
                kept += 1
        return deleted

    # -- reading -----------------------------------------------------------------------------------

    def open(self, step: int) -> Stored:
        """Read the marker of a checkpoint and check it.

        Raises:
            Damaged: the marker is missing, or `commit` has not written it in this form.
            OtherFormat: another version of this program wrote it.
        """
        path = self.path_of(step)
        marker = path / MARKER
        try:
            size = _size_of(marker)
            data = b"" if size > LARGEST_MARKER else marker.read_bytes()
        except OSError as error:
            raise Damaged(
                f"{marker}: {error.strerror or error}: the checkpoint was not completed"
            ) from None
        if size > LARGEST_MARKER:
            raise Damaged(
                f"{marker} has {size} bytes, and no marker has more than {LARGEST_MARKER}"
            )
        version = None
        intact = False
        try:
            content = json.loads(data.decode("utf-8"))
            if isinstance(content, dict):
                version = content.get("format")
                digest = content.pop("digest", None)
                intact = digest == digest_of(content)
        except (ValueError, RecursionError):
            raise Damaged(f"{marker} is truncated or altered") from None
        if not _is_count(version):
            raise Damaged(f"{marker} is not a marker of this program")
        if version != FORMAT:
            remedy = "start over with --fresh, or use the version that wrote it"
            if version > FORMAT:
                remedy = "update distlab"
            raise OtherFormat(
                f"{path} has checkpoint format {version}, this version reads {FORMAT}: {remedy}"
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
    """Check the form of every field of a marker, and that the fields agree with each other.

    Args:
        content: fields of the marker.
        folder: name of the checkpoint's folder. It must be that of the step.

    Raises:
        ValueError: a field is wrong. The message says how.
    """
    for name, (has_form, form) in _FORMS.items():
        _require(name in content, f"'{name}' is missing")
        _require(has_form(content[name]), f"'{name}' is not {form}")
    _require(folder == _name_of(content["step"]), f"it says step {content['step']}")
    files = content["files"]
    tensors = content["tensors"]
    for name, entry in files.items():
        _require(_FILE.fullmatch(name), f"it names a file {name!r}, which no checkpoint has")
        _require(_is_file(entry), f"what it says of {name} is not a size and checksum")
    for key, entry in tensors.items():
        _require(_KEY.fullmatch(key), f"it names a tensor {key!r}, which no checkpoint has")
        _check_tensor(key, entry, files)
    _check_places(files, tensors)
    for key, entry in tensors.items():
        if not key.startswith("optimizer/"):
            continue
        _, kind, parameter = key.split("/", 2)
        whole = tensors.get(f"model/{parameter}")
        _require(whole is not None, f"it has {kind} of {parameter}, and no such parameter")
        is_per_element = entry["shape"] == whole["shape"]
        is_one_number = math.prod(entry["shape"]) == 1
        _require(
            is_per_element or is_one_number,
            f"{key} has shape {entry['shape']}, and the parameter {whole['shape']}",
        )
    _check_generators(tensors, content["world_size"])


def _check_generators(tensors: Content, world_size: int) -> None:
    """Check that exactly the ranks that wrote the checkpoint have random generators.

    Their states must have a size that a random generator can have.

    Raises:
        ValueError: other ranks, or another size.
    """
    ranks = set()
    for key, entry in tensors.items():
        if not key.startswith("rng/"):
            continue
        shape = entry["shape"]
        fits = len(shape) == 1 and shape[0] <= LARGEST_GENERATOR
        _require(fits, f"{key} has shape {shape}, which the state of no random generator has")
        _, rank, _ = key.split("/")
        ranks.add(int(rank))
    # Not compared with range(world_size), because a forged number would make it too long.
    complete = len(ranks) == world_size and max(ranks, default=0) == world_size - 1
    shown = f"{sorted(ranks)}"
    if len(ranks) > 16:
        shown = f"{min(ranks)} to {max(ranks)} ({len(ranks)} of them)"
    _require(complete, f"it has the generators of ranks {shown}, and {world_size} ranks wrote it")


def _check_tensor(key: str, entry: Any, files: Content) -> None:
    """Check the form of an index entry, and that its parts cover all of its elements in order.

    Args:
        key: name of the tensor.
        entry: value of the index.
        files: files of the checkpoint.

    Raises:
        ValueError: the entry is wrong. The message says how.
    """
    has_form = isinstance(entry, dict) and entry.keys() == {"shape", "dtype", "parts"}
    _require(has_form, f"what it says of {key} is not a shape, dtype and parts")
    shape = entry["shape"]
    dtype = entry["dtype"]
    parts = entry["parts"]
    is_shape = isinstance(shape, list) and all(_is_count(size) for size in shape)
    _require(is_shape, f"the shape of {key} is {shape!r}")
    _require(len(shape) <= MOST_DIMENSIONS, f"{key} has {len(shape)} dimensions")
    known = isinstance(dtype, str) and dtype in DTYPES
    _require(known, f"the dtype of {key} is {dtype!r}; allowed: {', '.join(DTYPES)}")
    form = "lists of first element, elements, file and offset, and perhaps a box"
    fit = isinstance(parts, list) and all(_is_part(part, shape) for part in parts)
    _require(fit, f"the parts of {key} are not {form}")
    whole = tuple((0, size) for size in shape)
    covered: dict[Box, int] = {}  # box → number of its elements that the parts so far cover
    for part in parts:
        start, count, name = part[:3]
        box = box_of(part, whole)
        _require(
            name in files, f"{key} is stored in {name!r}, which is not a file of this checkpoint"
        )
        expected = covered.get(box, 0)
        _require(start == expected, f"{key} has a hole or an overlap at element {expected}")
        covered[box] = start + count
    for box, elements in covered.items():
        size = math.prod(last - first for first, last in box)
        _require(elements == size, f"{key} has {elements} of {size} elements")
    _check_boxes(key, list(covered))
    total = sum(covered.values())
    _require(total == math.prod(shape), f"{key} has {total} of {math.prod(shape)} elements")


def box_of(part: Sequence[Any], whole: Box) -> Box:
    """Return the box of a part in the index: its fifth item, or the whole tensor without one."""
    if len(part) == 4:
        return whole
    return tuple(tuple(each) for each in part[4])


def _check_boxes(key: str, boxes: Sequence[Box]) -> None:
    """Check that the boxes of a tensor do not overlap.

    Raises:
        ValueError: they overlap, are too many, or are cut along several dimensions.
    """
    too_many = f"{key} has {len(boxes)} boxes, and no tensor has more than {MOST_BOXES}"
    _require(len(boxes) <= MOST_BOXES, too_many)
    if len(boxes) < 2:
        return
    # A tensor is cut along one dimension. In all others the boxes have the same range.
    by_dimension = zip(*boxes, strict=True)
    cut = [ranges for ranges in by_dimension if len(set(ranges)) > 1]
    several = f"{key} has boxes that are cut along {len(cut)} dimensions, and not along one"
    _require(len(cut) == 1, several)
    ranges = sorted(cut[0])
    for (_, last), (first, _) in itertools.pairwise(ranges):
        _require(last <= first, f"{key} has boxes that overlap")


def _check_places(files: Content, tensors: Content) -> None:
    """Check that the parts tile each file: inside it, without overlaps, and without gaps.

    Raises:
        ValueError: a file has other bytes than those of its parts.
    """
    places = []  # file, first byte, bytes and tensor of each part
    for key, entry in tensors.items():
        bytes_per_element = DTYPES[entry["dtype"]]
        for _, count, name, offset, *_ in entry["parts"]:
            places.append((name, offset, count * bytes_per_element, key))
    ends = dict.fromkeys(files, 0)  # first byte of each file that the parts so far do not cover
    # By file, and by offset inside it: each part must begin where the one before it ends.
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
    if not isinstance(value, list) or len(value) not in (4, 5):
        return False
    start, count, file, offset = value[:4]
    if not isinstance(file, str):
        return False
    if not (_is_count(start) and _is_count(count) and _is_count(offset) and count > 0):
        return False
    return len(value) == 4 or _is_box(value[4], shape)


def _is_box(value: Any, shape: Sequence[int]) -> bool:
    """Return whether a value is [first, last + 1] for each dimension of a shape."""
    if not isinstance(value, list) or len(value) != len(shape):
        return False
    for each, size in zip(value, shape, strict=True):
        if not isinstance(each, list) or len(each) != 2:
            return False
        first, end = each
        if not (_is_count(first) and _is_count(end) and first < end <= size):
            return False
    return True


def _is_count(value: Any) -> bool:
    # JSON's `true` is an instance of int in Python.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def _is_positive_count(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_filled_table(value: Any) -> bool:
    return isinstance(value, dict) and len(value) > 0


def _is_list_of_groups(value: Any) -> bool:
    if not isinstance(value, list) or len(value) == 0:
        return False
    return all(_is_group(each) for each in value)


def _is_group(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    names = value.get("params")
    return isinstance(names, list) and all(_is_text(name) for name in names)


def _is_file(value: Any) -> bool:
    """Return whether a value has the size and the hash of a file."""
    if not isinstance(value, dict):
        return False
    digest = value.get("sha256")
    if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
        return False
    return _is_count(value.get("bytes"))


# Field of a marker → function that checks its form, and the form in words.
_FORMS = {
    "step": (_is_count, "a whole number"),
    "world_size": (_is_positive_count, "a number of ranks"),
    "strategy": (_is_text, "a name"),
    "torch": (_is_text, "a version"),
    "optimizer": (_is_text, "a name"),
    "groups": (_is_list_of_groups, "a list of parameter groups"),
    "extra": (_is_table, "a table"),
    "files": (_is_filled_table, "a table of files"),
    "tensors": (_is_filled_table, "a table of tensors"),
}


def check_files(stored: Stored, rank: int = 0, world_size: int = 1) -> None:
    """Check the sizes of all files, and the hashes of this rank's share of them.

    Raises:
        Damaged: a file differs. The message names the first one.
    """
    check_sizes(stored)
    # Sorted, so that all ranks divide the same list.
    own_files = sorted(stored.content["files"].items())[rank::world_size]
    for name, written in own_files:
        path = stored.path / name
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        if found != written["sha256"]:
            raise Damaged(f"{path} was altered: its checksum does not match what was written")


def check_sizes(stored: Stored) -> None:
    """Check that every file exists and has its size. Cheap, because it opens no file.

    Raises:
        Damaged: a file is missing or has another size. The message names the first one.
    """
    for name, written in stored.content["files"].items():
        path = stored.path / name
        try:
            size = _size_of(path)
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror or error}") from None
        if size != written["bytes"]:
            raise Damaged(f"{path} has {size} bytes instead of {written['bytes']}")


def _size_of(path: Path) -> int:
    """Return the number of bytes of a regular file.

    Raises:
        OSError: it is not there, or not a regular file. To open a pipe would wait forever, and a
            link could lead out of the folder.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")
    return found.st_size
