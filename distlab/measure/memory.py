"""Memory as the CUDA caching allocator counts it, and what a set of tensors takes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass
class PeakMemory:
    """``peak_alloc_bytes``: most bytes allocated at once inside the block, what lay there before included.
    ``peak_requested_bytes``: the same of what was asked for, which the allocator rounds up to its blocks.

    None while the block runs, and on devices whose allocator keeps no count (the CPU): not measured is not
    zero.
    """

    peak_alloc_bytes: int | None = None
    peak_requested_bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[PeakMemory]:
    """Measure the block; the result is there afterwards, also after an exception. Blocks must not nest.

    The count is the allocator's (tensors), not the device's: CUDA's context and NCCL's buffers are not in it.
    """
    peak = PeakMemory()
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield peak
    finally:
        if on_cuda:
            peak.peak_alloc_bytes = torch.cuda.max_memory_allocated(device)
            peak.peak_requested_bytes = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]


def allocated_bytes(device: torch.device | str) -> int | None:
    """Bytes that tensors hold now; None where the allocator keeps no count."""
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else None


def free_bytes(device: torch.device | str, root: Path = Path("/")) -> int | None:
    """Bytes that could be allocated on a device now; None where nobody says.

    On a GPU what the driver has free and what the allocator keeps in reserve. On a CPU what Linux calls available, or
    what the control group of a container or job still allows, if that is less.

    Args:
        root: of the file system that holds /proc and /sys.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [_available(root / "proc/meminfo"), _allowed(root)]
    return min((size for size in found if size is not None), default=None)


def _available(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _allowed(root: Path) -> int | None:
    """What the control group leaves; its page cache can be taken back and does not count."""
    for folder, limit, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most, now = (int((root / folder / name).read_text()) for name in (limit, used))
            lines = (root / folder / "memory.stat").read_text().splitlines()
            cached = next((int(line.split()[1]) for line in lines if line.split()[0] == cache), 0)
            return max(0, most - now + cached)
    return None


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors on this rank, each storage once: views of one buffer count as the
    whole buffer. Of a DTensor the local part counts."""
    storages = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
