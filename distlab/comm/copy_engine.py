"""All-reduce by copy engines: transfers between GPUs that do not use their multiprocessors.

NCCL's kernels occupy thread blocks for as long as they send, which slows down matmuls that run at
the same time. A GPU can also read and write its neighbours' memory over NVLink with its copy
engines. Every tensor is cut into N equal chunks, and rank r averages chunk r:

    ready      all     every rank's tensor is complete
    pull       copies  chunk r of every peer → staging                  (N−1)/N of the bytes come in
    average    SMs     chunk r ← (chunk r + Σ staging)/N
    push       copies  chunk r → every peer                             (N−1)/N of the bytes go out
    arrived    all     once, after the last tensor

These are the reduce-scatter and the all-gather of a ring's all-reduce, with the same number of
bytes per link, but each in one hop, because the switch connects every pair of GPUs. One rank
averages each chunk, so that all ranks get the same bits.

The tensors are in symmetric memory (`torch.distributed._symmetric_memory`), which torch's caching
allocator does not count. Multicast is not used.
"""

import socket
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import collectives

ALIGNMENT = 512  # bytes, of each tensor's beginning
_rendezvous_count = 0  # of this process, in any group

# An operator of its own, so that instruments at torch's dispatcher see one all-reduce and not its
# copies.
_library = torch.library.Library("distlab", "DEF")
_library.define(
    "all_reduce_mean_by_copy(Tensor(a!)[] replicas, Tensor(b!) staging, int rank) -> ()"
)


@torch.library.impl(_library, "all_reduce_mean_by_copy", "CompositeExplicitAutograd")
def _all_reduce_mean_by_copy(replicas: list[Tensor], staging: Tensor, rank: int) -> None:
    """Rank `rank`'s part: chunk `rank` of the mean of all replicas `(N·n,)`, given to all.

    `staging`: `(N−1, ≥ n)`.
    """
    # imports Triton, which not every user of this package has
    from kernels.average import average_into

    count = len(replicas)
    own, *theirs = (replicas[(rank + step) % count].chunk(count)[rank] for step in range(count))
    arrived = staging[:, : own.numel()]
    for row, chunk in zip(arrived, theirs, strict=True):
        row.copy_(chunk)
    average_into(own, arrived, 1.0 / count)
    for chunk in theirs:
        chunk.copy_(own)


class CopyEngineAllReduce:
    """Tensors that all ranks of one host hold, and their means by copy engines.

    Args:
        numels: number of elements of each tensor, multiples of the group's size.
        dtypes: dtype of each tensor.
        device: GPU of this rank.
        group: process group on NCCL, with all ranks on one host and GPUs that reach each other's
            memory.

    Attributes:
        tensors: 1-D tensors, zeros at first. Fill one, then `start` it.
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
        sizes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
        starts, self.num_bytes = [], 0
        for size in sizes:
            starts.append(self.num_bytes)
            self.num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        self._rank, ranks = group.rank(), range(group.size())
        self._memory = _symmetric_memory(self.num_bytes, device, group)
        replicas = [self._memory.get_buffer(rank, (self.num_bytes,), torch.uint8) for rank in ranks]
        replicas[self._rank].zero_()
        self._replicas = [
            [replica[start : start + size].view(dtype) for replica in replicas]
            for start, size, dtype in zip(starts, sizes, dtypes, strict=True)
        ]
        self.tensors = [replica[self._rank] for replica in self._replicas]
        self._stream = collectives.communication_stream(device)
        staged = -(-max(sizes, default=0) // group.size() // ALIGNMENT) * ALIGNMENT
        self._staging = torch.empty(group.size() - 1, staged, dtype=torch.uint8, device=device)
        self._device = device
        self._arriving = False

    def start(self, number: int) -> "CopyEngineAllReduce":
        """Begin to average tensor `number` over the ranks, once the current stream has filled it.

        All ranks must call it in the same order.

        Returns:
            An object to `wait()` for.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._memory.barrier()
            staging = self._staging.view(self.tensors[number].dtype)
            torch.ops.distlab.all_reduce_mean_by_copy(self._replicas[number], staging, self._rank)
        self._arriving = True
        return self

    def wait(self) -> None:
        """Let the current stream wait until every started tensor is complete on every rank."""
        if not self._arriving:
            return
        self._arriving = False
        with torch.cuda.stream(self._stream):
            self._memory.barrier()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def check_copy_engines(device: torch.device, group: ProcessGroup) -> None:
    """Refuse where GPUs cannot reach each other's memory. A collective.

    Raises:
        ValueError: the same on every rank.
    """
    reachable = device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(device, other)
        for other in range(torch.cuda.device_count())
        if other != device.index
    )
    answers = collectives.gather_objects((reachable, str(device), socket.gethostname()), group)
    hosts = {host for _, _, host in answers}
    if len(hosts) > 1 or not all(reached for reached, _, _ in answers):
        raise ValueError(
            "copy engines reach the memory of NVIDIA GPUs of one host that are linked to each other; here the ranks "
            f"have {', '.join(name for _, name, _ in answers)} on {len(hosts)} host(s): use BucketedDDP, whose "
            "collectives go anywhere"
        )


def _symmetric_memory(num_bytes: int, device: torch.device, group: ProcessGroup) -> Any:
    """Memory of this size on every rank, each mapped by all. A collective.

    torch counts the rendezvous of a process over all of its groups, and ranks whose counts differ
    would look for each other under different keys of the store until the timeout. A rank that is
    behind, because the others have had a rendezvous without it, catches up first, with rendezvous
    of its own.

    Raises:
        torch.OutOfMemoryError: on every rank, if the memory does not fit on one.
    """
    counts = collectives.gather_objects(_rendezvous_count, group)
    for _ in range(max(counts) - _rendezvous_count):
        # NCCL would split the communicator of all ranks for it, and wait for them; only the group's
        # store is needed.
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        _rendezvous(_allocated(1, device), alone, uuid.uuid4().hex)
        dist.destroy_process_group(alone)
    # the driver, which is asked, does not see what the caching allocator holds in reserve
    torch.cuda.empty_cache()
    memory = collectives.if_it_fits(lambda: _allocated(num_bytes, device), device, group)
    if memory is None:  # nobody waits in a rendezvous for a rank that has no room
        raise torch.OutOfMemoryError(f"no room for {num_bytes / 2**30:.1f} GiB of symmetric memory")
    return _rendezvous(memory, group, collectives.gather_objects(uuid.uuid4().hex, group)[0])


def _allocated(num_bytes: int, device: torch.device) -> Tensor:
    """Symmetric memory that is not mapped yet."""
    from torch.distributed import _symmetric_memory as symmetric  # takes a while to import

    return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)


def _rendezvous(memory: Tensor, group: ProcessGroup, unique: str) -> Any:
    """Hold one rendezvous of a group's ranks, under a name that no group here has used before."""
    from torch.distributed import _symmetric_memory as symmetric

    # torch remembers the store of a group by the group's name for the life of the process, and
    # would look for the peers of a later group of the same name (the default group, left and joined
    # again) in the wrong one.
    global _rendezvous_count
    _rendezvous_count += 1
    name = f"copy-engine-{unique}"
    torch._C._distributed_c10d._register_process_group(name, group)
    return symmetric.rendezvous(memory, name)
