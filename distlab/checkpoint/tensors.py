"""Tensors on disk: raw bytes in one or a few files per rank, and an index of their parts.

    rank_0_0.bin    │ embedding [0, 1984) │ blocks.0.qkv [0, 24576) │ …
    rank_1_0.bin    │ embedding [1984, 3968) │ …

The files have no headers, no gaps and nothing to execute. The index is part of the marker. For each
tensor it has the shape, the dtype and the parts: `[first element, elements, file, offset in
bytes]`, counted in the flattened tensor. So a rank can write a part that ends inside a row, and a
reader of any world size reads only the bytes it needs.

A rank of a tensor-parallel group has a box of a matrix, for example some columns. Its parts have a
fifth item, the box: `[[first, last + 1], …]` for each dimension. Their elements are counted in the
flattened box.

Parts tile their tensor, box by box, and they tile every file. So an index that leaves out a tensor,
or reads a byte twice, does not fit the files.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from distlab.checkpoint.files import CheckpointError, Damaged, Stored, box_of
from distlab.parallel.shard import Box, Shard

AT_ONCE = 2**20  # elements whose places in another box are computed at the same time
# key → {"shape": […], "dtype": "float32", "parts": [[start, count, file, offset], …]}
Index = dict[str, dict[str, Any]]
Kind = tuple[tuple[int, ...], torch.dtype]  # shape of the whole tensor, dtype


def write(
    folder: Path, rank: int, shards: Sequence[Shard], threads: int
) -> tuple[dict[str, dict[str, Any]], Index]:
    """Write this rank's shards and flush them to disk.

    Args:
        folder: folder to write to. It must exist, without files of this rank.
        rank: rank in the names of the files.
        shards: shards to write, their values in host memory.
        threads: number of threads. Each one writes a file.

    Returns:
        (file → `{"bytes": …, "sha256": …}`, index of these shards).
    """
    # Files of about equal size: the largest shard that is left goes to the smallest file.
    shares: list[list[Shard]] = [[] for _ in range(threads)]
    sizes = [0] * threads
    for shard in sorted(shards, key=lambda shard: shard.values.nbytes, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(shard)
        sizes[smallest] += shard.values.nbytes
    paths = [folder / f"rank_{rank}_{number}.bin" for number in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        written = list(pool.map(_write_file, paths, shares))
    files = {path.name: entry for path, (entry, _) in zip(paths, written, strict=True)}
    return files, merged([index for _, index in written])


def _write_file(path: Path, shards: Sequence[Shard]) -> tuple[dict[str, Any], Index]:
    """Write shards into one file.

    Returns:
        (`{"bytes": …, "sha256": …}`, index of these shards).
    """
    digest = hashlib.sha256()
    offset = 0  # position in the file at which the next shard begins, in bytes
    indices = []
    # "x": the temporary folder is new, so a file of this name would be another writer's.
    with open(path, "xb") as file:
        for shard in shards:
            values = shard.values
            # Bytes, because NumPy has no bfloat16.
            data = values.view(torch.uint8).numpy()
            parts = []
            for box, start, held in shard.places():
                count = held.stop - held.start
                part = [start, count, path.name, offset + held.start * values.element_size()]
                if shard.cut is not None:
                    part.append([list(each) for each in box])
                parts.append(part)
            entry = {
                "shape": list(shard.shape),
                "dtype": str(values.dtype).removeprefix("torch."),
                "parts": parts,
            }
            indices.append({shard.name: entry})
            append(file, data)
            digest.update(data)
            offset += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": offset, "sha256": digest.hexdigest()}, merged(indices)


def append(file: BinaryIO, data: np.ndarray) -> None:
    """Write data to the end of a file. Tests replace it to fill the disk or to kill the process."""
    file.write(data)


def merged(indices: Sequence[Index]) -> Index:
    """Merge the indices of several files or ranks into one."""
    whole: Index = {}
    for index in indices:
        for key, entry in index.items():
            parts = list(entry["parts"])
            if key in whole:
                parts = whole[key]["parts"] + parts
            parts.sort(key=_box_and_place)
            whole[key] = entry | {"parts": parts}
    return whole


def _box_and_place(part: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the key by which parts are sorted: by box, and by first element inside a box."""
    return part[4:], part[:4]


def shapes_and_dtypes(stored: Stored) -> dict[str, Kind]:
    """Return (shape, dtype) of every stored tensor."""
    kinds = {}
    for key, entry in stored.content["tensors"].items():
        kinds[key] = (tuple(entry["shape"]), getattr(torch, entry["dtype"]))
    return kinds


def read(stored: Stored, shards: Sequence[Shard]) -> None:
    """Fill the shards' memory, on any device and of any dtype, from the parts that hold them.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: a file ends too early.
        Damaged: a NaN in the model.
    """
    for shard in shards:
        entry = stored.content["tensors"][shard.name]
        whole = tuple((0, size) for size in entry["shape"])
        for box, begin, held in shard.places():
            wanted = shard.values[held]
            for part in entry["parts"]:
                if box_of(part, whole) == box:
                    _read_range(stored, shard.name, part, begin, wanted)
                else:
                    _read_from_other_box(stored, shard.name, part, whole, box, begin, wanted)


