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
    sizes = []
    size = 1
    while size < world_size:
        sizes.append(size)
        size *= 2
    return (*sizes, world_size)


@contextmanager
def first_ranks(context: RankContext, ranks: int) -> Iterator[RankContext | None]:
    """Yield this rank's context in the group of the first `ranks` ranks. None for other ranks.

    Every rank of `context` calls it with the same number. The other ranks wait at their next
    collective, which fails after the context's timeout. If they have nothing to do for longer, call
    `rest`.

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
        if is_member:
            yield replace(context, world_size=ranks, group=group)
        else:
            yield None
    finally:
        if is_member:
            dist.destroy_process_group(group)


def rest(context: RankContext, name: str, busy_ranks: int) -> None:
    """Wait until the first `busy_ranks` ranks have called this function.

    The wait uses the job's store, because a collective on NCCL would spin on the GPU.

    Args:
        context: context of this rank in the whole job.
        name: name of this rendezvous, not used before in this job.
        busy_ranks: number of ranks to wait for.

    Raises:
        RuntimeError: they did not come within half an hour.
    """
    store = dist.distributed_c10d._get_default_store()
    arrived = f"rest/{name}"
    done = f"rest/{name}/done"
    if context.rank < busy_ranks:
        # `add` is atomic, so exactly one rank sees the last number.
        number_of_arrived = store.add(arrived, 1)
        if number_of_arrived == busy_ranks:
            store.set(done, "yes")
    store.wait([done], timedelta(minutes=30))


# -- a mesh ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshGroups:
    """Groups of this rank in a mesh of R replicas × S ranks each.

        rank   0 1 2 3 │ 4 5 6 7      `shard` of rank 5: 4 5 6 7, such as the GPUs of its host
               host 0  │ host 1       `replicate` of rank 5: 1 5, which hold the same shard

    Args:
        world: group of all R·S ranks.
        replicate: group of the R ranks that hold the same shard as this one. None if R is 1.
        shard: group of the S ranks that share a model with this one. `world` itself if R is 1.
    """

    world: ProcessGroup
    replicate: ProcessGroup | None
    shard: ProcessGroup

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard, R."""
        return 1 if self.replicate is None else self.replicate.size()


def resolve_mesh(mesh: DeviceMesh | None, process_group: ProcessGroup | None) -> MeshGroups:
    """Return this rank's groups in a two-dimensional mesh, (replicate, shard) as in FSDP2.

    Args:
        mesh: mesh of all ranks. None: all ranks form one shard group.
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
            f"mesh has {mesh.ndim} dimension(s): give two, (replicas, ranks that share a model), "
            f"such as {_EXAMPLE}; for one group of ranks leave mesh out and give process_group"
        )
    if not _has_the_ranks_of(mesh, world):
        shape = " × ".join(str(size) for size in mesh.shape)
        ranks = sorted(dist.get_process_group_ranks(world))
        raise ValueError(
            f"mesh of {shape} ranks does not hold the process group's ranks {ranks}: give a mesh "
            "of all of them, or the process_group of the mesh's ranks"
        )
    replicate = mesh.get_group(0)
    if replicate.size() == 1:
        return MeshGroups(world, None, world)
    return MeshGroups(world, replicate, mesh.get_group(1))


def _has_the_ranks_of(mesh: DeviceMesh, world: ProcessGroup) -> bool:
    """Return whether a mesh has the size of a group, and this rank's groups in it are inside it."""
    if mesh.get_coordinate() is None:
        return False  # this rank is not in the mesh
    ranks = set(dist.get_process_group_ranks(world))
    for dimension in (0, 1):
        members = dist.get_process_group_ranks(mesh.get_group(dimension))
        if not ranks.issuperset(members):
            return False
    return math.prod(mesh.shape) == len(ranks)


_EXAMPLE = 'init_device_mesh("cuda", (hosts, gpus_per_host))'

# Groups that have been made: job's group → shard size or partition → groups. None stands for the
# job's group itself. A strong reference to the key would keep it in this dictionary forever.
_known: "WeakKeyDictionary[ProcessGroup, dict[Any, list[ProcessGroup | None]]]" = (
    WeakKeyDictionary()
)


