"""Memory with guards: what a kernel writes outside of its outputs, and what it never writes.

`GuardedAllocations` is a dispatch mode. While it is active, tensors that torch allocates lie in
larger buffers whose other bytes have a known value, and `empty` tensors are full of NaN.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD_BYTES = 2**16
NAN = 0xFF  # floating-point numbers of such bytes are NaN

# Allocations of torch, by the names of its operators. The first group leaves memory as it is.
UNINITIALISED = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
INITIALISED = ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like")


class _CudaBytes:
    """Part of a buffer on a GPU, in the protocol by which libraries exchange arrays."""

    def __init__(self, whole: Tensor, begin: int, length: int) -> None:
        self.whole = whole  # torch keeps this object as long as the part, and so the buffer
        address = whole.data_ptr() + begin
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _part(whole: Tensor, begin: int, length: int) -> Tensor:
    """Return a part of a buffer as a tensor whose storage begins where it begins.

    torch takes that for granted of what it has just allocated.
    """
    if whole.device.type == "cpu":
        return torch.from_numpy(whole.numpy()[begin : begin + length])
    return torch.as_tensor(_CudaBytes(whole, begin, length), device=whole.device)


class GuardedAllocations(TorchDispatchMode):
    """Dispatch mode that puts allocations between guards.

    Args:
        fill: value of each byte of guards and of `empty` tensors. Default: that of NaN.

    Attributes:
        buffers: (bytes of the whole buffer, first and last byte of the tensor) of each allocation.
    """

    def __init__(self, fill: int = NAN) -> None:
        super().__init__()
        self.fill = fill
        self.buffers: list[tuple[Tensor, int, int]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code stays compiled while this mode is active."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation, and move what it allocates into a guarded buffer."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in UNINITIALISED + INITIALISED or not isinstance(result, Tensor):
            return result
        # There is no memory around them that could be overwritten.
        if result.device.type == "meta" or result.numel() == 0:
            return result
        guarded = self._guarded(result)
        if name in INITIALISED:
            guarded.copy_(result)
        return guarded

    def _guarded(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape, strides and dtype in a new buffer."""
        extent = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            # Index of the last element plus 1: strides may leave gaps.
            extent += (size - 1) * stride
        length = extent * tensor.element_size()
        whole = torch.full(
            (length + 2 * GUARD_BYTES,), self.fill, dtype=torch.uint8, device=tensor.device
        )
        self.buffers.append((whole, GUARD_BYTES, GUARD_BYTES + length))
        inner = _part(whole, GUARD_BYTES, length)
        return inner.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def overwritten(self) -> int:
        """Return the number of bytes around allocations that were changed."""
        changed = 0
        for whole, begin, end in self.buffers:
            changed += int((whole[:begin] != self.fill).sum())
            changed += int((whole[end:] != self.fill).sum())
        return changed
