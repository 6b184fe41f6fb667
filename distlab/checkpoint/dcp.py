"""The seam to `torch.distributed.checkpoint` (DCP): one-dimensional runs instead of tensors, checksums, no code.

DCP plans which rank writes what, writes and reads a file per rank and thread, and tells every rank of any rank's
failure. Here it is taught three things. Its chunks are runs of flattened tensors, so pieces that cut through rows
need no gathering. Each file's SHA-256 is computed as it is written. And its metadata, a pickle, is read by an
unpickler that knows a dozen harmless classes and calls nothing else.
"""

import hashlib
import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from distlab.checkpoint.files import METADATA

_DCP = "torch.distributed.checkpoint"
SAFE_CLASSES = {
    *((f"{_DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in (
        "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "strided",
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A run of a stored tensor and the memory it is written from or read into.

    Attributes:
        key: of the stored tensor.
        start: first element within the whole, which has `numel` elements.
        values: `(n,)`; on the CPU when writing, on any device when reading.
    """

    key: str
    start: int
    numel: int
    values: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where the run lies: its first element and its length."""
        return ChunkStorageMetadata(torch.Size([self.start]), self.values.shape)


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the message says which, on which rank, and why."""


def write(
    folder: Path, items: Sequence[Item], group: ProcessGroup, threads: int
) -> dict[str, dict[str, Any]]:
    """Write this rank's items; a collective.

    Returns:
        The files that this rank wrote: name → `{"bytes": …, "sha256": …}`.

    Raises:
        CheckpointError: on every rank, if any rank failed; it names that rank.
    """
    files = HashingFileSystem()
    # Nothing on the GPU: items were staged. 0 bytes of copy-ahead keep DCP from making CUDA streams.
    writer = Writer(folder, thread_count=threads, per_thread_copy_ahead=0)
    writer.fs = files
    try:
        dcp.save({}, storage_writer=writer, planner=RunSavePlanner(items), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(describe(error)) from None
    return files.written


def read(folder: Path, metadata: Metadata, items: Sequence[Item], group: ProcessGroup) -> None:
    """Fill the items' memory; a collective.

    Raises:
        CheckpointError: on every rank, if any rank failed; it names that rank.
    """
    reader = Reader(folder)
    reader.metadata = metadata
    try:
        dcp.load({}, storage_reader=reader, planner=RunLoadPlanner(items), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(describe(error)) from None


def describe(error: CheckpointException) -> str:
    """`rank 1: OSError: [Errno 28] No space left on device`, for each rank that failed."""
    failures = sorted(error.failures.items())
    first_lines = {rank: next(iter(str(cause).splitlines()), "") for rank, (cause, _) in failures}
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {first_lines[rank]}" for rank, (cause, _) in failures
    )


class RunSavePlanner(SavePlanner):
    """Writes each item as a chunk of a one-dimensional tensor."""

    def __init__(self, items: Sequence[Item]):
        self._items = {(item.key, item.start): item for item in items if item.values.numel() > 0}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the items are known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([
            WriteItem(
                index=MetadataIndex(item.key, [item.start]),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=item.chunk,
                    properties=TensorProperties(dtype=item.values.dtype),
                    size=torch.Size([item.numel]),
                ),
            )
            for item in self._items.values()
        ])  # fmt: skip

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for key, stored in metadata.state_dict_metadata.items():
            covered = 0
            for chunk in sorted(stored.chunks, key=lambda chunk: chunk.offsets[0]):
                assert chunk.offsets[0] == covered, f"{key}: a hole or an overlap at element {covered}"
                covered += chunk.sizes[0]
            assert covered == stored.size[0], f"{key}: {covered} of {stored.size[0]} elements"
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._items[write_item.index.fqn, write_item.index.offset[0]].values


class RunLoadPlanner(LoadPlanner):
    """Reads each item from whatever chunks hold its elements."""

    def __init__(self, items: Sequence[Item]):
        self._items = {(item.key, item.start): item for item in items if item.values.numel() > 0}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        stored = self._metadata.state_dict_metadata
        return LoadPlan([
            request
            for item in self._items.values()
            for request in create_read_items_for_chunk_list(item.key, stored[item.key], [item.chunk])
        ])  # fmt: skip

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn} is a pickled object; only tensors are read")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        item = self._items[read_item.dest_index.fqn, read_item.dest_index.offset[0]]
        return item.values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: `resolve_tensor` gave the memory itself."""


class Writer(dcp.FileSystemWriter):
    """DCP's writer, without this machine's paths in the metadata."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class Reader(dcp.FileSystemReader):
    """DCP's reader, of metadata that was read safely before."""

    metadata: Metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def read_metadata(folder: Path) -> Metadata:
    """DCP's index of a checkpoint, as it is: see `check_metadata`.

    Raises:
        OSError: it cannot be read. CheckpointError: it asks for anything but DCP's own plain classes.
    """
    with open(folder / METADATA, "rb") as file:
        try:
            return _PlainUnpickler(file).load()
        except Exception as error:  # a pickle that was made up can raise anything
            raise CheckpointError(f"{folder / METADATA} is damaged: {error}") from None


def check_metadata(
    folder: Path, metadata: Metadata, shapes: Mapping[str, Sequence[int]], files: Mapping[str, int]
) -> None:
    """The index says of the tensors what the marker says, and points nowhere but into the marker's files.

    Args:
        folder: for the message.
        shapes: of the marker's tensors.
        files: the marker's files → bytes.

    Raises:
        CheckpointError: it does not.
    """
    try:
        problem = _problem_of_metadata(metadata, shapes, files)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = f"it is no index of DCP's ({type(error).__name__}: {error})"
    if problem is not None:
        raise CheckpointError(f"{folder / METADATA} is damaged: {problem}")


def _problem_of_metadata(
    metadata: Metadata, shapes: Mapping[str, Sequence[int]], files: Mapping[str, int]
) -> str | None:
    stored = metadata.state_dict_metadata
    expected = {key: math.prod(shape) for key, shape in shapes.items() if math.prod(shape) > 0}
    if different := sorted(stored.keys() ^ expected.keys()):
        return f"{different[0]} is only in {'it' if different[0] in stored else 'the marker'}"
    for key, numel in expected.items():
        entry = stored[key]
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(
            entry.properties.dtype, torch.dtype
        ):
            return f"{key} is no tensor"
        if tuple(entry.size) != (numel,):
            return f"{key} has size {tuple(entry.size)} in it and {numel} elements in the marker"
        covered = 0
        for chunk in sorted(entry.chunks, key=lambda chunk: chunk.offsets[0]):
            (start,), (length,) = chunk.offsets, chunk.sizes
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            if start != covered or length < 1:
                return f"{key} has a hole or an overlap at element {covered}"
            if place.relative_path not in files:
                return f"{key} lies in {place.relative_path!r}, which is no file of this checkpoint"
            # Bytes that are there bound what is allocated for them.
            needed, end = length * entry.properties.dtype.itemsize, place.offset + place.length
            if place.offset < 0 or place.length < needed or end > files[place.relative_path]:
                return f"{key} lies outside of {place.relative_path}"
            if place.transform_descriptors:
                return f"{key} is transformed by {place.transform_descriptors!r}"
            covered += length
        if covered != numel:
            return f"{key} has {covered} of {numel} elements"
    return None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in SAFE_CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a checkpoint has no use for")
        return super().find_class(module, name)


class HashingFileSystem(FileSystem):
    """Computes each file's size and SHA-256 from the bytes on their way to it."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashing = HashingStream(stream)
            try:
                yield hashing
            except Exception:
                # torch.save turns a full disk into "unexpected pos 704 vs 598".
                if hashing.error is not None:
                    raise hashing.error from None
                raise
        self.written[Path(path).name] = hashing.summary()

    def rename(self, path: Path, new_path: Path) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class HashingStream(io.RawIOBase):
    """Passes bytes on and hashes them; written from front to back only."""

    def __init__(self, stream: io.IOBase):
        self._stream = stream
        self._hash = hashlib.sha256()
        self._count = 0
        self.error: OSError | None = None  # the first that writing met

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._hash.update(data)
        count = memoryview(data).nbytes
        self._count += count
        return count

    def tell(self) -> int:
        return self._count

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        self._stream.flush()  # fsync comes next
        return self._stream.fileno()

    def summary(self) -> dict[str, Any]:
        """Bytes written so far, and their SHA-256 in hex."""
        return {"bytes": self._count, "sha256": self._hash.hexdigest()}


def stored_dtypes(metadata: Metadata) -> Mapping[str, torch.dtype]:
    """The type of each stored tensor."""
    return {key: stored.properties.dtype for key, stored in metadata.state_dict_metadata.items()}