def hybrid_mesh(group: ProcessGroup, shard_size: int | None = None) -> DeviceMesh:
    """Return a mesh of all ranks in which each `shard_size` neighbours are a shard group.

    Every rank must call it. Later calls use the groups of the first one.

    Args:
        group: group of all ranks of the job.
        shard_size: number of ranks per shard group. None: the number of ranks on a host.

    Raises:
        ValueError: a size that does not divide the ranks, hosts with different numbers of ranks, or
            a group that has only some ranks of the job.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"a mesh is made of all {dist.get_world_size()} ranks of the job, not of {len(ranks)} "
            "of them: give mesh=… of these ranks"
        )
    size = _ranks_of_a_host(group) if shard_size is None else shard_size
    if size < 1 or len(ranks) % size != 0:
        allowed = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
        raise ValueError(
            f"shard_size={size} does not divide the {len(ranks)} ranks; allowed: {allowed}"
        )
    # A row is a shard group. A column holds the ranks with the same shard.
    rows = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    made = _known.setdefault(group, {})
    if size not in made:
        columns = [list(column) for column in zip(*rows, strict=True)]
        place = ranks.index(dist.get_rank())
        # All ranks make the groups of columns first, then those of rows: making a group is a
        # collective.
        replicate = _groups_of_parts(group, columns)[place % size]
        shard = _groups_of_parts(group, rows)[place // size]
        made[size] = [replicate, shard]
    groups = [group if each is None else each for each in made[size]]
    # Without the modes of a simulation: the mesh itself is an ordinary tensor.
    with _disable_current_modes():
        return DeviceMesh.from_group(
            groups,
            _device_of(group).type,
            mesh=rows,
            mesh_dim_names=("replicate", "shard"),
        )


def _groups_of_parts(
    group: ProcessGroup, parts: Sequence[Sequence[int]]
) -> list[ProcessGroup | None]:
    """Return a new group of each part. If one part has all ranks, return None in its place."""
    if len(parts) == 1:
        return [None]
    backend = dist.get_backend(group)
    timeout = _timeout_of(group)
    return [_new_group(part, backend, timeout) for part in parts]


def partition(group: ProcessGroup, parts: Sequence[Sequence[int]]) -> ProcessGroup:
    """Return this rank's group of a partition of all ranks of `group`.

    Every rank must make the same calls. Later calls with the same parts use the same groups.

    Args:
        group: group of all ranks of the job.
        parts: global ranks of each part. Each rank is in one of them.
    """
    return next(each for each in groups_of(group, parts) if each is not None)


def groups_of(group: ProcessGroup, parts: Sequence[Sequence[int]]) -> list[ProcessGroup | None]:
    """Return a group of each of these parts, which may overlap. None for parts without this rank.

    Every rank must make the same calls. Later calls with the same parts use the same groups.

    Args:
        group: group of all ranks of the job.
        parts: global ranks of each part.
    """
    made = _known.setdefault(group, {})
    key = tuple(tuple(part) for part in parts)
    if key not in made:
        # Every rank of the job takes part in making every group, also one that it is not in.
        backend = dist.get_backend(group)
        timeout = _timeout_of(group)
        groups = [_new_group(part, backend, timeout) for part in parts]
        mine: list[ProcessGroup | None] = []
        for new, part in zip(groups, parts, strict=True):
            mine.append(new if dist.get_rank() in part else None)
        made[key] = mine
    return made[key]


def _ranks_of_a_host(group: ProcessGroup) -> int:
    """Return the number of ranks on each host.

    Raises:
        ValueError: hosts have different numbers of ranks, or the ranks of a host are not
            neighbours.
    """
    # In rank order, so `groupby` finds runs of neighbours on one host.
    hosts = collectives.gather_objects(socket.gethostname(), group)
    sizes = [len(list(ranks)) for _, ranks in groupby(hosts)]
    sizes_differ = len(set(sizes)) > 1
    a_host_comes_twice = len(sizes) > len(set(hosts))
    if sizes_differ or a_host_comes_twice:
        raise ValueError(
            f"the hosts do not have equal numbers of ranks in order: {hosts}; give shard_size, the "
            "ranks of a group"
        )
    return sizes[0]


def _device_of(group: ProcessGroup) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    options = group._get_backend(_device_of(group)).options
    return getattr(options, "_timeout", None)  # a simulation has none


def _new_group(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> ProcessGroup:
    options = None
    if backend == "nccl":
        # The same as in `rank_context`.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