def _read_range(
    stored: Stored, key: str, part: Sequence[Any], begin: int, wanted: torch.Tensor
) -> None:
    """Copy the elements that a part and a range of the same box share.

    Args:
        stored: checkpoint.
        key: name of the tensor.
        part: part from the index.
        begin: first element of the range in the flattened box.
        wanted: 1-D memory of the range.
    """
    start, count, file_name, offset = part[:4]
    first = max(start, begin)
    end = min(start + count, begin + wanted.numel())
    if first < end:
        values = _values(stored, key, file_name, offset, first - start, end - start)
        # Copies to the device, and converts if the dtypes differ.
        wanted[first - begin : end - begin].copy_(values)


def _read_from_other_box(
    stored: Stored,
    key: str,
    part: Sequence[Any],
    whole: Box,
    box: Box,
    begin: int,
    wanted: torch.Tensor,
) -> None:
    """Copy the elements that a part of another box shares with a range of `box`.

    Args: as for `_read_range`, and the boxes of the whole tensor and of the range.
    """
    start, count, file_name, offset = part[:4]
    there = box_of(part, whole)
    for here, index in _shared(box, begin, wanted.numel(), there, start, count):
        # One read of all elements from the first to the last that is needed.
        first = int(index.min())
        end = int(index.max()) + 1
        values = _values(stored, key, file_name, offset, first, end)
        targets = torch.from_numpy(here).to(wanted.device)
        wanted[targets] = values[index - first].to(wanted)


def _shared(
    box: Box, begin: int, wanted: int, there: Box, start: int, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the elements that a range of one box shares with a part of another box.

    Args:
        box: box of the range.
        begin: first element of the range in the flattened box.
        wanted: number of elements of the range.
        there: box of the part.
        start: first element of the part in its flattened box.
        count: number of elements of the part.

    Yields:
        (numbers of elements in the range, numbers of the same elements in the part).
    """
    sizes_here = [last - first for first, last in box]
    sizes_there = [last - first for first, last in there]
    # In pieces, because the coordinates take 8 bytes per element and dimension.
    for first in range(0, wanted, AT_ONCE):
        here = np.arange(first, min(first + AT_ONCE, wanted))
        # Coordinates of these elements in the other box, and whether they are inside it.
        coordinates = []
        inside = np.ones(len(here), dtype=bool)
        coordinates_here = np.unravel_index(begin + here, sizes_here)
        for dimension, coordinate in enumerate(coordinates_here):
            first_here, _ = box[dimension]
            first_there, _ = there[dimension]
            coordinate_there = coordinate + first_here - first_there
            inside &= (coordinate_there >= 0) & (coordinate_there < sizes_there[dimension])
            coordinates.append(coordinate_there)
        here = here[inside]
        # Numbers in the flattened other box, and from there in the part.
        inner = [coordinate[inside] for coordinate in coordinates]
        index = np.ravel_multi_index(inner, sizes_there) - start
        within = (index >= 0) & (index < count)
        if within.any():
            yield here[within], index[within]


def _values(
    stored: Stored, key: str, file_name: str, offset: int, first: int, end: int
) -> torch.Tensor:
    """Read elements of a part of a tensor.

    Args:
        stored: checkpoint.
        key: name of the tensor.
        file_name: name of the file in the checkpoint's folder.
        offset: position of the part's first byte in the file.
        first: number of the first element in the part.
        end: number of the last element in the part, plus 1.
    """
    path = stored.path / file_name
    dtype = getattr(torch, stored.content["tensors"][key]["dtype"])
    values = torch.empty(end - first, dtype=dtype)
    with open(path, "rb") as file:
        file.seek(offset + first * dtype.itemsize)
        # Into the tensor's own memory, without a copy in between.
        bytes_read = file.readinto(values.view(torch.uint8).numpy())
    if bytes_read != values.nbytes:
        raise CheckpointError(f"{path} ends within {key}")
    # A NaN in the optimizer's state can be right, and one in the model never is.
    if key.startswith("model/") and dtype.is_floating_point and values.isnan().any():
        raise Damaged(
            f"{stored.path} holds NaN in {key}, though its checksums fit: remove it to use the one "
            "before"
        )
    return values


def kinds_of(model: Sequence[Shard]) -> list[tuple[str, Kind]]:
    """Return (name, (shape of the whole tensor, dtype)) of each shard."""
    return [(shard.name, (tuple(shard.shape), shard.tensor.dtype)) for shard in model]


def refuse_other_model(stored: Stored, model: Sequence[tuple[str, Kind]]) -> None:
    """Check that a checkpoint has the tensors of this model.

    Args:
        stored: checkpoint.
        model: name and kind of every tensor of the whole model, from `kinds_of`.

    Raises:
        ValueError: tensors are missing, extra, or of another shape or dtype. The message names
            them.
    """
    mine = {name.removeprefix("model/"): kind for name, kind in model}
    theirs = {}
    for key, kind in shapes_and_dtypes(stored).items():
        if key.startswith("model/"):
            theirs[key.removeprefix("model/")] = kind
    differences = []
    for name in mine | theirs:
        if name not in theirs:
            differences.append(f"{name} is missing there")
            continue
        if name not in mine:
            differences.append(f"{name} exists only there")
            continue
        shape_there, dtype_there = theirs[name]
        shape_here, dtype_here = mine[name]
        if shape_there != shape_here:
            differences.append(f"{name} has shape {shape_there} there and {shape_here} here")
        elif dtype_there != dtype_here:
            differences.append(f"{name} has {dtype_there} there and {dtype_here} here")
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"{stored.path} is a checkpoint of another model: {'; '.join(differences[:5])}{more}"
        )
