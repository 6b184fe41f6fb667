"""Volume of one training step in closed form: collectives and their bytes.

The functions state the rule of each strategy a second time and use none of the strategies' code.
This is on purpose: the benchmark asserts that two independent countings agree, these numbers and
the collectives that it recorded. Predictions of time (`distlab.simulate.estimate`) take buckets and
buffers from the strategies' own plans. `tests/theory/test_volume.py` compares both.

Bytes are payload: the size of the tensor that one rank hands to the collective. The bytes that then
cross the wires depend on the algorithm, and so does the time (`collective_time`).

All functions take the trainable parameters of one model in registration order, a tied parameter
once: `numels` are their elements and `itemsizes` the bytes per element of their gradients.
Gradients share a buffer only with gradients of the same dtype. Where two dtypes have one size (fp16
and bf16), tell them apart through `dtypes`, any hashable labels.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.theory.checks import at_least_one
from distlab.theory.forms import Form, reductions_per_step
from distlab.theory.step_time import DEVICES_PER_NODE, sharding_group

MIB = 2**20
FLAG_BYTES = 4  # a flag outside the buckets is one fp32 number
UNBOUNDED_MB = 2.0**40  # a limit that no bucket of torch reaches, in MiB
# Rules of the flat buffers of this lab's FSDP (`distlab/parallel/fsdp/layout.py`), in elements.
FSDP_ALIGNMENT = 8
FSDP_WORTH_A_BUFFER = 2**18

Sizes = Sequence[int]
Labels = Sequence[Hashable]
Mesh = tuple[int, int]  # (replicas, ranks of a shard group): hosts and the GPUs of each


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
        """Return the volume of both."""
        return CommunicationVolume(self.collectives + other.collectives, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "CommunicationVolume":
        """Return the volume of `times` repetitions."""
        return CommunicationVolume(self.collectives * times, self.bytes * times)


# -- all strategies --------------------------------------------------------------------------------


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
        strategy: entry of the strategy.
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        bucket_size_mb: MiB, None for unbounded. Ignored by strategies without buckets.
        world_size: number of ranks, for strategies that pad or divide.
        shard_size: number of ranks in a shard group, for strategies with a mesh. None: those of a
            host of 8.
        dtypes: labels that tell the gradients' dtypes apart. None: their sizes do.
        units, shapes, compute_itemsize: arguments of `fsdp`, which has no closed form without
            units.
        micro_batches: number of micro-batches that are accumulated in a step without a pipeline.
            FSDP gathers for each of them. ZeRO-2 and hybrid sharding reduce-scatter the gradients
            of each.

    Raises:
        ValueError: as in `each_gradient`. Also a `shard_size` that does not divide the ranks.
    """
    ranks_of_group = world_size
    if strategy.takes_mesh:
        host = sharding_group(strategy, world_size, DEVICES_PER_NODE)
        ranks_of_group = shard_size or host
    replicas = world_size // ranks_of_group
    if replicas * ranks_of_group != world_size:
        raise ValueError(f"shard_size={ranks_of_group} does not divide the {world_size} ranks")
    mesh = (replicas, ranks_of_group)

    if strategy.sends == "nothing":
        return CommunicationVolume(0, 0)
    if strategy.sends == "gradients":
        return each_gradient(numels, itemsizes, mesh=mesh, dtypes=dtypes)
    if strategy.sends == "units" and units is not None and not strategy.is_peer:
        return fsdp(
            numels,
            itemsizes,
            units,
            world_size=ranks_of_group,
            replicas=replicas,
            compute_itemsize=compute_itemsize,
            micro_batches=micro_batches,
            reductions=reductions_per_step(strategy, micro_batches),
            shapes=shapes,
            dtypes=dtypes,
        )
    if strategy.sends not in ("all", "buckets"):
        return None
    if strategy.is_peer:
        return _torch_volume(strategy, numels, itemsizes, bucket_size_mb, dtypes)
    # One message of all gradients is a single unbounded bucket.
    if not strategy.has_buckets:
        bucket_size_mb = None
    if strategy.updates == "slices":
        return zero1(
            numels,
            itemsizes,
            bucket_size_mb,
            world_size=world_size,
            reductions=reductions_per_step(strategy, micro_batches),
            dtypes=dtypes,
        )
    if strategy.updates == "owned":
        return sharded_optimizer(
            numels, itemsizes, bucket_size_mb, world_size=world_size, dtypes=dtypes
        )
    return bucketed(
        numels,
        itemsizes,
        bucket_size_mb,
        # A multiple of 1 is any number: no padding.
        world_size=world_size if strategy.pads_buckets else 1,
        mesh=mesh,
        dtypes=dtypes,
    )


