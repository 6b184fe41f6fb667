"""A world of any size in one process: a process group without peers, and tensors without memory.

Fake tensors have shapes, dtypes and storages of the right size, and no memory. Collectives of
torch's fake process group return at once. The strategies are the real ones. Some things that they
do need real values or real peers. These have the following answers:

- A strategy asks the group's backend for its name. `SimulatedGroup` says NCCL (averages in the
  reduction, shards in place) or gloo.
- A pipeline asks whether a message has left, so that its memory can go. `SimulatedGroup` says yes.
- Ranks exchange objects, for example to compare their models. `collectives.gather_objects` knows
  the backend `SIMULATED`: every rank says what this one says.
- On a CPU, torch takes RMSNorm apart. On a GPU it is one kernel that keeps less, and here also
  (`_rms_norm_is_one_kernel`).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import Work

from distlab.comm.collectives import SIMULATED


@contextmanager
def fake_world(
    world_size: int, rank: int = 0, *, like_nccl: bool = True
) -> Iterator["SimulatedGroup"]:
    """Be rank `rank` of `world_size`. Tensors made inside are fake. Yields the process group.

    Args:
        world_size: number of simulated ranks.
        rank: number of this rank, from 0.
        like_nccl: True to answer as NCCL does. False to answer as gloo does: gradients are divided
            beforehand, and shards are copied.

    Raises:
        ValueError: a world size below one, or a rank outside it.
        RuntimeError: this process has already joined a process group.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: give 0 ≤ rank < world_size")
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group already; simulate in a process of its own, or "
            "destroy the group first"
        )
    # torch's testing code is slow to import, and only a simulation needs it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # torch refuses a second registration of a name in one process.
    if SIMULATED not in dist.Backend.backend_list:
        dist.Backend.register_backend(SIMULATED, _create_group, extended_api=True, devices=["cpu"])
    # torch puts its own hook around it, once per group, and never takes it off.
    excepthook = sys.excepthook
    dist.init_process_group(SIMULATED, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        world = dist.group.WORLD
        world.backend = _Backend("nccl" if like_nccl else "gloo")
        with _SharedFakeTensorMode(), _rms_norm_is_one_kernel():
            yield world
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


class MessageObserver(Protocol):
    """Observer of the messages that a `SimulatedGroup` sends."""

    def sending(self, group: "SimulatedGroup") -> AbstractContextManager[None]:
        """Return a context in which one message to the ranks of `group` is issued."""

    def traced(self, work: Work) -> Work:
        """Return a handle of the message that was just issued, to wait for instead of `work`."""


class _Backend:
    """Backend as the strategies see it: they ask for its name, and for options it does not have.

    Args:
        name: name of the backend in whose way the world answers, `nccl` or `gloo`.
    """

    options = None

    def __init__(self, name: str):
        self._name = name

    def name(self) -> str:
        """Return the name."""
        return self._name


class SimulatedGroup(dist.ProcessGroup):
    """Process group of a world of which only this rank runs.

    Its messages pass through torch's dispatcher, as those of other groups, to a fake backend, which
    returns at once. The group reports each asynchronous collective to an observer, which may return
    a handle of its own.

    The methods call `super()` themselves, not through a helper: torch's C++ looks for a method of
    the same name in the calling frame to tell this call from a new one.

    Attributes:
        backend: answers about the backend.
        observer: observer of the messages, or None.
    """

    def __init__(self, rank: int, size: int, backend: _Backend, observer: MessageObserver | None):
        super().__init__(rank, size)
        self.backend = backend
        self.observer = observer

    def _get_backend(self, device: torch.device) -> _Backend:
        return self.backend

    def allreduce(self, *arguments: Any) -> Work:
        """Issue an all-reduce."""
        with self._sending(arguments):
            work = super().allreduce(*arguments)
        return self._traced(work, arguments)

    def broadcast(self, *arguments: Any) -> Work:
        """Issue a broadcast."""
        with self._sending(arguments):
            work = super().broadcast(*arguments)
        return self._traced(work, arguments)

    # torch 2.13 renamed three methods, and torch 2.11 has only the old names. `distlab.comm` and
    # torch.distributed call the new names where they exist.
    if hasattr(dist.ProcessGroup, "all_gather_single"):

        def all_gather_single(self, *arguments: Any) -> Work:
            """Issue an all-gather."""
            with self._sending(arguments):
                work = super().all_gather_single(*arguments)
            return self._traced(work, arguments)

        def reduce_scatter_single(self, *arguments: Any) -> Work:
            """Issue a reduce-scatter."""
            with self._sending(arguments):
                work = super().reduce_scatter_single(*arguments)
            return self._traced(work, arguments)

        def all_to_all_single(self, *arguments: Any) -> Work:
            """Issue an all-to-all."""
            with self._sending(arguments):
                work = super().all_to_all_single(*arguments)
            return self._traced(work, arguments)

    else:

        def _allgather_base(self, *arguments: Any) -> Work:
            with self._sending(arguments):
                work = super()._allgather_base(*arguments)
            return self._traced(work, arguments)

        def _reduce_scatter_base(self, *arguments: Any) -> Work:
            with self._sending(arguments):
                work = super()._reduce_scatter_base(*arguments)
            return self._traced(work, arguments)

        def alltoall_base(self, *arguments: Any) -> Work:
            """Issue an all-to-all."""
            with self._sending(arguments):
                work = super().alltoall_base(*arguments)
            return self._traced(work, arguments)

    def send(self, *arguments: Any) -> Work:
        """Send to one rank. The fake handle would never say that the message has left."""
        super().send(*arguments)
        return _Sent()

    def _sending(self, arguments: tuple) -> AbstractContextManager[None]:
        if self._is_observed(arguments):
            return self.observer.sending(self)
        return nullcontext()

    def _traced(self, work: Work, arguments: tuple) -> Work:
        return self.observer.traced(work) if self._is_observed(arguments) else work

    def _is_observed(self, arguments: tuple) -> bool:
        """Return whether to report a collective. The options are the last of its arguments."""
        options = arguments[-1]
        return self.observer is not None and options.asyncOp


def _create_group(options: Any, backend_options: Any) -> SimulatedGroup:
    """Create a group for torch, which calls this for the world and for groups of some of its ranks.

    Args:
        options: `group_rank` and `group_size`, among others.
        backend_options: options of a backend, which this one does not have.
    """
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg

    backend = _Backend("nccl")
    observer = None
    if dist.is_initialized():  # a group of some ranks answers as the world does
        backend = dist.group.WORLD.backend
        observer = dist.group.WORLD.observer
    group = SimulatedGroup(options.group_rank, options.group_size, backend, observer)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    # torch dispatches a collective to the backend registered for its tensors' device. Fake tensors
    # say "cpu".
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, _create_fake_pg(options, backend_options))
    return group


