"""Events of a step in the order of the computing stream: operators, collectives, waits, memory."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils.flop_counter import flop_registry

from distlab.comm import collectives
from distlab.measure.collectives import CollectiveCall, CollectiveRecorder, tensors_in
from distlab.measure.nvtx import MESSAGES
from distlab.theory.operators import Compute

CATEGORIES = ("parameters", "buckets", "gathered", "activations", "backward", "optimizer")
_BORN = {
    "construction": "buckets",
    "forward": "activations",
    "backward": "backward",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class GroupCall(CollectiveCall):
    """A collective among `ranks` of all ranks, whose numbers are `stride` apart.

    Of neighbours that is 1; of those that hold the same shard in different groups the size of a
    group.
    """

    ranks: int = 1
    stride: int = 1


@dataclass(frozen=True)
class Wait:
    """The computing stream waits for collective number `sequence`."""

    sequence: int


@dataclass(frozen=True)
class MemoryMoment:
    """Bytes alive after an item of this phase, by category (`CATEGORIES`).

    `parameters`, `buckets` (made at construction) and `gathered` (made at construction, freed and
    refilled) are told apart by what they are; `activations`, `backward` (gradients and temporaries)
    and `optimizer` by when they were made.
    """

    phase: str
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.by_category.values())


class EventLog(CollectiveRecorder):
    """Records the events of everything that runs inside `with log.recording():`.

    Attributes:
        phase: `construction`, `forward` or `optimizer`, set by the caller; `backward` shows by
            itself.
        items: `Compute`, `CollectiveCall` (handed to the communication stream) and `Wait` in order.
        memory: a moment per item after which memory had changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "construction"
        self.items: list[Compute | CollectiveCall | Wait] = []
        self.memory: list[MemoryMoment] = []
        self._through_seam = False
        self._group: ProcessGroup | None = None  # of the collective that is being issued
        self._alive = dict.fromkeys(CATEGORIES, 0)
        self._sizes: dict[int, tuple[str, int]] = {}  # storage → (category, bytes)
        self._changed = False

    @contextmanager
    def recording(self) -> Iterator["EventLog"]:
        """Record operators (by a dispatch mode), waits of collectives and resized storages."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resize(storage, size)
            return result

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
            for name in MESSAGES:
                wrapped = self._at_seam(getattr(collectives, name))
                stack.enter_context(mock.patch.object(collectives, name, wrapped))
            stack.enter_context(self)
            yield self

    def own_parameters(self, parameters: Iterator[Tensor]) -> None:
        """Count the memory of these parameters as `parameters` from now on."""
        for parameter in parameters:
            key = id(parameter.untyped_storage())
            if key in self._sizes:
                self._keep(key, "parameters", self._sizes[key][1])

    @property
    def current_phase(self) -> str:
        """Return `backward` inside a backward, else the phase that was set."""
        return "backward" if torch._C._current_graph_task_id() != -1 else self.phase

    # -- operators and collectives -------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:
            # The C++ code asks fake tensors for their device twice per operator. That is the answer
            # which the fake mode would give.
            return args[0].device
        before = len(self.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.calls) > before:
            self.items.append(self.calls[-1])
            if not self._through_seam:  # nobody holds its handle: it blocks
                self.items.append(Wait(self.calls[-1].sequence))
        else:
            self._add_operator(func, args, kwargs or {}, result)
        for tensor in tensors_in(result):
            self._see(tensor)
        if self._changed:
            self._changed = False
            self.memory.append(MemoryMoment(self.current_phase, dict(self._alive)))
        return result

    def _add_operator(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if (
            func.namespace not in ("aten", "distlab_kernels")
            or func.is_view
            or func.overloadpacket.__name__ in _FREE
        ):
            return
        flops = _flops(func, args, kwargs, result)
        moved = _bytes_moved(func, args, kwargs, result)
        if flops or moved:
            name = func.overloadpacket.__name__
            self.items.append(Compute(name, flops, moved, self.current_phase))

    def _at_seam(self, function: Any) -> Any:
        def issue(*args: Any, **kwargs: Any) -> "_TracedWork":
            self._through_seam = True
            self._group = next(
                (each for each in (*args, *kwargs.values()) if isinstance(each, ProcessGroup)), None
            )
            try:
                work = function(*args, **kwargs)
            finally:
                self._through_seam, self._group = False, None
            return _TracedWork(work, self, self.calls[-1].sequence)

        return issue

    def _record(self, name: str, args: tuple, result: Any) -> None:
        before = len(self.calls)
        super()._record(name, args, result)
        if (
            len(self.calls) > before
            and self._group is not None
            and self._group.size() < dist.get_world_size()
        ):
            ranks = dist.get_process_group_ranks(self._group)
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            self.calls[-1] = GroupCall(**vars(self.calls[-1]), ranks=len(ranks), stride=stride)

    # -- memory --------------------------------------------------------------------------------------------

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # What says it is on meta has no memory on the GPU either.
        if not tensor.is_meta and id(storage) not in self._sizes:
            self._keep(id(storage), _BORN[self.current_phase], storage.nbytes())
            weakref.finalize(storage, self._free, id(storage))

    def _keep(self, key: int, category: str, size: int) -> None:
        """Note that a storage, new or not, has `size` bytes of `category` from now on."""
        before, held = self._sizes.get(key, (category, 0))
        self._alive[before] -= held
        self._alive[category] += size
        self._sizes[key] = (category, size)
        self._changed = True

    def _free(self, key: int) -> None:
        category, size = self._sizes.pop(key)
        self._alive[category] -= size
        self._changed = True

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if id(storage) in self._sizes:
            category = self._sizes[id(storage)][0]
            self._keep(id(storage), "gathered" if category == "buckets" else category, size)


class _TracedWork:
    """A collective's handle whose `wait()` is an event."""

    def __init__(self, work: Work, log: EventLog, sequence: int):
        self._work, self._log, self._sequence = work, log, sequence

    def wait(self, *args: Any) -> Any:
        self._log.items.append(Wait(self._sequence))
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_DEVICE = torch.ops.prim.device.default

# They reserve memory or read a shape, and launch nothing.
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_local_scalar_dense",
    "_unsafe_view",
}


# Their first argument is written and not read.
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_"}


def _flops(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    packet = func.overloadpacket
    if "scaled_dot_product" in packet.__name__:
        # Causal: half of the scores. Backward makes the scores again and four matmuls where forward
        # makes two.
        is_backward = packet.__name__.endswith("backward")
        query, key = (args[1], args[2]) if is_backward else (args[0], args[1])
        matmul = 2 * query.numel() * key.shape[-2]
        return matmul * (5 if is_backward else 2) // 2
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _bytes_moved(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """Return the bytes moved: every input is read once and every output written once.

    Arguments that are changed in place are both.
    """
    name = func.overloadpacket.__name__
    moved = sum(_size(tensor) for tensor in tensors_in((args[name in _OVERWRITES :], kwargs)))
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            moved += sum(_size(tensor) for tensor in tensors_in(value))
    read = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
    return moved + sum(_size(t) for t in tensors_in(result) if id(t.untyped_storage()) not in read)


def _size(tensor: Tensor) -> int:
    """Return the bytes of distinct elements: an expanded tensor is as large as the one it views."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
