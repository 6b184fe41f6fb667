"""``CollectiveRecorder``: which collectives a step issues, with how many bytes, in which order.

It stands at torch's dispatcher, below every strategy: hand-written ones, the C++ reducer of torch DDP and
FSDP2 issue the same ``c10d`` operators, so all are counted by the same rule. It says nothing about time (see
`trace`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Dispatcher name → (the field's name, index of the argument that is the payload). The payload of an
# all-gather is its full output and that of a reduce-scatter its full input: the side on which all ranks' data
# lies. Both sides are among the arguments, and only one is counted. For the same reason gather, scatter and
# all-to-all count what this rank contributes, receives and contributes.
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}

# The functional collectives (torch.compile, DTensor) do not pass through c10d's operators again. Their result
# is returned, so the payload of an all-gather (None) is what comes back.
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", None),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "broadcast": ("broadcast", 0),
    "all_to_all_single": ("all_to_all", 0),
}


# Ours, by copy engines: the payload is any one replica.
_BY_COPY = {"all_reduce_mean_by_copy": ("all_reduce", 0)}


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as issued.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, …
        bytes: payload: the full output of an all-gather, the full input of a reduce-scatter, the tensor
            otherwise; a coalesced call is one call with the sum.
        dtype: of the payload (of its first tensor).
        numel: elements of the payload.
        sequence: position among all calls of this recorder, from 0.
    """

    op: str
    bytes: int
    dtype: torch.dtype
    numel: int
    sequence: int


class CollectiveRecorder(TorchDispatchMode):
    """Records the collectives issued inside ``with CollectiveRecorder() as recorder:``.

    Sees those of autograd hooks too, because autograd carries the mode into its threads. A thread that the
    program starts itself does not inherit it: there, enter the same recorder again (``with recorder:``).
    Every torch operator inside the block takes a detour through Python, so do not time what is recorded.

    Attributes:
        calls: the collectives that carry data, in the order of issue.
        others: names of the other operators of the kind (``barrier``, ``wait_tensor``), in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[CollectiveCall] = []
        self.others: list[str] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self.calls)

    @property
    def total_bytes(self) -> int:
        """Payload of all calls in bytes."""
        return sum(call.bytes for call in self.calls)

    def by_op(self) -> dict[str, tuple[int, int]]:
        """op → (calls, bytes)."""
        calls = Counter(call.op for call in self.calls)
        return {op: (n, sum(c.bytes for c in self.calls if c.op == op)) for op, n in calls.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "distlab"):
            self._record(func, args, result)
        return result

    def _record(self, func: torch._ops.OpOverload, args: tuple, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            op, side = _C10D.get(name, (None, None))
        elif func.namespace == "distlab":
            if name not in _BY_COPY:
                return
            op, side = _BY_COPY[name]
            args = (args[0][0],)
        else:
            op, side = _FUNCTIONAL.get(_plain_functional_name(name), (None, None))
        payload = [] if op is None else list(_tensors(result if side is None else args[side]))
        with self._lock:
            if not payload:
                self.others.append(name.strip("_"))
                return
            numel = sum(tensor.numel() for tensor in payload)
            size = sum(tensor.numel() * tensor.element_size() for tensor in payload)
            self.calls.append(CollectiveCall(op, size, payload[0].dtype, numel, len(self.calls)))


def _plain_functional_name(name: str) -> str:
    """``all_reduce_coalesced_`` and ``all_gather_into_tensor_out`` are variants of one operation."""
    return name.rstrip("_").removesuffix("_coalesced").removesuffix("_out")


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument that is a tensor, a list, or a list of lists."""
    if isinstance(argument, torch.Tensor):
        yield argument
    else:
        for item in argument:
            yield from _tensors(item)
