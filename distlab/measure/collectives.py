"""Recorder of the collectives that a step issues, with their bytes, in order.

It works in torch's dispatcher, below every strategy: hand-written ones, the C++ reducer of torch
DDP and FSDP2 issue the same ``c10d`` operators, so all are counted by the same rule. It says
nothing about time (see `trace`).
"""

import threading
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Dispatcher name, without the endings of its variants → (the field's name, index of the argument
# that is the payload). The payload of an all-gather is its full output and that of a reduce-scatter
# its full input: the side on which all ranks' data lies. Both sides are among the arguments, and
# only one is counted. For the same reason gather, scatter and all-to-all count what this rank
# contributes, receives and contributes.
_PAYLOADS = {
    "c10d::allreduce": ("all_reduce", 0),
    "c10d::allgather": ("all_gather", 0),
    "c10d::_allgather_base": ("all_gather", 0),
    "c10d::allgather_into_tensor": ("all_gather", 0),
    "c10d::reduce_scatter": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor": ("reduce_scatter", 1),
    "c10d::broadcast": ("broadcast", 0),
    "c10d::reduce": ("reduce", 0),
    "c10d::gather": ("gather", 1),
    "c10d::scatter": ("scatter", 0),
    "c10d::alltoall": ("all_to_all", 1),
    "c10d::alltoall_base": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv": ("recv", 0),
    "c10d::recv_any_source": ("recv", 0),
    # The functional collectives (torch.compile, DTensor) do not pass through c10d's operators
    # again. Their result is returned, so the payload of an all-gather (None) is what comes back.
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    # Ours, by copy engines: the payload is any one replica.
    "distlab::all_reduce_mean_by_copy": ("all_reduce", 0),
}


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as issued.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, …
        bytes: payload: the full output of an all-gather, the full input of a reduce-scatter, the
            tensor otherwise; a coalesced call is one call with the sum.
        dtype: dtype of the payload (of its first tensor).
        numel: number of elements of the payload.
        sequence: position among all calls of this recorder, from 0.
    """

    op: str
    bytes: int
    dtype: torch.dtype
    numel: int
    sequence: int


class CollectiveRecorder(TorchDispatchMode):
    """Records the collectives issued inside ``with CollectiveRecorder() as recorder:``.

    Sees those of autograd hooks too, because autograd carries the mode into its threads. A thread
    that the program starts itself does not inherit it: there, enter the same recorder again (``with
    recorder:``). Every torch operator inside the block takes a detour through Python, so do not
    time what is recorded.

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

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled while this mode is active.

        By default Dynamo refuses to run compiled code under a dispatch mode, runs it eager, and
        remembers that for the rest of the process: every later step would run eager as well.
        """
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "distlab"):
            self._record(func._schema.name, args, result)
        return result

    def _record(self, name: str, args: tuple, result: Any) -> None:
        op, side = _PAYLOADS.get(
            name.rstrip("_").removesuffix("_coalesced").removesuffix("_out"), (None, None)
        )
        payload = [] if op is None else tensors_in(result if side is None else args[side])
        if name.startswith("distlab::"):
            payload = payload[:1]
        with self._lock:
            if not payload:
                self.others.append(name.partition("::")[2].strip("_"))
                return
            numel = sum(tensor.numel() for tensor in payload)
            size = sum(tensor.numel() * tensor.element_size() for tensor in payload)
            self.calls.append(CollectiveCall(op, size, payload[0].dtype, numel, len(self.calls)))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors of a value in order.

    The value is a tensor, or lists, tuples, dictionaries and dataclasses of tensors.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    tensors = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf):
            tensors.extend(tensors_in(getattr(leaf, "__dict__", ())))
    return tensors