def _torch_volume(
    strategy: Form,
    numels: Sizes,
    itemsizes: Sizes,
    bucket_size_mb: float | None,
    dtypes: Labels | None,
) -> CommunicationVolume:
    """Return the volume of a strategy that is torch's DistributedDataParallel, tuned or not."""
    if strategy.has_buckets:
        # A given limit also replaces torch's 1 MiB of the first bucket, see `torch_ddp`.
        limit_mb = UNBOUNDED_MB if bucket_size_mb is None else bucket_size_mb
        gradients = torch_ddp(
            numels, itemsizes, first_bucket_mb=limit_mb, bucket_cap_mb=limit_mb, dtypes=dtypes
        )
    else:
        gradients = torch_ddp(numels, itemsizes, dtypes=dtypes)
    if strategy.updates != "owned":
        return gradients
    # ZeroRedundancyOptimizer: next to DDP's all-reduces, each parameter is broadcast by its owner.
    # Source: `_sync_params` in torch/distributed/optim/zero_redundancy_optimizer.py, 2.13, without
    # `parameters_as_bucket_view`.
    broadcasts = CommunicationVolume(len(numels), payload(numels, itemsizes))
    return gradients + broadcasts


def model_volume(
    strategy: Form,
    named_parameters: Iterable[tuple[str, Any]],
    *,
    bucket_size_mb: float | None = 25.0,
    world_size: int = 2,
    shard_size: int | None = None,
    dtypes: Labels | None = None,
    compute_itemsize: int = 4,
    micro_batches: int = 1,
) -> CommunicationVolume | None:
    """Return `step_volume` of a Transformer's parameters, which FSDP gathers block by block.

    Args:
        strategy: entry of the strategy.
        named_parameters: (name, parameter) of each parameter, in registration order.
        bucket_size_mb, world_size, shard_size, dtypes, compute_itemsize, micro_batches: arguments
            of `step_volume`.
    """
    numels = []
    itemsizes = []
    shapes = []
    units = []
    for name, parameter in named_parameters:
        numels.append(parameter.numel())
        itemsizes.append(parameter.element_size())
        shapes.append(parameter.shape)
        parts = name.split(".")
        if parameter.ndim <= 1:
            units.append(None)  # norms and biases are replicated
        elif parts[0] == "blocks":
            units.append(".".join(parts[:2]))  # "blocks.3" for all matrices of that block
        else:
            units.append(name)
    return step_volume(
        strategy,
        numels,
        itemsizes,
        bucket_size_mb=bucket_size_mb,
        world_size=world_size,
        shard_size=shard_size,
        dtypes=dtypes,
        units=units,
        shapes=shapes,
        compute_itemsize=compute_itemsize,
        micro_batches=micro_batches,
    )


# -- one strategy each -----------------------------------------------------------------------------