class _Sent(Work):
    """Handle of a message that has left."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *timeout: Any) -> bool:
        return True


class _SharedFakeTensorMode(FakeTensorMode):
    """Mode in which a copied layer stays in the same fake world.

    `nn.TransformerEncoder` copies its layer, and so its tensors, which refer to their mode. torch
    would copy the mode also, and then refuse to mix tensors of two modes.
    """

    def __deepcopy__(self, memo: dict) -> "_SharedFakeTensorMode":
        return self


@contextmanager
def _rms_norm_is_one_kernel() -> Iterator[None]:
    """Replace ``torch.nn.functional.rms_norm`` while the block runs.

    Nothing public does this. On a CPU, the operator is taken apart before a dispatch mode sees it.
    A torch function mode would see it, but is off inside backward, where blocks are recomputed.
    """
    original = F.rms_norm
    F.rms_norm = _rms_norm
    try:
        yield
    finally:
        F.rms_norm = original


def _rms_norm(
    input: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    weight = input.new_empty(*shape) if weight is None else weight
    return _OneKernelRMSNorm.apply(input, weight)


class _OneKernelRMSNorm(torch.autograd.Function):
    """RMSNorm that moves and keeps the bytes of the fused kernel.

    The values are fake, so other operators may take its place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[: x.ndim - weight.ndim], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return x * weight  # reads x, writes the result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        # One kernel reads x and the gradient, and writes the gradient of x.
        gradient_of_x = gradient * x
        # Another kernel reads both for the gradient of the weight.
        dimensions_of_tokens = tuple(range(x.ndim - weight.ndim))
        gradient_of_weight = gradient.sum(dimensions_of_tokens).to(weight.dtype)
        return gradient_of_x, gradient_of_weight
