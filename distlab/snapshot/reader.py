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
    return Snapshot(content["segments"], traces, content.get("allocator_settings") or {})


def _unpickled(file: BinaryIO) -> Any:
    return _PlainUnpickler(file).load()
