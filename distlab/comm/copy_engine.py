"""Collectives by copy engines: transfers between GPUs that do not use their multiprocessors.

NCCL's kernels occupy thread blocks for as long as they send, which slows down matmuls that run at
the same time. A GPU can also read and write its neighbours' memory over NVLink with its copy
engines. Every tensor is cut into N equal chunks, and rank r averages chunk r:

    ready      all     every rank's tensor is complete
    pull       copies  chunk r of every peer → staging                  (N−1)/N of the bytes come in
    average    SMs     chunk r ← (chunk r + Σ staging)/N
    push       copies  chunk r → every peer                             (N−1)/N of the bytes go out
    arrived    all     once, after the last tensor

Pull and average are a reduce-scatter, and push is an all-gather. They send the same number of bytes
per link as those of a ring's all-reduce. Each takes one hop, because the switch connects every pair
of GPUs. Each chunk is averaged by one rank, so that all ranks get the same bits.

The tensors are in symmetric memory (`torch.distributed._symmetric_memory`), which torch's caching
allocator does not count. Multicast is not used.
"""

import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import collectives

ALIGNMENT = 512  # bytes to which each tensor's first address is rounded up
_rendezvous_count = 0  # number of rendezvous of this process, in all of its groups

# Transfers are operators, so that instruments at torch's dispatcher see one collective and not its
# copies.
_library = torch.library.Library("distlab", "DEF")
_library.define(
    "all_reduce_mean_by_copy(Tensor(a!)[] replicas, Tensor(b!) staging, int rank) -> ()"
)
_library.define(
    "reduce_scatter_mean_by_copy(Tensor(a!)[] replicas, Tensor(b!) staging, int rank) -> ()"
)
_library.define("all_gather_by_copy(Tensor(a!)[] replicas, int rank) -> ()")


@torch.library.impl(_library, "all_reduce_mean_by_copy", "CompositeExplicitAutograd")
def _all_reduce_mean_by_copy(replicas: list[Tensor], staging: Tensor, rank: int) -> None:
    """Average one chunk over all ranks' replicas of a tensor and copy the mean to every replica.

    Args:
        replicas: `(N·n,)` on each of the N ranks.
        staging: `(N−1, ≥ n)` on this rank.
        rank: number of this rank and of its chunk.
    """
    _reduce_scatter_mean_by_copy(replicas, staging, rank)
    _all_gather_by_copy(replicas, rank)


@torch.library.impl(_library, "reduce_scatter_mean_by_copy", "CompositeExplicitAutograd")
def _reduce_scatter_mean_by_copy(replicas: list[Tensor], staging: Tensor, rank: int) -> None:
    """Average one chunk over all ranks' replicas of a tensor, in this rank's replica."""
    # Imported here because it needs Triton, which not every user of this package has.
    from kernels.average import average_into

    own, theirs = _chunks(replicas, rank)
    arrived = staging[:, : own.numel()]
    for row, chunk in zip(arrived, theirs, strict=True):
        row.copy_(chunk)
    average_into(own, arrived, 1.0 / len(replicas))


@torch.library.impl(_library, "all_gather_by_copy", "CompositeExplicitAutograd")
def _all_gather_by_copy(replicas: list[Tensor], rank: int) -> None:
    """Copy this rank's chunk to all other replicas."""
    own, theirs = _chunks(replicas, rank)
    for chunk in theirs:
        chunk.copy_(own)


def _chunks(replicas: list[Tensor], rank: int) -> tuple[Tensor, list[Tensor]]:
    """Return chunk `rank` of this rank's replica, and of the others, the next neighbour's first."""
    count = len(replicas)
    theirs = []
    # Each rank begins with its next neighbour, so that no two of them begin with the same GPU.
    for step in range(1, count):
        peer = (rank + step) % count
        theirs.append(replicas[peer].chunk(count)[rank])
    return replicas[rank].chunk(count)[rank], theirs


