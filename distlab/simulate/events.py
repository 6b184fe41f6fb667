"""Events of a step in the order of the computing stream: operators, collectives, waits, memory."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.utils.flop_counter import flop_registry

from distlab.measure.collectives import CollectiveCall, CollectiveRecorder, tensors_in
from distlab.simulate.world import SimulatedGroup
from distlab.theory.operators import Compute

CATEGORIES = ("parameters", "buckets", "gathered", "activations", "backward", "optimizer")
# Phase in which a storage was made → its category.
_CATEGORY_OF_PHASE = {
    "construction": "buckets",
    "forward": "activations",
    "backward": "backward",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class GroupCall(CollectiveCall):
    """A collective among some of all ranks.

    Args:
        ranks: number of ranks in the group.
        stride: difference of the numbers of two neighbours in the group. 1 for a group of
            neighbours. The size of a group for ranks that hold the same shard in different groups.
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

    Three categories say what memory is: `parameters`, `buckets` (made at construction) and
    `gathered` (made at construction, freed and refilled). Three say when it was made:
    `activations`, `backward` (gradients and temporaries) and `optimizer`.
    """

    phase: str
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.by_category.values())


class EventLog(CollectiveRecorder):
    """Recorder of the events of everything that runs inside `with log.recording():`.

    Attributes:
        phase: `construction`, `forward` or `optimizer`, set by the caller. The log finds `backward`
            by itself.
        items: `Compute`, `CollectiveCall` (handed to the communication stream) and `Wait`, in
            order.
        memory: a moment per item after which memory had changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "construction"
        self.items: list[Compute | CollectiveCall | Wait] = []
        self.memory: list[MemoryMoment] = []
        # Group of the message that is being issued and that has a handle of ours, else None.
        self._sending_to: SimulatedGroup | None = None
        self._alive = dict.fromkeys(CATEGORIES, 0)  # category → bytes
        self._sizes: dict[int, tuple[str, int]] = {}  # storage → (category, bytes)
        self._changed = False  # whether memory has changed since the last moment

    @contextmanager
    def recording(self, group: SimulatedGroup | None = None) -> Iterator["EventLog"]:
        """Record operators (by a dispatch mode), waits of collectives, and resized storages.

        Args:
            group: world whose messages are traced, and of all groups that are made meanwhile.
                Without it, every collective counts as one that blocks.
        """
        if group is not None:
            group.observer = self
        try:
            with _resizes_are_seen(self._resize), self:
                yield self
        finally:
            if group is not None:
                group.observer = None

    def own_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Count the memory of these parameters as `parameters` from now on."""
        for parameter in parameters:
            key = id(parameter.untyped_storage())
            # A parameter made outside of the recording has no entry, and stays uncounted.
            if key in self._sizes:
                _, size = self._sizes[key]
                self._keep(key, "parameters", size)

    def alive(self) -> dict[str, int]:
        """Return the bytes that are alive now, by category."""
        return dict(self._alive)

    @property
    def current_phase(self) -> str:
        """Return `backward` inside a backward, else the phase that was set."""
        return "backward" if torch._C._current_graph_task_id() != -1 else self.phase

    # -- operators and collectives -----------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:
            # The C++ code asks fake tensors for their device twice per operator. That is the answer
            # which the fake mode would give.
            return args[0].device
        # The recorder's own dispatch appends a call if the operator is a collective.
        before = len(self.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.calls) > before:
            call = self.calls[-1]
            self.items.append(call)
            if self._sending_to is None:  # no caller holds its handle: it blocks
                self.items.append(Wait(call.sequence))
        else:
            self._add_operator(func, args, kwargs or {}, result)
        for tensor in tensors_in(result):
            self._see(tensor)
        if self._changed:
            self._changed = False
            self.memory.append(MemoryMoment(self.current_phase, self.alive()))
        return result

    def _add_operator(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        # Views move nothing. Other namespaces are torch's bookkeeping, for example `prim` and
        # `c10d`.
        if func.namespace not in ("aten", "distlab_kernels") or func.is_view:
            return
        name = func.overloadpacket.__name__
        if name in _FREE:
            return
        flops = _flops(func, args, kwargs, result)
        moved = _bytes_moved(func, args, kwargs, result)
        if flops or moved:
            self.items.append(Compute(name, flops, moved, self.current_phase))

    @contextmanager
    def sending(self, group: SimulatedGroup) -> Iterator[None]:
        """Take the collective that is issued in the block for one that does not block.

        `group` calls this.
        """
        self._sending_to = group
        try:
            yield
        finally:
            self._sending_to = None

    def traced(self, work: Work) -> "_TracedWork":
        """Return a handle of the last message, whose `wait()` is an event."""
        return _TracedWork(work, self, self.calls[-1].sequence)

    def _record(self, name: str, args: tuple, result: Any) -> None:
        before = len(self.calls)
        super()._record(name, args, result)
        group = self._sending_to
        # A collective of all ranks needs no group, and one that blocks has no handle of ours.
        if len(self.calls) == before or group is None or group.size() == dist.get_world_size():
            return
        ranks = dist.get_process_group_ranks(group)
        call = self.calls[-1]
        self.calls[-1] = GroupCall(
            op=call.op,
            bytes=call.bytes,
            dtype=call.dtype,
            numel=call.numel,
            sequence=call.sequence,
            ranks=len(ranks),
            stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
        )

    # -- memory ------------------------------------------------------------------------------------

    def _see(self, tensor: Tensor) -> None:
        """Note the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        # A tensor on meta has no memory on the GPU either.
        if tensor.is_meta or id(storage) in self._sizes:
            return
        self._keep(id(storage), _CATEGORY_OF_PHASE[self.current_phase], storage.nbytes())
        # An id is reused after its storage dies, so the entry has to go at that moment.
        weakref.finalize(storage, self._free, id(storage))

    def _keep(self, key: int, category: str, size: int) -> None:
        """Note that a storage, new or not, has `size` bytes of `category` from now on."""
        category_before, size_before = self._sizes.get(key, (category, 0))
        self._alive[category_before] -= size_before
        self._alive[category] += size
        self._sizes[key] = (category, size)
        self._changed = True

    def _free(self, key: int) -> None:
        category, size = self._sizes.pop(key)
        self._alive[category] -= size
        self._changed = True

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if id(storage) not in self._sizes:
            return
        category, _ = self._sizes[id(storage)]
        # FSDP frees and refills the buffers of gathered parameters this way.
        if category == "buckets":
            category = "gathered"
        self._keep(id(storage), category, size)


