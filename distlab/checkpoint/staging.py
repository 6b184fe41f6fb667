"""Host memory that snapshots go through on their way from the device to the disk."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distlab.checkpoint.dcp import Item
from distlab.parallel.shard import Run


class Staging:
    """Host memory that a snapshot is copied into, kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, runs: Sequence[Run], device: torch.device) -> tuple[list[Item], Callable[[], None]]:
        """Queue copies of all runs; returns the items on the host, and what waits until they are filled."""
        needed: dict[torch.dtype, int] = {}
        for run in runs:
            needed[run.values.dtype] = needed.get(run.values.dtype, 0) + run.values.numel()
        for dtype, count in needed.items():
            if dtype not in self._buffers or self._buffers[dtype].numel() < count:
                self._buffers[dtype] = host_memory(count, dtype, pinned=device.type == "cuda")
        used = dict.fromkeys(needed, 0)
        items = []
        for run in runs:
            dtype, count = run.values.dtype, run.values.numel()
            place = self._buffers[dtype][used[dtype] : used[dtype] + count]
            used[dtype] += count
            place.copy_(run.values, non_blocking=True)
            items.append(Item(run.key, run.start, run.numel, place))
        if device.type != "cuda":
            return items, lambda: None
        event = torch.cuda.Event()
        event.record()
        return items, event.synchronize


def host_memory(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Host memory, pinned exactly: torch's own pinned allocator rounds up to a power of two."""
    memory = torch.empty(count, dtype=dtype)
    if pinned and count:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory
