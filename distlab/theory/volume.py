"""Volume of one training step in closed form: collectives and their bytes.

Benchmarks assert these numbers against the recorded collectives, so each function states one
strategy's rule again, independently of the code that executes it, so that agreement of the two
means something.

Bytes are payload, the size of the tensor handed to the collective on one rank. What then crosses
the wires depends on the algorithm, and so does the time it takes (`collective_time`).

All functions take the trainable parameters of one model in registration order, a tied parameter
once: `numels` are their elements and `itemsizes` the bytes per element of their gradients.
Gradients share a buffer only with gradients of the same dtype; where two dtypes have one size (fp16
and bf16), tell them apart through `dtypes`, any hashable labels.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.theory.checks import at_least_one
from distlab.theory.forms import Form
from distlab.theory.model_shape import ModelShape

FLAG_BYTES = 4  # a flag outside the buckets is one fp32 number

Sizes = Sequence[int]
Labels = Sequence[Hashable]


@dataclass(frozen=True)
class CommunicationVolume:
    """Calls and bytes that one rank hands to collectives in one step.

    Args:
        collectives: number of calls.
        bytes: payload bytes of all calls together.
    """

    collectives: int
    bytes: int

    def __add__(self, other: "CommunicationVolume") -> "CommunicationVolume":
        return CommunicationVolume(self.collectives + other.collectives, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "CommunicationVolume":
        return CommunicationVolume(self.collectives * times, self.bytes * times)


Mesh = tuple[int, int]  # (replicas, ranks of a shard group): hosts and the GPUs of each


def all_reduced(messages: Sequence[tuple[int, int]], mesh: Mesh = (1, 1)) -> CommunicationVolume:
    """Return the volume of one all-reduce for each message.

    In two levels it is a reduce-scatter, an all-reduce of a slice and an all-gather.

    In two levels a message of n elements is padded to p, a multiple of the shard group's S ranks.
    The reduce-scatter and the all-gather carry p elements, the all-reduce between the groups p/S: 3
    calls of (2 + 1/S)·p elements.

    Args:
        messages: (elements, bytes per element) of each message.
        mesh: (replicas, ranks of a shard group). One level if either is 1.

    Raises:
        ValueError: fewer than one rank.
    """
    replicas, ranks = mesh
    at_least_one(replicas=replicas, ranks=ranks)
    if replicas == 1 or ranks == 1:
        return CommunicationVolume(len(messages), sum(numel * size for numel, size in messages))
    slices = [(-(-numel // ranks), size) for numel, size in messages]
    return CommunicationVolume(
        3 * len(slices), sum((2 * ranks + 1) * numel * size for numel, size in slices)
    )


def each_gradient(
    numels: Sizes,
    itemsizes: Sizes,
    *,
    mesh: Mesh = (1, 1),
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of one all-reduce per parameter, and one of "used" flags in fp32.

    For P parameters: P + 1 calls, Σ numel·itemsize + 4·P bytes (for P = 0 nothing).

    Args:
        mesh: (replicas, ranks of a shard group), see `all_reduced`.

    Raises:
        ValueError: lists of different lengths, or a negative size.
    """
    labels_of(numels, itemsizes, dtypes)
    flags = [(len(numels), FLAG_BYTES)] if numels else []
    return all_reduced([*zip(numels, itemsizes, strict=True), *flags], mesh)