@contextmanager
def _resizes_are_seen(on_resize: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Replace ``torch.UntypedStorage.resize_`` while the block runs, and report each call.

    Nothing public does this. Strategies free and refill memory by resizing its storage, and a
    storage has neither hooks nor operators that a dispatch mode could see.

    Args:
        on_resize: function that is called with a storage and its new size in bytes.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        on_resize(storage, size)
        return result

    torch.UntypedStorage.resize_ = resized
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


class _TracedWork:
    """A collective's handle whose `wait()` is an event.

    Args:
        work: handle of torch.
        log: log of the events.
        sequence: number of the collective.
    """

    def __init__(self, work: Work, log: EventLog, sequence: int):
        self._work = work
        self._log = log
        self._sequence = sequence

    def wait(self, *args: Any) -> Any:
        # The event stands where the computing stream waits, not where the collective was issued.
        self._log.items.append(Wait(self._sequence))
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_DEVICE = torch.ops.prim.device.default

# Names of operators that reserve memory or read a shape, and launch nothing.
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


# Names of operators that write their first argument without reading it.
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_"}


def _flops(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """Return the FLOPs of an operator, 0 if it has no matmul."""
    packet = func.overloadpacket
    name = packet.__name__
    if "scaled_dot_product" not in name:
        formula = flop_registry.get(packet)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    # Each of the B·H·T·D elements of the query meets T keys in a matmul: 2·B·H·T·D·T. Forward makes
    # two matmuls (scores, values). Backward makes the scores again, and four for the gradients.
    if name.endswith("backward"):
        query, key = args[1], args[2]
        matmuls = 5
    else:
        query, key = args[0], args[1]
        matmuls = 2
    matmul_flops = 2 * query.numel() * key.shape[-2]
    return matmul_flops * matmuls // 2  # causal: half of the scores


def _bytes_moved(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """Return the bytes moved: every input is read once and every output written once.

    Arguments that are changed in place are both.
    """
    overwrites = func.overloadpacket.__name__ in _OVERWRITES
    inputs = args[1:] if overwrites else args
    moved = 0
    for tensor in tensors_in((inputs, kwargs)):
        moved += _size(tensor)
    # Not strict: arguments that have defaults may be missing from `args`.
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in tensors_in(value):
                moved += _size(tensor)
    # A result in the memory of an argument is a view of it, or was counted as one changed in place.
    storages_of_arguments = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
    for tensor in tensors_in(result):
        if id(tensor.untyped_storage()) not in storages_of_arguments:
            moved += _size(tensor)
    return moved


def _size(tensor: Tensor) -> int:
    """Return the bytes of distinct elements: an expanded tensor is as large as the one it views."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
