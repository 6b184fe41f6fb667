"""Parameters that lie in a flat buffer, which is what is sent and stepped, and are given other memory."""

from collections.abc import Iterable

import torch
from torch import Tensor


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's memory, and where the tensor begins there."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def refuse_assigned(placed: Iterable[tuple[str, Tensor, tuple[int, int]]]) -> None:
    """Check that parameters lie where they were placed.

    Args:
        placed: name, parameter and its place.

    Raises:
        RuntimeError: one has other memory since; copying it into its place would overwrite what
            `p.data`, kept to be assigned again, is an alias of.
    """
    # to look at a parameter that is being gathered waits for nothing
    with torch._C.DisableTorchFunctionSubclass():
        assigned = [
            name
            for name, parameter, (storage, offset) in placed
            if parameter.untyped_storage()._cdata != storage or parameter.storage_offset() != offset
        ]
    if assigned:
        raise RuntimeError(
            f"'{assigned[0]}' is sharded and was given other memory (p.data = …, vector_to_parameters, swap_tensors): "
            "write values in place, p.data.copy_(values), and keep copies, p.detach().clone(), to restore"
        )