def bucketed(
    numels: Sizes,
    itemsizes: Sizes,
    bucket_size_mb: float | None = 25.0,
    *,
    world_size: int = 1,
    mesh: Mesh = (1, 1),
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of one all-reduce per bucket.

    Buckets are filled in reverse registration order, each dtype its own.

    A bucket closes before a gradient would push it past `bucket_size_mb`; a larger gradient has a
    bucket to itself. Each bucket carries one flag element per parameter behind the gradients, which
    do not count towards the limit. So the bytes, Σ (numel + 1)·itemsize, do not depend on the
    bucket size; the number of calls does.

    Args:
        bucket_size_mb: limit in MiB. None for one unbounded bucket per dtype: all gradients in one
            message, with a flag for each parameter.
        world_size: number, to a multiple of which each bucket with its flags is padded. Copy
            engines need equal chunks, other collectives do not.
        mesh: (replicas, ranks of a shard group), see `all_reduced`.

    Raises:
        ValueError: as in `each_gradient`. Also a bucket size that is not positive, or fewer than
            one rank.
    """
    # With one element more per parameter each bucket holds its flags, which must not count towards
    # the limit.
    buckets = bucket_payloads(numels, itemsizes, bucket_size_mb, dtypes, flags=1)
    return all_reduced([(padded(numel, world_size), size) for numel, size in buckets], mesh)


def torch_ddp(
    numels: Sizes,
    itemsizes: Sizes,
    *,
    first_bucket_mb: float = 1.0,
    bucket_cap_mb: float = 25.0,
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of torch's DistributedDataParallel in the steady state.

    All parameters are used, and there are no buffers.

    torch rebuilds its buckets in the order in which gradients became ready, here reverse
    registration order. A bucket closes *with* the gradient that brings it to its limit (so it may
    exceed it), and per dtype the first bucket's limit differs from the others'. The steady state is
    from the third step on, with `static_graph` from the fourth: until then there is one bucket per
    dtype, the rebuilding step also broadcasts the new order, and the first step of a static graph
    also all-reduces which parameters are used. Source: `torch/nn/parallel/distributed.py`
    (`_BucketCapacityConfig`) and `compute_bucket_assignment_by_size` in
    `torch/csrc/distributed/c10d/reducer.cpp`, 2.13; the steps were seen there.

    Args:
        first_bucket_mb: limit of the first bucket, MiB. torch uses 1 only if `bucket_cap_mb` has
            its default. If it was given, even as 25, the first limit is also `bucket_cap_mb`.
        bucket_cap_mb: limit of the other buckets, MiB.

    Raises:
        ValueError: as in `each_gradient`. Also a limit that is not positive.
    """
    dtypes = labels_of(numels, itemsizes, dtypes)
    # torch truncates limits to whole bytes.
    first = int(positive_mib("first_bucket_mb", first_bucket_mb))
    later = int(positive_mib("bucket_cap_mb", bucket_cap_mb))
    closed, filled = dict.fromkeys(dtypes, 0), {}
    for numel, size, dtype in reversed(list(zip(numels, itemsizes, dtypes, strict=True))):
        filled[dtype] = filled.get(dtype, 0) + numel * size
        if filled[dtype] >= (later if closed[dtype] else first):
            closed[dtype] += 1
            del filled[dtype]
    return CommunicationVolume(sum(closed.values()) + len(filled), payload(numels, itemsizes))


def zero1(
    numels: Sizes,
    itemsizes: Sizes,
    bucket_size_mb: float | None = 25.0,
    *,
    world_size: int,
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of a reduce-scatter and an all-gather per bucket, and a message of flags.

    The reduce-scatter carries gradients, the all-gather parameters.

    Buckets are filled as in `bucketed`, without flags, and padded to a multiple of the world size;
    the flags go in an fp32 all-reduce of 4 bytes per parameter. For B buckets: 2·B + 1 calls.

    Raises:
        ValueError: as in `bucketed`. Also fewer than one rank.
    """
    buckets = bucket_payloads(numels, itemsizes, bucket_size_mb, dtypes)
    sent = sum(padded(numel, world_size) * size for numel, size in buckets)
    return CommunicationVolume(2 * len(buckets) + 1, 2 * sent + FLAG_BYTES * len(numels))


def sharded_optimizer(
    numels: Sizes,
    itemsizes: Sizes,
    bucket_size_mb: float | None = 25.0,
    *,
    world_size: int,
    message_mb: float = 25.0,
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of `bucketed` and of a broadcast of every parameter by its owner.

    A message has parameters of one dtype.

    Parameters go to the rank that owns least, largest first; an owner's, in that order of
    assignment, share messages of at most `message_mb` MiB (a larger one has its own).

    Raises:
        ValueError: as in `bucketed`. Also fewer than one rank.
    """
    at_least_one(world_size=world_size)
    gradients = bucketed(numels, itemsizes, bucket_size_mb, dtypes=dtypes)
    labels = labels_of(numels, itemsizes, dtypes)
    loads, filled, calls = [0] * world_size, {}, 0
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owner = loads.index(min(loads))
        loads[owner] += numels[index]
        key, size = (owner, labels[index]), numels[index] * itemsizes[index]
        if key not in filled or filled[key] + size > message_mb * MIB:
            calls, filled[key] = calls + 1, 0
        filled[key] += size
    return CommunicationVolume(
        gradients.collectives + calls, gradients.bytes + payload(numels, itemsizes)
    )


def fsdp(
    numels: Sizes,
    itemsizes: Sizes,
    units: Sequence[Hashable | None],
    *,
    world_size: int,
    replicas: int = 1,
    compute_itemsize: int,
    micro_batches: int = 1,
    shapes: Sequence[Sizes] | None = None,
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of two all-gathers and a reduce-scatter per buffer, and a small all-reduce.

    The all-gathers carry parameters, the reduce-scatter gradients.

    A unit's parameters are stored one after another in one buffer, or in one for each length of
    rows (`sharded_buffers`), padded to whole rows on every rank. Gathers carry `compute_itemsize`
    bytes per element, reductions the masters' `itemsizes`. Replicated parameters (norms, biases)
    are sent in one all-reduce with a flag each. For U buffers: 3·U + 1 calls. Hybrid sharding
    all-reduces each buffer's slice between the replicas: U calls more. Every further micro-batch of
    a step gathers again, and only the last one's backward sends gradients: 2·U calls more for each.
    Args:
        units: for each parameter, the unit that it is gathered with, or None for a replicated one.
        world_size: number of ranks that a buffer is divided among: all, or those of a shard group
            in hybrid sharding.
        replicas: number of replicas of a shard group, in hybrid sharding.
        compute_itemsize: bytes per element in which parameters are sent.
        micro_batches: number of micro-batches accumulated in a step.
        shapes: shape of each parameter, in row-major order. None: one column, which may be cut
            anywhere.

    Raises:
        ValueError: as in `each_gradient`. Also fewer than one rank.
    """
    labels_of(numels, itemsizes, dtypes)
    shapes = [(numel, 1) for numel in numels] if shapes is None else shapes
    of_unit = {}  # unit → shapes of its parameters
    for shape, unit in zip(shapes, units, strict=True):
        if unit is not None:
            of_unit.setdefault(unit, []).append(shape)
    buffers = [numel for each in of_unit.values() for numel in sharded_buffers(each, world_size)]
    small = [numel for numel, unit in zip(numels, units, strict=True) if unit is None]
    master = max(itemsizes, default=4)
    at_least_one(replicas=replicas, micro_batches=micro_batches)
    gathers, reductions = 2 * micro_batches * sum(buffers) * compute_itemsize, sum(buffers) * master
    between = sum(buffers) // world_size * master if replicas > 1 else 0
    return CommunicationVolume(
        (2 * micro_batches + 1 + (replicas > 1)) * len(buffers) + bool(small),
        gathers + reductions + between + (sum(small) + len(small)) * master,
    )


def step_volume(
    strategy: Form,
    numels: Sizes,
    itemsizes: Sizes,
    *,
    bucket_size_mb: float | None = 25.0,
    world_size: int = 2,
    shard_size: int | None = None,
    dtypes: Labels | None = None,
    units: Sequence[Hashable | None] | None = None,
    shapes: Sequence[Sizes] | None = None,
    compute_itemsize: int = 4,
    micro_batches: int = 1,
) -> CommunicationVolume | None:
    """Return the volume of a strategy. None if it has no closed form, as torch's FSDP.

    Args:
        bucket_size_mb: MiB, None for unbounded. Ignored by strategies without buckets.
        world_size: number of ranks, for strategies that pad or divide.
        shard_size: number of ranks in a shard group, for strategies with a mesh. None: all.
        units, shapes, compute_itemsize, micro_batches: arguments of `fsdp`, which has no closed
            form without units.

    Raises:
        ValueError: as in `each_gradient`. Also a `shard_size` that does not divide the ranks.
    """
    shard_size = (strategy.takes_mesh and shard_size) or world_size
    mesh = (world_size // shard_size, shard_size)
    if math.prod(mesh) != world_size:
        raise ValueError(f"shard_size={shard_size} does not divide the {world_size} ranks")
    sizes = {"numels": numels, "itemsizes": itemsizes, "dtypes": dtypes}
    cap = float(2**40) if bucket_size_mb is None else bucket_size_mb
    if strategy.sends == "nothing":
        return CommunicationVolume(0, 0)
    if strategy.sends == "gradients":
        return each_gradient(mesh=mesh, **sizes)
    if strategy.sends == "units" and units is not None and not strategy.is_peer:
        return fsdp(
            units=units,
            shapes=shapes,
            compute_itemsize=compute_itemsize,
            micro_batches=micro_batches,
            world_size=shard_size,
            replicas=mesh[0],
            **sizes,
        )
    if strategy.sends not in ("all", "buckets"):
        return None
    if strategy.is_peer:
        limits = {"first_bucket_mb": cap, "bucket_cap_mb": cap} if strategy.has_buckets else {}
        sent = torch_ddp(**limits, **sizes)
        if strategy.updates == "owned":
            # ZeroRedundancyOptimizer: beside DDP's all-reduces, each parameter broadcast by its
            # owner. Source: `_sync_params` in torch/distributed/optim/zero_redundancy_optimizer.py,
            # 2.13, without `parameters_as_bucket_view`.
            return CommunicationVolume(
                sent.collectives + len(numels), sent.bytes + payload(numels, itemsizes)
            )
        return sent
    sizes["bucket_size_mb"] = bucket_size_mb if strategy.has_buckets else None
    if strategy.updates == "slices":
        return zero1(world_size=world_size, **sizes)
    if strategy.updates == "owned":
        return sharded_optimizer(world_size=world_size, **sizes)
    return bucketed(world_size=world_size if strategy.pads_buckets else 1, mesh=mesh, **sizes)


MIB = 2**20
FSDP_ALIGNMENT = 8  # elements
FSDP_WORTH_A_BUFFER = 2**18  # elements


def labels_of(numels: Sizes, itemsizes: Sizes, dtypes: Labels | None) -> Labels:
    """The dtype labels; sizes tell dtypes apart where no labels were given.

    Raises:
        ValueError: lists of different lengths, or a negative size.
    """
    dtypes = itemsizes if dtypes is None else dtypes
    if not len(numels) == len(itemsizes) == len(dtypes):
        raise ValueError(
            f"{len(numels)} numels, {len(itemsizes)} itemsizes, {len(dtypes)} dtypes: "
            "give one of each per parameter"
        )
    if any(numel < 0 for numel in numels) or any(size < 1 for size in itemsizes):
        raise ValueError("numels must not be negative and itemsizes must be at least 1 byte")
    return dtypes


def payload(numels: Sizes, itemsizes: Sizes) -> int:
    """Bytes of all gradients."""
    return sum(numel * size for numel, size in zip(numels, itemsizes, strict=True))


def padded(numel: int, world_size: int) -> int:
    """Elements, padded to a multiple of the world size.

    Raises ValueError for fewer than one rank.
    """
    at_least_one(world_size=world_size)
    return -(-numel // world_size) * world_size


def sharded_buffers(shapes: Sequence[Sizes], world_size: int) -> list[int]:
    """Return the number of elements of the flat buffers of one of FSDP's units, with padding.

    A parameter may be cut between rows: those of its first dimension if there are at least as many
    as ranks, else those of the first two dimensions together, and so on. Past the last dimension it
    is cut between elements. It begins at a multiple of its row and of 8 elements. The buffer has a
    multiple of every row for each rank. Parameters with rows of different length share one buffer,
    unless one for each length saves more than 1/64 of the elements and more than 2¹⁸.

    Args:
        shapes: shapes of the unit's matrices in registration order, each from the outermost stride
            to the innermost.

    Raises ValueError for fewer than one rank.
    """
    at_least_one(world_size=world_size)
    matrices = [(_row(shape, world_size), math.prod(shape)) for shape in shapes]
    together = _sharded_buffer(matrices, world_size)
    lengths = dict.fromkeys(row for row, _ in matrices)
    apart = [
        _sharded_buffer([m for m in matrices if m[0] == length], world_size) for length in lengths
    ]
    worth = max(FSDP_WORTH_A_BUFFER, sum(numel for _, numel in matrices) / 64)
    return apart if together - sum(apart) > worth else [together]


def padded_parameters(shape: ModelShape, world_size: int) -> int:
    """Return the number of elements of all parameters with the padding of FSDP's buffers.

    Norms have no padding.
    """
    block, embedding = shape.matrix_shapes_per_block, [(shape.words, shape.d_model)]
    padding = sum(sharded_buffers(block, world_size)) - shape.block_matrices
    of_embedding = sum(sharded_buffers(embedding, world_size)) - shape.embedding_parameters
    return shape.num_parameters + shape.num_layers * padding + shape.vocabularies * of_embedding


def _row(shape: Sizes, world_size: int) -> int:
    dims = (dim for dim in range(1, len(shape) + 1) if math.prod(shape[:dim]) >= world_size)
    return max(1, math.prod(shape[next(dims, len(shape)) :]))


def _sharded_buffer(matrices: Sequence[tuple[int, int]], world_size: int) -> int:
    """Elements of one buffer for matrices of (elements in a row, elements)."""
    end = 0
    for row, numel in matrices:
        begin = math.lcm(row, FSDP_ALIGNMENT)
        end = -(-end // begin) * begin + numel
    share = math.lcm(*(row for row, _ in matrices))
    return -(-end // (world_size * share)) * world_size * share


def bucket_payloads(
    numels: Sizes,
    itemsizes: Sizes,
    bucket_size_mb: float | None,
    dtypes: Labels | None,
    flags: int = 0,
) -> list[tuple[int, int]]:
    """Return (elements, bytes per element) of each bucket of the greedy rule of `bucketed`.

    `flags` elements per gradient are added, which do not count towards the limit.

    Raises ValueError as `labels_of` and `positive_mib`.
    """
    dtypes = labels_of(numels, itemsizes, dtypes)
    limit = (
        float("inf") if bucket_size_mb is None else positive_mib("bucket_size_mb", bucket_size_mb)
    )
    closed, filled = [], {}
    for numel, size, dtype in reversed(list(zip(numels, itemsizes, dtypes, strict=True))):
        before, count, _ = filled.get(dtype, (0, 0, size))
        if dtype in filled and (before + numel) * size > limit:
            closed.append(filled.pop(dtype))
            before = count = 0
        filled[dtype] = (before + numel, count + 1, size)
    return [(numel + flags * count, size) for numel, count, size in [*closed, *filled.values()]]


def positive_mib(name: str, mib: float) -> float:
    """MiB → bytes. Raises ValueError, naming the argument, for what is not positive."""
    if not mib > 0:
        raise ValueError(f"{name}={mib}: give a positive number of MiB")
    return mib * MIB


def model_volume(
    strategy: Form, named_parameters: Iterable[tuple[str, Any]], **options: Any
) -> CommunicationVolume | None:
    """Return `step_volume` of a Transformer's parameters, which FSDP gathers block by block."""
    names, parameters = zip(*named_parameters, strict=True)
    parts = [name.split(".") for name in names]
    units = [".".join(part[:2] if part[0] == "blocks" else part) for part in parts]
    return step_volume(
        strategy,
        [p.numel() for p in parameters],
        [p.element_size() for p in parameters],
        units=[unit if p.ndim > 1 else None for unit, p in zip(units, parameters, strict=True)],
        shapes=[p.shape for p in parameters],
        **options,
    )
