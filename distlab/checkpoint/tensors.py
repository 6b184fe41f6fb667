"""Tensors on disk: raw bytes in one or a few files per rank, and the place of each part in them.

    rank_0_0.bin    │ embedding [0, 1984) │ blocks.0.qkv [0, 24576) │ …      no headers, no gaps, nothing to execute
    rank_1_0.bin    │ embedding [1984, 3968) │ …

The index, which the marker holds, names for each tensor its shape, its dtype and its parts: `[first
element, elements, file, offset in bytes]`, in the flattened whole. So a part that cuts through rows
needs no gathering, and a reader of any world size reads the bytes it needs. A rank that shares
matrices with others has a box of them, some columns say: its parts end with that box, `[[first,
last + 1], …]` of each dimension, and count within it, flattened. Parts tile their tensor, box by
box, and they tile every file: an index that leaves out a tensor, or reads a byte twice, cannot fit
the files.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from distlab.checkpoint.files import CheckpointError, Damaged, Stored
from distlab.parallel.shard import Box, Shard

AT_ONCE = 2**20  # elements whose places in another box are computed together
# key → {"shape": […], "dtype": "float32", "parts": [[start, count, file, offset], …]}
Index = dict[str, dict[str, Any]]
Kind = tuple[tuple[int, ...], torch.dtype]  # shape of the whole, dtype


def write(
    folder: Path, rank: int, shards: Sequence[Shard], threads: int
) -> tuple[dict[str, dict[str, Any]], Index]:
    """Write this rank's shards, which are on the host, and flush them to disk, a file per thread.

    Returns:
        (file → `{"bytes": …, "sha256": …}`, the index of these shards).
    """
    shares = [[] for _ in range(threads)]  # shards of each file
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
    digest, offset, indices = hashlib.sha256(), 0, []
    with open(path, "xb") as file:
        for shard in shards:
            data = shard.values.view(torch.uint8).numpy()
            parts = []
            for box, start, held in shard.places():
                at = offset + held.start * shard.values.element_size()
                parts.append([start, held.stop - held.start, path.name, at])
                if shard.cut is not None:
                    parts[-1].append([list(each) for each in box])
            indices.append(
                {
                    shard.name: {
                        "shape": list(shard.shape),
                        "dtype": str(shard.values.dtype).removeprefix("torch."),
                        "parts": parts,
                    }
                }
            )
            append(file, data)
            digest.update(data)
            offset += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": offset, "sha256": digest.hexdigest()}, merged(indices)


def append(file: BinaryIO, data: np.ndarray) -> None:
    """Write all of it; here tests fill the disk and kill the process."""
    file.write(data)


def merged(indices: Sequence[Index]) -> Index:
    """Merge the indices of its parts into that of a whole checkpoint."""
    whole = {}
    for index in indices:
        for key, entry in index.items():
            parts = whole.get(key, {"parts": []})["parts"] + entry["parts"]
            whole[key] = entry | {"parts": sorted(parts, key=lambda part: (part[4:], part[:4]))}
    return whole


def shapes_and_dtypes(stored: Stored) -> dict[str, Kind]:
    """Return (shape, dtype) of every stored tensor."""
    index = stored.content["tensors"]
    return {
        key: (tuple(entry["shape"]), getattr(torch, entry["dtype"])) for key, entry in index.items()
    }


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
            for start, count, name, offset, *cut in entry["parts"]:
                there = tuple(map(tuple, cut[0])) if cut else whole
                if there != box:
                    for here, index in _shared(box, begin, wanted.numel(), there, start, count):
                        first, last = int(index.min()), int(index.max()) + 1
                        values = _values(stored, shard.name, name, offset, first, last)
                        wanted[torch.from_numpy(here).to(wanted.device)] = values[index - first].to(
                            wanted
                        )
                    continue
                first, last = max(start, begin), min(start + count, begin + wanted.numel())
                if first < last:
                    values = _values(stored, shard.name, name, offset, first - start, last - start)
                    wanted[first - begin : last - begin].copy_(values)


def _shared(box: Box, begin: int, wanted: int, there: Box, start: int, count: int) -> Iterator[Any]:
    """Yield the elements of a flattened box that are also in a part of another box.

    The elements are those from `begin` on. Each is yielded with its place in that part.
    """
    sizes, sizes_there = ([last - first for first, last in each] for each in (box, there))
    for first in range(0, wanted, AT_ONCE):
        here = np.arange(first, min(first + AT_ONCE, wanted))
        places = [
            place + low - other
            for place, (low, _), (other, _) in zip(
                np.unravel_index(begin + here, sizes), box, there, strict=True
            )
        ]
        inside = np.logical_and.reduce(
            [(p >= 0) & (p < n) for p, n in zip(places, sizes_there, strict=True)]
        )
        here = here[inside]
        index = np.ravel_multi_index([place[inside] for place in places], sizes_there) - start
        within = (index >= 0) & (index < count)
        if within.any():
            yield here[within], index[within]


def _values(
    stored: Stored, key: str, file_name: str, offset: int, first: int, last: int
) -> torch.Tensor:
    """Elements of a part, which begins at this byte."""
    dtype = getattr(torch, stored.content["tensors"][key]["dtype"])
    values = torch.empty(last - first, dtype=dtype)
    with open(stored.path / file_name, "rb") as file:
        file.seek(offset + first * dtype.itemsize)
        if file.readinto(values.view(torch.uint8).numpy()) != values.nbytes:
            raise CheckpointError(f"{stored.path / file_name} ends within {key}")
    if dtype.is_floating_point and values.isnan().any() and key.startswith("model/"):
        said = f"{stored.path} holds NaN in {key}, though its checksums fit"
        raise Damaged(f"{said}: remove it to use the one before")
    return values


def kinds_of(model: Sequence[Shard]) -> list[tuple[str, Kind]]:
    """Return (name, (shape of the whole, dtype)) of each shard."""
    return [(shard.name, (tuple(shard.shape), shard.tensor.dtype)) for shard in model]


def refuse_other_model(stored: Stored, model: Sequence[tuple[str, Kind]]) -> None:
    """Raise ValueError with every parameter that is missing, extra, or of another shape or dtype.

    Args:
        model: name and kind of every tensor of the whole model, from `kinds_of`.
    """
    mine = {name.removeprefix("model/"): kind for name, kind in model}
    found = shapes_and_dtypes(stored).items()
    theirs = {key.removeprefix("model/"): kind for key, kind in found if key.startswith("model/")}
    differences = [
        f"{name} is missing there"
        if name not in theirs
        else f"{name} exists only there"
        if name not in mine
        else f"{name} has shape {theirs[name][0]} there and {mine[name][0]} here"
        if theirs[name][0] != mine[name][0]
        else f"{name} has {theirs[name][1]} there and {mine[name][1]} here"
        for name in mine | theirs
        if mine.get(name) != theirs.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"{stored.path} is a checkpoint of another model: {'; '.join(differences[:5])}{more}"
        )
