"""Recorder of the collectives that a step issues, with their bytes, in order.

It works in torch's dispatcher, below every strategy. Hand-written strategies, the C++ reducer of
torch DDP, and FSDP2 all issue the same ``c10d`` operators, so all are counted by the same rule. It
says nothing about time (see `trace`).
"""

import threading
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Dispatcher name, without the endings of its variants → (usual name, index of the argument that is
# the payload). Input and output are both among the arguments, and only one of them is counted. An
# all-gather counts its full output and a reduce-scatter its full input, which hold the data of all
# ranks. A gather and an all-to-all count what this rank contributes, and a scatter what it gets.
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
    # again. They return their output, so the payload of an all-gather is the result (None).
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    # This lab's, by copy engines. The argument is a list of replicas, and the payload any of them.
    "distlab::all_reduce_mean_by_copy": ("all_reduce", 0),
    "distlab::reduce_scatter_mean_by_copy": ("reduce_scatter", 0),
    "distlab::all_gather_by_copy": ("all_gather", 0),
}


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as issued.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, …
        bytes: bytes of the payload: the full output of an all-gather, the full input of a
            reduce-scatter, the tensor otherwise. A coalesced call is one call with the sum.
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
    """Recorder of the collectives issued inside ``with CollectiveRecorder() as recorder:``.

    It also sees those of autograd hooks, because autograd carries the mode into its threads. A
    thread that the program starts itself does not inherit the mode: enter the same recorder again
    there (``with recorder:``). Every torch operator inside the block takes a detour through Python,
    so do not time the block.

    Attributes:
        calls: collectives that carry data, in the order of issue.
        others: names of communication operators without data (``barrier``, ``wait_tensor``), in
            order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[CollectiveCall] = []
        self.others: list[str] = []
        self._lock = threading.Lock()  # autograd's threads record at the same time

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

        By default Dynamo refuses to run compiled code under a dispatch mode. It runs the code eager
        and remembers this for the rest of the process: every later step would also run eager.
        """
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "distlab"):
            self._record(func._schema.name, args, result)
        return result

    def _record(self, name: str, args: tuple, result: Any) -> None:
        """Note a communication operator that was called.

        Args:
            name: name in the dispatcher, such as ``c10d::allreduce_``.
            args: positional arguments.
            result: value that the operator returned.
        """
        # In place, coalesced, or with an output that is given: the payload is the same.
        plain_name = name.rstrip("_").removesuffix("_coalesced").removesuffix("_out")
        op, argument = _PAYLOADS.get(plain_name, (None, None))
        if op is None:
            payload = []
        elif argument is None:
            payload = tensors_in(result)
        else:
            payload = tensors_in(args[argument])
        if name.startswith("distlab::"):
            payload = payload[:1]  # one of the replicas
        with self._lock:
            if not payload:
                _, _, operator = name.partition("::")
                self.others.append(operator.strip("_"))
                return
            call = CollectiveCall(
                op=op,
                bytes=sum(tensor.numel() * tensor.element_size() for tensor in payload),
                dtype=payload[0].dtype,
                numel=sum(tensor.numel() for tensor in payload),
                sequence=len(self.calls),
            )
            self.calls.append(call)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value in order.

    Args:
        value: tensor, or lists, tuples, dictionaries and dataclasses of tensors.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    tensors = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf):  # torch's pytrees do not look into dataclasses
            tensors.extend(tensors_in(getattr(leaf, "__dict__", ())))
    return tensors
