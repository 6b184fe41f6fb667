"""Peak memory of a block of code, as the CUDA caching allocator counts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class PeakMemory:
    """``peak_alloc_bytes``: most bytes allocated at once inside the block, what lay there before included.

    None while the block runs, and on devices whose allocator keeps no count (the CPU): not measured is not
    zero.
    """

    peak_alloc_bytes: int | None = None


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