class CopyEngineTensors:
    """Tensors of all ranks of one host, which copy engines average and gather.

    Args:
        numels: number of elements of each tensor, multiples of the group's size.
        dtypes: dtype of each tensor.
        device: GPU of this rank.
        group: process group on NCCL, with all ranks on one host and GPUs that reach each other's
            memory.

    Attributes:
        tensors: 1-D tensors, zeros at first. Fill one, then start a collective of it.
        num_bytes: bytes on this GPU in addition to those that the caching allocator counts.

    Raises:
        ValueError: no CUDA device, several hosts, or GPUs without access to each other (on every
            rank).
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        group: ProcessGroup,
    ):
        check_copy_engines(device, group)
        self._rank = group.rank()
        ranks = group.size()
        # Tensors are stored one after the other in a single block of memory on each rank.
        sizes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
        starts = []
        self.num_bytes = 0
        for size in sizes:
            starts.append(self.num_bytes)
            self.num_bytes += _aligned(size)
        self._memory = _symmetric_memory(self.num_bytes, device, group)
        blocks = []
        for rank in range(ranks):
            blocks.append(self._memory.get_buffer(rank, (self.num_bytes,), torch.uint8))
        # Padding is averaged like gradients, and no gradient ever fills it.
        blocks[self._rank].zero_()
        # For each tensor, its memory on every rank.
        self._replicas: list[list[Tensor]] = []
        for start, size, dtype in zip(starts, sizes, dtypes, strict=True):
            end = start + size
            self._replicas.append([block[start:end].view(dtype) for block in blocks])
        self.tensors = [replicas[self._rank] for replicas in self._replicas]
        self._stream = collectives.communication_stream(device)
        # Room for the chunk of every peer. All tensors use it in turn.
        staging_bytes = _aligned(-(-max(sizes, default=0) // ranks))
        self._staging = torch.empty(ranks - 1, staging_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._in_flight = False  # True from the start of a collective to the next `wait`

    def all_reduce_mean(self, number: int) -> "CopyEngineTensors":
        """Begin to average tensor `number` over the ranks, once the current stream has filled it.

        All ranks must start the same collectives in the same order.

        Returns:
            An object to `wait()` for.
        """
        with self._started():
            staging = self._staging.view(self.tensors[number].dtype)
            torch.ops.distlab.all_reduce_mean_by_copy(self._replicas[number], staging, self._rank)
        return self

    def reduce_scatter_mean(self, number: int) -> "CopyEngineTensors":
        """Begin to average this rank's slice of tensor `number`; see `all_reduce_mean`."""
        with self._started():
            staging = self._staging.view(self.tensors[number].dtype)
            torch.ops.distlab.reduce_scatter_mean_by_copy(
                self._replicas[number], staging, self._rank
            )
        return self

    def all_gather(self, number: int) -> "Arrival":
        """Begin to copy this rank's slice of tensor `number` to the others.

        Returns:
            An object to `wait()` for, which waits for this tensor alone.
        """
        with self._started():
            torch.ops.distlab.all_gather_by_copy(self._replicas[number], self._rank)
            # This tensor is complete when all ranks have pushed their slices.
            self._memory.barrier()
            return Arrival(self._stream.record_event(), self._device)

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Let what is launched inside run on the stream of transfers, once all ranks are there."""
        # The tensor is complete when the kernels queued so far are. The host does not wait for
        # them.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # On the GPU: a peer reads a chunk only when its owner has filled it, and writes one
            # only when its reader is done.
            self._memory.barrier()
            yield
        self._in_flight = True

    def wait(self) -> None:
        """Let the current stream wait until every started tensor is complete on every rank."""
        if not self._in_flight:
            return
        self._in_flight = False
        with torch.cuda.stream(self._stream):
            # A rank's last push may still be under way to a peer whose own work is done.
            self._memory.barrier()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@dataclass(frozen=True)
class Arrival:
    """A tensor that is complete on every rank when the GPU comes to this event.

    Attributes:
        event: event after the tensor's last transfer.
        device: GPU of this rank.
    """

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Let the current stream wait for the tensor."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


def check_copy_engines(device: torch.device, group: ProcessGroup) -> None:
    """Check that the GPUs of all ranks can reach each other's memory. A collective.

    Raises:
        ValueError: they cannot. All ranks raise it.
    """
    answers = collectives.gather_objects(
        (_reaches_all_gpus(device), str(device), socket.gethostname()), group
    )
    reaches_all = [reaches for reaches, _, _ in answers]
    devices = [name for _, name, _ in answers]
    hosts = {host for _, _, host in answers}
    if len(hosts) > 1 or not all(reaches_all):
        raise ValueError(
            "copy engines reach the memory of NVIDIA GPUs of one host that are linked to each "
            f"other; here the ranks have {', '.join(devices)} on {len(hosts)} host(s): use "
            "BucketedDDP, whose collectives go anywhere"
        )


def _reaches_all_gpus(device: torch.device) -> bool:
    """Return whether a device is a GPU that can access the memory of all GPUs of this host."""
    if device.type != "cuda":
        return False
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _aligned(num_bytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _symmetric_memory(num_bytes: int, device: torch.device, group: ProcessGroup) -> Any:
    """Allocate memory of this size on every rank and map all of it on every rank. A collective.

    Raises:
        torch.OutOfMemoryError: the memory does not fit on a rank. All ranks raise it.
    """
    # torch counts the rendezvous of a process over all of its groups. Ranks whose counts differ
    # would look for each other under different keys of the store until the timeout. A rank is
    # behind if the others have had a rendezvous without it. It catches up with some of its own.
    counts = collectives.gather_objects(_rendezvous_count, group)
    for _ in range(max(counts) - _rendezvous_count):
        # On gloo, because only the group's store is needed. NCCL would split the communicator of
        # all ranks, and wait for all of them.
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        _rendezvous(_allocated(1, device), alone, uuid.uuid4().hex)
        dist.destroy_process_group(alone)
    # Symmetric memory comes from the driver, which cannot use the caching allocator's reserve.
    torch.cuda.empty_cache()
    memory = collectives.if_it_fits(lambda: _allocated(num_bytes, device), device, group)
    if memory is None:
        # All ranks raise, because a rank in a rendezvous would wait for the one without room.
        raise torch.OutOfMemoryError(f"no room for {num_bytes / 2**30:.1f} GiB of symmetric memory")
    unique = collectives.gather_objects(uuid.uuid4().hex, group)[0]
    return _rendezvous(memory, group, unique)


def _allocated(num_bytes: int, device: torch.device) -> Tensor:
    """Return symmetric memory that is not mapped yet."""
    from torch.distributed import _symmetric_memory as symmetric  # takes a while to import

    return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)


def _rendezvous(memory: Tensor, group: ProcessGroup, unique: str) -> Any:
    """Map a group's memory on all of its ranks. A collective.

    Args:
        memory: memory of this rank that is not mapped yet.
        group: ranks that take part.
        unique: name that no group of this process has used before, the same on all ranks.
    """
    from torch.distributed import _symmetric_memory as symmetric  # takes a while to import

    # A new name each time: torch remembers the store of a group by the group's name for the life of
    # the process. For a later group of the same name, such as the default group after it was left
    # and joined again, it would look for the peers in the wrong store.
    global _rendezvous_count
    _rendezvous_count += 1
    name = f"copy-engine-{unique}"
    torch._C._distributed_c10d._register_process_group(name, group)
    return symmetric.rendezvous(memory, name)
