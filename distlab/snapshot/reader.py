"""Read a snapshot's pickle without running what it may contain.

A pickle is a program. The reader executes only the part of it that makes numbers, strings, lists,
tuples, sets and dictionaries. It refuses every class and every function.
"""

import gzip
import pickle
from dataclasses import dataclass
from typing import Any, BinaryIO

from distlab.files import AnyPath

Entry = dict[str, Any]
# Actions of the allocator that allocate or release memory.
ALLOC = "alloc"
FREES = ("free_completed", "free")
MAPS = ("segment_alloc", "segment_map")
UNMAPS = ("segment_free", "segment_unmap")
SIZED = (ALLOC, *FREES, *MAPS, *UNMAPS)


@dataclass(frozen=True)
class Snapshot:
    """Segments of the allocator, and its history.

    Attributes:
        segments: segments of memory that were reserved, with their blocks, of all devices.
        traces: for each device, its allocations and frees in order. Empty lists without a history.
        settings: settings of the allocator, if the file has them.
    """

    segments: list[Entry]
    traces: list[list[Entry]]
    settings: Entry


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that makes plain containers only."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse a class or a function, whatever it is."""
        raise ValueError(f"it asks for {module}.{name}, and a memory snapshot has no objects")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse an object that is stored elsewhere."""
        raise ValueError("it refers to objects outside of the file")


def read_snapshot(path: AnyPath) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot`, which may be compressed by gzip.

    Raises:
        ValueError: the file is something else, is cut off, or contains more than plain data.
    """
    with open(path, "rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if is_compressed else open(path, "rb") as file:
            content = _unpickled(file)
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is no memory snapshot that can be read: {error}") from error
    except (KeyError, TypeError, MemoryError, OverflowError, OSError) as error:
        # What a broken or a hostile pickle may lead to.
        raise ValueError(f"{path} is no memory snapshot that can be read: {error!r}") from error
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise ValueError(
            f"{path} is no memory snapshot: it has no segments; write one with "
            "torch.cuda.memory._dump_snapshot"
        )
    traces = content.get("device_traces") or []
    fault = _fault_of_segments(content["segments"]) or _fault_of_traces(traces)
    if fault:
        raise ValueError(
            f"{path} is no memory snapshot that can be read: {fault}; write one with "
            "torch.cuda.memory._dump_snapshot"
        )
    return Snapshot(content["segments"], traces, content.get("allocator_settings") or {})


def _fault_of_segments(segments: list[Any]) -> str:
    """Return why segments cannot be read, or an empty string."""
    for segment in segments:
        if not isinstance(segment, dict):
            return "a segment is no dictionary"
        if not _is_number(segment.get("total_size")):
            return "a segment has no total_size in bytes"
        for name in ("device", "address", "stream"):
            if not _is_number(segment.get(name, 0)):
                return f"{name} of a segment is no number"
        blocks = segment.get("blocks", [])
        if not _is_list_of_dicts(blocks):
            return "blocks of a segment are no list of dictionaries"
        for block in blocks:
            fault = _fault_of_block(block)
            if fault:
                return fault
    return ""


def _fault_of_block(block: Entry) -> str:
    """Return why a block of a segment cannot be read, or an empty string."""
    if not _is_number(block.get("size")) or not _is_number(block.get("requested_size", 0)):
        return "a block of a segment has no size in bytes"
    if not _is_number(block.get("address", 0)):
        return "address of a block is no number"
    if not isinstance(block.get("state"), str):
        return "a block of a segment has no state"
    past = block.get("history") or []
    if not _is_list_of_dicts(past):
        return "history of a block is no list of dictionaries"
    for entry in [block, *past]:
        if not _is_list_of_dicts(entry.get("frames") or []):
            return "frames of a block are no list of dictionaries"
    return ""


def _fault_of_traces(traces: Any) -> str:
    """Return why the events of the devices cannot be read, or an empty string."""
    if not isinstance(traces, list) or not all(map(_is_list_of_dicts, traces)):
        return "device_traces is no list of lists of events"
    for trace in traces:
        for event in trace:
            action = event.get("action")
            if not isinstance(action, str):
                return "an event has no action"
            # For example a failed allocation has no address, and a user's mark has no size.
            needs_size = action in SIZED
            if needs_size and not _is_number(event.get("size")):
                return f"an event `{action}` has no size in bytes"
            for name in ("addr", "stream", "time_us"):
                if not _is_number(event.get(name, 0)):
                    return f"{name} of an event `{action}` is no number"
            if not _is_list_of_dicts(event.get("frames") or []):
                return f"frames of an event `{action}` are no list of dictionaries"
    return ""


def _is_number(value: Any) -> bool:
    """Return whether a value is an integer that torch can have written: of 64 bits, not negative.

    Integers of a pickle have any length, and what is computed from longer ones overflows.
    """
    return isinstance(value, int) and 0 <= value < 2**64


def _is_list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _unpickled(file: BinaryIO) -> Any:
    return _PlainUnpickler(file).load()
