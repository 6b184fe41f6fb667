"""Messages of the check itself between ranks: results, and errors that end it on every rank."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankContext, collectives


class Agreed(BaseException):
    """An error of some rank that all ranks know.

    Not an Exception, which `blamed` would say is this rank's.
    """

    def __init__(self, error: Exception):
        self.error = error


def on_all(own: RankContext, work: Callable[[], Any]) -> Any:
    """Return `work()` of this rank.

    An error of any rank is raised on all of them, so that none waits for another.
    """
    result, error = None, None
    try:
        result = work()
    # Errors of these classes are meant for the user. All others are bugs, and keep their traceback.
    except (ValueError, OSError) as raised:
        error = raised
    except Agreed as agreed:
        raise agreed.error from None
    try:
        # Also without an error of its own: this rank must learn of those of the others here, and
        # not in a collective that they never call.
        exchange(own, None, error)
    except Agreed as agreed:
        raise agreed.error from None
    return result


def exchange(own: RankContext, value: Any, error: Exception | None = None) -> list[Any]:
    """Return every rank's value, in rank order.

    Raises:
        Agreed: a rank has an error in its place.
    """
    messages = collectives.gather_objects(packed((value, error)), own.group)
    everyone = [unpacked(message) for message in messages]
    errors = [each for _, each in everyone if each is not None]
    if errors:
        # A rank that waited in vain did so because of another rank's error, if there is one.
        causes = [each for each in errors if not isinstance(each, TimeoutError)]
        # One error is raised on all ranks, so that all of them end in the same way.
        raise Agreed((causes or errors)[0])
    return [each for each, _ in everyone]


def gather_on_main(value: Any, own: RankContext) -> list[Any]:
    """Return every rank's value in rank order on rank 0, and an empty list on the others."""
    gathered: list[Any] | None = [None] * own.world_size if own.is_main else None
    dist.gather_object(packed(value), gathered, dst=0, group=own.group)
    # Other ranks have no list, and so return an empty one.
    return [unpacked(message) for message in gathered or []]


def from_main(value: Any, own: RankContext) -> Any:
    """Return rank 0's value."""
    box = [packed(value) if own.is_main else None]
    dist.broadcast_object_list(box, src=0, group=own.group)
    # Rank 0 keeps its own object, without a copy.
    return value if own.is_main else unpacked(box[0])


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes.

    By default each tensor becomes an archive of its own, which takes ten times as long to write and
    to read. A model has hundreds of them.
    """

    def reducer_override(self, value: Any) -> Any:
        plain = (
            type(value) is Tensor
            and value.device.type == "cpu"
            and value.layout == torch.strided
            and not value.requires_grad
        )
        if not plain:
            return NotImplemented  # the pickler then does as it does by default
        # The clone drops what the storage holds beyond this tensor.
        elements = value.reshape(-1).clone(memory_format=torch.contiguous_format)
        values = elements.view(torch.uint8).numpy().tobytes()  # numpy knows no bf16
        return _tensor_of, (values, value.dtype, tuple(value.shape))


def _tensor_of(values: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # torch.frombuffer refuses an empty buffer.
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


def packed(value: Any) -> bytes:
    """Return a value as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpacked(message: bytes) -> Any:
    """Return the value of such bytes."""
    return pickle.loads(message)
