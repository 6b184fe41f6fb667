"""Groups of a job's ranks: its first ranks as a smaller job, and a mesh of shards and replicas."""

import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from distlab.comm import collectives
from distlab.comm.context import RankContext


def doubling_sizes(world_size: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and the world size itself."""
    sizes = [2**k for k in range(world_size.bit_length()) if 2**k < world_size]
    return (*sizes, world_size)


@contextmanager
def first_ranks(context: RankContext, ranks: int) -> Iterator[RankContext | None]:
    """Yield this rank's context in the group of the first `ranks` ranks. None for the others.

    Every rank of `context` calls it, with the same number, and those left out wait at the end of
    the block (or beyond, at their next collective), for at most the context's timeout if they have
    nothing to do: see `rest`.

    Raises:
        ValueError: fewer than one rank, or more than there are.
    """
    if not 1 <= ranks <= context.world_size:
        raise ValueError(f"ranks={ranks}: between 1 and the {context.world_size} of this job")
    if ranks == context.world_size:
        yield context
        return
    group = _new_group(range(ranks), context.backend, timedelta(seconds=context.timeout_s))
    is_member = context.rank < ranks
    try:
        yield replace(context, world_size=ranks, group=group) if is_member else None
    finally:
        if is_member:
            dist.destroy_process_group(group)


def rest(context: RankContext, name: str, busy_ranks: int) -> None:
    """Wait until the first `busy_ranks` ranks have come here, without a kernel that spins on a GPU.

    Args:
        name: name of this rendezvous, not used before in this job.

    Raises:
        RuntimeError: they did not come within half an hour.
    """
    store = dist.distributed_c10d._get_default_store()
    if context.rank < busy_ranks and store.add(f"rest/{name}", 1) == busy_ranks:
        store.set(f"rest/{name}/done", "yes")
    store.wait([f"rest/{name}/done"], timedelta(minutes=30))


# -- a mesh ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshGroups:
    """Groups of this rank in a mesh of R replicas × S ranks each.

        rank   0 1 2 3 │ 4 5 6 7      `shard` of rank 5: 4 5 6 7, such as the GPUs of its host
               host 0  │ host 1       `replicate` of rank 5: 1 5, which hold the same shard

    Args:
        world: all R·S ranks.
        replicate: the R ranks at this rank's place of every shard group.
        shard: the S ranks of this rank's shard group; `world` itself without a mesh, and where R =
            1.
    """

    world: ProcessGroup
    replicate: ProcessGroup | None
    shard: ProcessGroup

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard, R."""
        return 1 if self.replicate is None else self.replicate.size()


def resolve_mesh(mesh: DeviceMesh | None, process_group: ProcessGroup | None) -> MeshGroups:
    """Return the groups of a two-dimensional mesh, (replicate, shard) as in FSDP2.

    Without a mesh, all ranks form one group.

    Args:
        process_group: group of all ranks of the mesh. Default: the default group.

    Raises:
        TypeError: the mesh is not a DeviceMesh.
        ValueError: the mesh is not two-dimensional, or has other ranks than the process group.
    """
    world = collectives.resolve_group(process_group)
    if mesh is None:
        return MeshGroups(world, None, world)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh={mesh!r}: give a torch.distributed.device_mesh.DeviceMesh, such as {_EXAMPLE}"
        )
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dimension(s): give two, (replicas, ranks that share a model), such as {_EXAMPLE}; "
            "for one group of ranks leave mesh out and give process_group"
        )
    ranks = set(dist.get_process_group_ranks(world))
    within = mesh.get_coordinate() is not None and all(
        ranks.issuperset(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in (0, 1)
    )
    if not within or math.prod(mesh.shape) != len(ranks):
        raise ValueError(
            f"mesh of {' × '.join(map(str, mesh.shape))} ranks does not hold the process group's ranks "
            f"{sorted(ranks)}: give a mesh of all of them, or the process_group of the mesh's ranks"
        )
    replicate, shard = mesh.get_group(0), mesh.get_group(1)
    return MeshGroups(
        world,
        replicate if replicate.size() > 1 else None,
        world if replicate.size() == 1 else shard,
    )


_EXAMPLE = 'init_device_mesh("cuda", (hosts, gpus_per_host))'
# By group and shard size or partition; None where it is the group itself, which would then never be
# let go.
_known: "WeakKeyDictionary[ProcessGroup, dict[Any, list[ProcessGroup | None]]]" = (
    WeakKeyDictionary()
)


def hybrid_mesh(group: ProcessGroup, shard_size: int | None = None) -> DeviceMesh:
    """Make a mesh of all ranks in which each `shard_size` neighbours are a shard group.

    Its groups are made once.

    Call it on every rank.

    Args:
        group: all ranks of the job.
        shard_size: ranks per shard group; None: those of a host.

    Raises:
        ValueError: a size that does not divide the ranks, hosts of different numbers of ranks, or a
            group of some ranks of the job only.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"a mesh is made of all {dist.get_world_size()} ranks of the job, not of {len(ranks)} of them: "
            "give mesh=… of these ranks"
        )
    size = _ranks_of_a_host(group) if shard_size is None else shard_size
    if size < 1 or len(ranks) % size:
        allowed = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
        raise ValueError(
            f"shard_size={size} does not divide the {len(ranks)} ranks; allowed: {allowed}"
        )
    rows = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    backend, made = dist.get_backend(group), _known.setdefault(group, {})
    if size not in made:
        options = group._get_backend(torch.device("cuda" if backend == "nccl" else "cpu")).options
        timeout = getattr(options, "_timeout", None)  # a fake group has none
        of_columns, of_rows = (
            [None] if len(parts) == 1 else [_new_group(part, backend, timeout) for part in parts]
            for parts in ([*zip(*rows, strict=True)], rows)
        )
        place = ranks.index(dist.get_rank())
        made[size] = [of_columns[place % size], of_rows[place // size]]
    with _disable_current_modes():  # a simulation's: the mesh is an ordinary tensor
        return DeviceMesh.from_group(
            [group if each is None else each for each in made[size]],
            "cuda" if backend == "nccl" else "cpu",
            mesh=rows,
            mesh_dim_names=("replicate", "shard"),
        )


def partition(group: ProcessGroup, parts: Sequence[Sequence[int]]) -> ProcessGroup:
    """Return this rank's group of a partition of all ranks of `group`; made once.

    Every rank must make the same calls.

    Args:
        parts: global ranks of each part. Each rank is in one of them.
    """
    return next(each for each in groups_of(group, parts) if each is not None)


def groups_of(group: ProcessGroup, parts: Sequence[Sequence[int]]) -> list[ProcessGroup | None]:
    """Make a group of each of these parts, which may overlap. None for those without this rank.

    A group that exists already is used again.

    Every rank must make the same calls.

    Args:
        parts: global ranks of each part.
    """
    made = _known.setdefault(group, {})
    key = tuple(map(tuple, parts))
    if key not in made:
        backend = dist.get_backend(group)
        options = group._get_backend(torch.device("cuda" if backend == "nccl" else "cpu")).options
        groups = [_new_group(part, backend, getattr(options, "_timeout", None)) for part in parts]
        made[key] = [
            each if dist.get_rank() in part else None
            for each, part in zip(groups, parts, strict=True)
        ]
    return made[key]


def _ranks_of_a_host(group: ProcessGroup) -> int:
    hosts = collectives.gather_objects(socket.gethostname(), group)
    sizes = [len(list(ranks)) for _, ranks in groupby(hosts)]
    if len(set(sizes)) > 1 or len(sizes) > len(set(hosts)):
        raise ValueError(
            f"the hosts do not have equal numbers of ranks in order: {hosts}; give shard_size, the ranks of a group"
        )
    return sizes[0]


def _new_group(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> ProcessGroup:
    options = None
    if backend == "nccl":
        # as the job's own group
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