def all_reduced(messages: Sequence[tuple[int, int]], mesh: Mesh = (1, 1)) -> CommunicationVolume:
    """Return the volume of one all-reduce for each message.

    On two levels an all-reduce is a reduce-scatter in each shard group, an all-reduce of a slice
    between the groups, and an all-gather in each group. A message is padded to p elements, a
    multiple of the shard group's S ranks. The reduce-scatter and the all-gather carry p elements
    each, the all-reduce p/S: 3 calls of (2 + 1/S)·p elements. Source: Cho et al. 2019,
    "BlueConnect".

    Args:
        messages: (elements, bytes per element) of each message.
        mesh: (replicas, ranks of a shard group). One level if either is 1.

    Raises:
        ValueError: fewer than one rank.
    """
    replicas, ranks = mesh
    at_least_one(replicas=replicas, ranks=ranks)
    sent_bytes = 0
    if replicas == 1 or ranks == 1:
        for numel, itemsize in messages:
            sent_bytes += numel * itemsize
        return CommunicationVolume(len(messages), sent_bytes)
    for numel, itemsize in messages:
        slice_numel = padded(numel, ranks) // ranks
        # (2 + 1/S)·p elements, in slices of p/S
        sent_bytes += (2 * ranks + 1) * slice_numel * itemsize
    return CommunicationVolume(3 * len(messages), sent_bytes)


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
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        mesh: (replicas, ranks of a shard group), see `all_reduced`.
        dtypes: labels that tell the gradients' dtypes apart. None: their sizes do.

    Raises:
        ValueError: lists of different lengths, or a negative size.
    """
    labels_of(numels, itemsizes, dtypes)
    messages = list(zip(numels, itemsizes, strict=True))
    # Flags say which parameters any rank used. Without parameters there is no such message.
    if messages:
        messages.append((len(numels), FLAG_BYTES))
    return all_reduced(messages, mesh)


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

    Buckets are filled in reverse registration order, each dtype its own (Li et al. 2020, "PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training", sec. 3.2).

    A bucket closes before a gradient would push it past `bucket_size_mb`. A larger gradient has a
    bucket to itself. Each bucket carries one flag element per parameter behind the gradients. The
    flags do not count towards the limit. So the bytes, Σ (numel + 1)·itemsize, do not depend on the
    bucket size, but the number of calls does.

    Args:
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        bucket_size_mb: limit in MiB. None for one unbounded bucket per dtype: all gradients in one
            message, with a flag for each parameter.
        world_size: number, to a multiple of which each bucket with its flags is padded. Copy
            engines need equal chunks, other collectives do not.
        mesh: (replicas, ranks of a shard group), see `all_reduced`.
        dtypes: labels that tell the gradients' dtypes apart. None: their sizes do.

    Raises:
        ValueError: as in `each_gradient`. Also a bucket size that is not positive, or fewer than
            one rank.
    """
    messages = []
    for numel, itemsize in bucket_payloads(numels, itemsizes, bucket_size_mb, dtypes, flags=1):
        messages.append((padded(numel, world_size), itemsize))
    return all_reduced(messages, mesh)


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
    from the third step on, with `static_graph` from the fourth. Until then there is one bucket per
    dtype, the rebuilding step also broadcasts the new order, and the first step of a static graph
    also all-reduces which parameters are used. Source: `torch/nn/parallel/distributed.py`
    (`_BucketCapacityConfig`) and `compute_bucket_assignment_by_size` in
    `torch/csrc/distributed/c10d/reducer.cpp`, 2.13; the steps were seen there.

    Args:
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        first_bucket_mb: limit of the first bucket, MiB. torch uses 1 only if `bucket_cap_mb` has
            its default. If it was given, even as 25, the first limit is also `bucket_cap_mb`.
        bucket_cap_mb: limit of the other buckets, MiB.
        dtypes: labels that tell the gradients' dtypes apart. None: their sizes do.

    Raises:
        ValueError: as in `each_gradient`. Also a limit that is not positive.
    """
    dtypes = labels_of(numels, itemsizes, dtypes)
    # torch truncates limits to whole bytes.
    first_limit = int(positive_mib("first_bucket_mb", first_bucket_mb))
    later_limit = int(positive_mib("bucket_cap_mb", bucket_cap_mb))
    closed_buckets = dict.fromkeys(dtypes, 0)  # dtype → number of its closed buckets
    open_bytes = {}  # dtype → bytes of the bucket that is being filled
    for numel, itemsize, dtype in reversed(list(zip(numels, itemsizes, dtypes, strict=True))):
        open_bytes[dtype] = open_bytes.get(dtype, 0) + numel * itemsize
        # The check comes after the addition: torch closes a bucket with the gradient that exceeds
        # it.
        limit = first_limit if closed_buckets[dtype] == 0 else later_limit
        if open_bytes[dtype] >= limit:
            closed_buckets[dtype] += 1
            del open_bytes[dtype]
    buckets = sum(closed_buckets.values()) + len(open_bytes)
    return CommunicationVolume(buckets, payload(numels, itemsizes))


def zero1(
    numels: Sizes,
    itemsizes: Sizes,
    bucket_size_mb: float | None = 25.0,
    *,
    world_size: int,
    reductions: int = 1,
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of a reduce-scatter and an all-gather per bucket, and a message of flags.

    The reduce-scatter carries gradients, the all-gather parameters (Rajbhandari et al. 2020,
    "ZeRO", sec. 7.2.1: the two halves of an all-reduce).

    Buckets are filled as in `bucketed`, without flags, and padded to a multiple of the world size.
    The flags go in an fp32 all-reduce of 4 bytes per parameter. For B buckets: 2·B + 1 calls.

    ZeRO-2 sends the gradients and flags of each micro-batch, and gathers once: (k + 1)·B + k calls
    for k micro-batches.

    Args:
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        bucket_size_mb: limit in MiB, as in `bucketed`.
        world_size: number of ranks that a bucket is divided among.
        reductions: number of times that gradients are sent in a step.
        dtypes: labels that tell the gradients' dtypes apart. None: their sizes do.

    Raises:
        ValueError: as in `bucketed`. Also fewer than one rank, or fewer than one reduction.
    """
    at_least_one(reductions=reductions)
    buckets = bucket_payloads(numels, itemsizes, bucket_size_mb, dtypes)
    bucket_bytes = 0
    for numel, itemsize in buckets:
        bucket_bytes += padded(numel, world_size) * itemsize
    # A reduce-scatter would leave each flag on one rank only, so flags have an all-reduce.
    flag_bytes = FLAG_BYTES * len(numels)
    gradients = CommunicationVolume(len(buckets) + 1, bucket_bytes + flag_bytes)
    parameters = CommunicationVolume(len(buckets), bucket_bytes)
    return gradients * reductions + parameters


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

    An owner packs its parameters (`dealt_out`) in their order into messages of one dtype and of at
    most `message_mb` MiB. A larger parameter has a message to itself.

    Args:
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient, and of its parameter.
        bucket_size_mb: limit of a bucket of gradients in MiB, as in `bucketed`.
        world_size: number of ranks that own parameters.
        message_mb: limit of a message of parameters in MiB.
        dtypes: labels that tell the dtypes apart. None: their sizes do.

    Raises:
        ValueError: as in `bucketed`. Also fewer than one rank.
    """
    gradients = bucketed(numels, itemsizes, bucket_size_mb, dtypes=dtypes)
    labels = labels_of(numels, itemsizes, dtypes)
    messages = 0
    for owned in dealt_out(numels, world_size):
        open_bytes = {}  # dtype → bytes of the message that is being filled
        for index in owned:
            dtype = labels[index]
            num_bytes = numels[index] * itemsizes[index]
            # One open message per dtype, since a message has one dtype.
            if dtype not in open_bytes or open_bytes[dtype] + num_bytes > message_mb * MIB:
                messages += 1
                open_bytes[dtype] = 0
            open_bytes[dtype] += num_bytes
    return gradients + CommunicationVolume(messages, payload(numels, itemsizes))


def fsdp(
    numels: Sizes,
    itemsizes: Sizes,
    units: Sequence[Hashable | None],
    *,
    world_size: int,
    replicas: int = 1,
    compute_itemsize: int,
    micro_batches: int = 1,
    reductions: int = 1,
    shapes: Sequence[Sizes] | None = None,
    dtypes: Labels | None = None,
) -> CommunicationVolume:
    """Return the volume of two all-gathers and a reduce-scatter per buffer, and a small all-reduce.

    The all-gathers carry parameters, one for forward and one for backward. The reduce-scatter
    carries gradients. Sources: Rajbhandari et al. 2020, "ZeRO", sec. 7.2.2; Zhao et al. 2023,
    "PyTorch FSDP".

    A unit's parameters are stored one after another in one buffer, or in one for each length of
    rows (`sharded_buffers`), padded to whole rows on every rank. Gathers carry `compute_itemsize`
    bytes per element, reductions the masters' `itemsizes`. Replicated parameters (norms, biases)
    are sent in one all-reduce with a flag each. For U buffers: 3·U + 1 calls.

    Every further micro-batch of a step gathers again, 2·U calls more, and only the last one's
    backward sends gradients. In hybrid sharding every one also reduce-scatters, 3·U calls more.
    Once per step, the replicas all-reduce each buffer's slice: U calls more.

    Args:
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        units: for each parameter, the unit that it is gathered with, or None for a replicated one.
        world_size: number of ranks that a buffer is divided among: all, or those of a shard group
            in hybrid sharding.
        replicas: number of replicas of a shard group, in hybrid sharding.
        compute_itemsize: bytes per element in which parameters are sent.
        micro_batches: number of micro-batches accumulated in a step.
        reductions: number of micro-batches of a step that reduce-scatter gradients.
        shapes: shape of each parameter, in row-major order. None: one column, which may be cut
            anywhere.
        dtypes: labels that tell the gradients' dtypes apart. None: their sizes do.

    Raises:
        ValueError: as in `each_gradient`. Also fewer than one rank.
    """
    labels_of(numels, itemsizes, dtypes)
    if shapes is None:
        shapes = [(numel, 1) for numel in numels]
    shapes_of_unit = {}
    replicated = 0  # parameters
    replicated_elements = 0
    for numel, shape, unit in zip(numels, shapes, units, strict=True):
        if unit is None:
            replicated += 1
            replicated_elements += numel
        else:
            shapes_of_unit.setdefault(unit, []).append(shape)
    buffers = []  # elements of each
    for unit_shapes in shapes_of_unit.values():
        buffers += sharded_buffers(unit_shapes, world_size)
    at_least_one(replicas=replicas, micro_batches=micro_batches, reductions=reductions)
    buffer_elements = sum(buffers)
    master_itemsize = max(itemsizes, default=4)

    # Each micro-batch gathers in forward and in backward.
    calls = (2 * micro_batches + reductions) * len(buffers)
    gathered_bytes = 2 * micro_batches * buffer_elements * compute_itemsize
    reduced_bytes = reductions * buffer_elements * master_itemsize
    if replicas > 1:
        calls += len(buffers)
        # Once per step, replicas average their slices of a buffer, of which each rank has
        # 1/world_size.
        reduced_bytes += buffer_elements // world_size * master_itemsize
    if replicated:
        calls += 1
    # Each replicated parameter also sends one element, its flag.
    replicated_bytes = (replicated_elements + replicated) * master_itemsize
    return CommunicationVolume(calls, gathered_bytes + reduced_bytes + replicated_bytes)


# -- parts of these rules --------------------------------------------------------------------------


def labels_of(numels: Sizes, itemsizes: Sizes, dtypes: Labels | None) -> Labels:
    """Return the dtype labels. Sizes tell dtypes apart where no labels were given.

    Args:
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        dtypes: labels of the gradients' dtypes, or None.

    Raises:
        ValueError: lists of different lengths, or a negative size.
    """
    dtypes = itemsizes if dtypes is None else dtypes
    if not len(numels) == len(itemsizes) == len(dtypes):
        raise ValueError(
            f"{len(numels)} numels, {len(itemsizes)} itemsizes, {len(dtypes)} dtypes: "
            "give one of each per parameter"
        )
    if any(numel < 0 for numel in numels) or any(itemsize < 1 for itemsize in itemsizes):
        raise ValueError("numels must not be negative and itemsizes must be at least 1 byte")
    return dtypes


def payload(numels: Sizes, itemsizes: Sizes) -> int:
    """Return the bytes of all gradients."""
    return sum(numel * itemsize for numel, itemsize in zip(numels, itemsizes, strict=True))


def padded(numel: int, world_size: int) -> int:
    """Return the number of elements, padded to a multiple of the world size.

    Raises:
        ValueError: fewer than one rank.
    """
    at_least_one(world_size=world_size)
    return _round_up(numel, world_size)


def _round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit


@dataclass
class _Bucket:
    """Bucket of gradients of one dtype.

    Args:
        itemsize: bytes per element.
        numel: elements of all gradients.
        gradients: number of gradients.
    """

    itemsize: int
    numel: int = 0
    gradients: int = 0


def bucket_payloads(
    numels: Sizes,
    itemsizes: Sizes,
    bucket_size_mb: float | None,
    dtypes: Labels | None,
    flags: int = 0,
) -> list[tuple[int, int]]:
    """Return (elements, bytes per element) of each bucket of the greedy rule of `bucketed`.

    Args:
        numels: elements of each parameter.
        itemsizes: bytes per element of each gradient.
        bucket_size_mb: limit in MiB, None for unbounded.
        dtypes: labels of the gradients' dtypes, or None.
        flags: elements that a bucket carries for each gradient. They do not count towards the
            limit.

    Raises:
        ValueError: as `labels_of` and `positive_mib`.
    """
    dtypes = labels_of(numels, itemsizes, dtypes)
    limit_bytes = math.inf
    if bucket_size_mb is not None:
        limit_bytes = positive_mib("bucket_size_mb", bucket_size_mb)
    closed = []
    filling = {}  # dtype → the bucket that is being filled
    for numel, itemsize, dtype in reversed(list(zip(numels, itemsizes, dtypes, strict=True))):
        bucket = filling.get(dtype)
        if bucket is not None and (bucket.numel + numel) * itemsize > limit_bytes:
            closed.append(filling.pop(dtype))
            bucket = None
        if bucket is None:
            # A gradient above the limit has this bucket to itself.
            bucket = _Bucket(itemsize)
            filling[dtype] = bucket
        bucket.numel += numel
        bucket.gradients += 1
    payloads = []
    for bucket in [*closed, *filling.values()]:
        payloads.append((bucket.numel + flags * bucket.gradients, bucket.itemsize))
    return payloads


def positive_mib(name: str, mib: float) -> float:
    """Return the bytes of `mib` MiB.

    Args:
        name: name of the argument, for the message.
        mib: size in MiB, positive.

    Raises:
        ValueError: a number that is not positive.
    """
    if not mib > 0:
        raise ValueError(f"{name}={mib}: give a positive number of MiB")
    return mib * MIB


def dealt_out(numels: Sizes, world_size: int) -> list[list[int]]:
    """Return the positions of the parameters that each rank owns, the largest parameter first.

    Each parameter goes to the rank that owns the fewest elements.

    Args:
        numels: elements of each parameter.
        world_size: number of ranks that own parameters.

    Raises:
        ValueError: fewer than one rank.
    """
    at_least_one(world_size=world_size)
    owned = [[] for _ in range(world_size)]
    loads = [0] * world_size  # elements
    # Largest first, so that small parameters fill what large ones have left uneven.
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owner = loads.index(min(loads))
        owned[owner].append(index)
        loads[owner] += numels[index]
    return owned


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
        world_size: number of ranks that a buffer is divided among.

    Raises:
        ValueError: fewer than one rank.
    """
    at_least_one(world_size=world_size)
    rows = []  # elements in a row of each matrix
    numels = []
    for shape in shapes:
        rows.append(_row_elements(shape, world_size))
        numels.append(math.prod(shape))
    together = _padded_buffer(rows, numels, world_size)
    apart = []
    # `dict.fromkeys` keeps the order of registration, which a set would not.
    for length in dict.fromkeys(rows):
        numels_of_length = [numel for row, numel in zip(rows, numels, strict=True) if row == length]
        apart.append(_padded_buffer([length] * len(numels_of_length), numels_of_length, world_size))
    worth_it = max(FSDP_WORTH_A_BUFFER, sum(numels) / 64)
    return apart if together - sum(apart) > worth_it else [together]


def _row_elements(shape: Sizes, world_size: int) -> int:
    """Return the elements of a row: the smallest part of a parameter that stays on one rank."""
    for dims in range(1, len(shape) + 1):
        # At least one row per rank, with as few dimensions as that takes.
        if math.prod(shape[:dims]) >= world_size:
            return max(1, math.prod(shape[dims:]))
    return 1


def _padded_buffer(rows: Sizes, numels: Sizes, world_size: int) -> int:
    """Return the elements of one buffer of matrices, with padding.

    Args:
        rows: elements in a row of each matrix.
        numels: elements of each matrix.
        world_size: number of ranks that the buffer is divided among.
    """
    end = 0
    for row, numel in zip(rows, numels, strict=True):
        # 8 elements are 16 bytes in bf16, the alignment that vectorized kernels need.
        begin = _round_up(end, math.lcm(row, FSDP_ALIGNMENT))
        end = begin + numel
    # Every rank has whole rows, whichever matrix they belong to.
    return _round_up(end, world_size * math.lcm(*rows))
