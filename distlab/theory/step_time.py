"""Time of a step in closed form: computation, overhead of communication, and optimizer.

Two streams run A seconds of computation and B seconds of communication, each alone. While both run,
computation proceeds at the rate p and communication at the rate q (both in (0, 1], 1 without
contention). Both run until the first of them is done, and then the other runs alone. So they share

    min(A/p, B/q)   seconds, and both are done after

    B/q + A − p·B/q   if B/q ≤ A/p,   else   A/p + B − q·A/p

The overhead of communication is this time minus A. `pipeline` of one message that is ready at once
gives the same. A strategy says which communication overlaps with which computation:

    after backward       all-reduce after it
    gradients, buckets   all-reduce during backward, the last message alone
    slices (ZeRO-1)      reduce-scatter during backward, all-gather during the next forward
    units (FSDP)         all-gather during forward, the first alone. All-gather and reduce-scatter
                         during backward, the last reduce-scatter alone

Strategies with buffers also copy every gradient once (`ComputeTime.pack`).

How many buckets? docs/learn/theory/buckets.md has the closed form for buckets of equal size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distlab.theory.collective_time import further_hops, link_share
from distlab.theory.forms import Form
from distlab.theory.model_shape import divisors

DEVICES_PER_NODE = 8  # devices of a node where no other number is known


@dataclass(frozen=True)
class Network:
    """Rings over nodes of several devices.

    Args:
        inside_bytes_per_s: bytes per second that a device sends inside its node.
        between_bytes_per_s: bytes per second that a device sends to other nodes. A node's devices
            send at the same time.
        devices_per_node: number of devices of a node.
        latency_s: seconds of a collective between two devices, its launch included.
        hop_s: seconds of latency of each further hop inside a node, see `further_hops`.
        between_hop_s: seconds of latency of each hop between nodes. None: `hop_s`.

    Raises:
        ValueError: a number that is not positive.
    """

    inside_bytes_per_s: float
    between_bytes_per_s: float
    devices_per_node: int = DEVICES_PER_NODE
    latency_s: float = 0.0
    hop_s: float = 0.0
    between_hop_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("inside_bytes_per_s", "between_bytes_per_s", "devices_per_node"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")

    def seconds(
        self, num_bytes: float, ranks: int, messages: int = 1, operation: str = "all_reduce"
    ) -> float:
        """Return the seconds of `messages` collectives with `num_bytes` in sum. 0 for one rank.

        The time is that of the latencies plus the bytes of the busiest link over its bandwidth.
        Latency grows along the ring. An all-reduce of many ranks goes up and down a tree instead,
        2·log₂N hops. Several rings run side by side, each leaving a node through another device's
        link. So the links of a node add up to its bandwidth, and the slower of it and the links
        inside decides.

        Args:
            num_bytes: payload bytes of all messages together.
            ranks: number of ranks, N.
            messages: number of collectives.
            operation: name of the collective.

        Raises:
            ValueError: fewer than one rank, or negative bytes.
        """
        if ranks < 1 or num_bytes < 0:
            raise ValueError(
                f"ranks={ranks}, num_bytes={num_bytes}: at least one rank and no negative size"
            )
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.devices_per_node)
        is_all_reduce = operation == "all_reduce"
        hops = further_hops(ranks, all_reduce=is_all_reduce)
        hops_between = 0  # hops that leave a node
        bandwidth = self.inside_bytes_per_s
        if nodes > 1:
            # One hop more than `further_hops`, which leaves out the first.
            hops_of_nodes = further_hops(nodes, all_reduce=is_all_reduce) + 1
            hops_between = min(hops, hops_of_nodes)
            bandwidth = min(bandwidth, self.between_bytes_per_s * self.devices_per_node)
        between_hop_s = self.hop_s if self.between_hop_s is None else self.between_hop_s
        hops_inside = hops - hops_between
        latency_s = self.latency_s + self.hop_s * hops_inside + between_hop_s * hops_between
        link_bytes = link_share(operation, ranks) * num_bytes
        return messages * latency_s + link_bytes / bandwidth

    def across(self, group: int) -> "Network":
        """Return the network of one device if all groups of `group` devices communicate at once.

        Each member sends to the members of other groups that have its place. So the members of a
        group share the links of their node.

        Args:
            group: number of neighbouring devices in a group.
        """
        return replace(self, devices_per_node=max(1, self.devices_per_node // group))


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of one rank without communication.

    Args:
        forward, backward: seconds of all micro-batches.
        optimizer: seconds to step all parameters.
        pack: seconds to copy all gradients into buffers once.
    """

    forward: float
    backward: float
    optimizer: float
    pack: float = 0.0

    def __add__(self, other: "ComputeTime") -> "ComputeTime":
        """Return the seconds of both."""
        return ComputeTime(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            optimizer=self.optimizer + other.optimizer,
            pack=self.pack + other.pack,
        )


@dataclass(frozen=True)
class Messages:
    """Messages of a step: their bytes and their numbers.

    Args:
        gradient_bytes: bytes of all gradients, before they are divided among ranks.
        parameter_bytes: bytes of all gathered parameters, before they are divided among ranks.
        calls: number of collectives of the strategy, as `distlab.theory.volume` counts them.
        buckets: number of buckets.
        units: number of FSDP's units.
        reductions: number of times that gradients are sent: once, or under ZeRO-2 and hybrid
            sharding for each micro-batch.
    """

    gradient_bytes: float
    parameter_bytes: float
    calls: int
    buckets: int
    units: int
    reductions: int = 1


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and its parts.

    Args:
        compute: seconds of forward and backward alone.
        optimizer: seconds of the optimizer, sharded if the strategy shards it.
        overhead: seconds that communication adds to compute and optimizer.
        communication: seconds of all communication, covered or not, undisturbed.
        calls: number of collectives.
        host: seconds that the host takes to start all operators and collectives.
    """

    compute: float
    optimizer: float
    overhead: float
    communication: float
    calls: int
    host: float = 0.0

    @property
    def device(self) -> float:
        """Seconds that the device takes."""
        return self.compute + self.overhead + self.optimizer

    @property
    def step(self) -> float:
        """Seconds of the whole step: the longer of device and host decides."""
        return max(self.device, self.host)


def has_closed_form(strategy: Form) -> bool:
    """Return whether `step_time` describes a strategy.

    It does not describe all-reduces in two levels, or torch's broadcast of each parameter.
    """
    two_levels = strategy.sends == "buckets" and strategy.takes_mesh
    return (
        strategy.sends is not None
        and not two_levels
        and not (strategy.is_peer and strategy.updates == "owned")
    )


def step_time(
    strategy: Form,
    compute: ComputeTime,
    messages: Messages,
    network: Network,
    ranks: int,
    *,
    contention: tuple[float, float] = (1.0, 1.0),
    micro_batches: int = 1,
    group: int | None = None,
) -> StepTime:
    """Return the time of a step under a strategy.

    Args:
        strategy: entry of the strategy.
        compute: seconds of compute of all micro-batches together, see `ComputeTime`.
        messages: bytes and numbers of the messages of a step.
        network: links between the ranks.
        ranks: number of ranks, N.
        contention: rates p and q.
        micro_batches: number accumulated. DDP strategies and ZeRO-1 communicate only during the
            last one's backward, FSDP gathers in each, ZeRO-2 reduces in each, and hybrid sharding
            does both.
        group: number of ranks that share a copy of the parameters, with a mesh. Default: a node.

    Raises:
        ValueError: a strategy without a closed form, or a group that does not divide the ranks.
    """
    if not has_closed_form(strategy):
        raise ValueError(f"strategy {strategy.name!r} has no closed form of its time")
    if strategy.sends == "nothing":
        busy_s = compute.forward + compute.backward
        return StepTime(busy_s, compute.optimizer, overhead=0.0, communication=0.0, calls=0)
    if strategy.sends == "units":
        group = sharding_group(strategy, ranks, network.devices_per_node, group)
        return _time_of_units(compute, messages, network, ranks, group, contention, micro_batches)
    if strategy.updates == "slices":
        return _time_of_slices(
            strategy, compute, messages, network, ranks, contention, micro_batches
        )
    return _time_of_all_reduces(
        strategy, compute, messages, network, ranks, contention, micro_batches
    )


def _time_of_units(
    compute: ComputeTime,
    messages: Messages,
    network: Network,
    ranks: int,
    group: int,
    contention: tuple[float, float],
    micro_batches: int,
) -> StepTime:
    """Return the time of a step that gathers parameters unit by unit: FSDP, and HSDP.

    Every micro-batch gathers in forward and in backward. Only the last one's backward also
    reduce-scatters gradients. HSDP shards inside a group, where every backward reduce-scatters. The
    last one's also all-reduces the shards' gradients between the groups.
    """
    units = messages.units
    is_hybrid = group < ranks
    gather_s = network.seconds(messages.parameter_bytes, group, units, "all_gather")
    scatter_s = network.seconds(messages.gradient_bytes, group, units, "reduce_scatter")
    last_scatter_s = scatter_s
    if is_hybrid:
        shard_bytes = messages.gradient_bytes / group
        # Ranks with the same shard are `group` ranks apart, and all `group` of them send at once.
        between_groups = network.across(group)
        last_scatter_s += between_groups.seconds(shard_bytes, ranks // group, units)
    forward_s = compute.forward / micro_batches
    backward_s = compute.backward / micro_batches
    # Reduce-scatters of a micro-batch that is not the last: none, unless each has them.
    earlier_scatter_s = scatter_s if messages.reductions > 1 else 0.0
    earlier_backwards = micro_batches - 1
    # No computation covers the first gather of a forward and the last reduce-scatter of a backward.
    in_forward = _overhead(forward_s, gather_s, gather_s / units, contention)
    in_backward = _overhead(
        backward_s, gather_s + earlier_scatter_s, earlier_scatter_s / units, contention
    )
    in_last_backward = _overhead(
        backward_s, gather_s + last_scatter_s, last_scatter_s / units, contention
    )
    return StepTime(
        compute=compute.forward + compute.backward,
        optimizer=compute.optimizer / group,
        overhead=(micro_batches * in_forward + earlier_backwards * in_backward + in_last_backward),
        communication=(
            2 * micro_batches * gather_s + earlier_backwards * earlier_scatter_s + last_scatter_s
        ),
        calls=messages.calls,
    )


def _time_of_slices(
    strategy: Form,
    compute: ComputeTime,
    messages: Messages,
    network: Network,
    ranks: int,
    contention: tuple[float, float],
    micro_batches: int,
) -> StepTime:
    """Return the time of a step in which every rank updates a slice of each bucket: ZeRO-1 and 2.

    A reduce-scatter of gradients under backward and an all-gather of parameters under the next
    forward take equally long. Each is half of an all-reduce. ZeRO-2 sends the gradients of each
    micro-batch, which are first packed into buckets.
    """
    half_s = network.seconds(messages.gradient_bytes, ranks, messages.buckets, "reduce_scatter")
    bucket_s = half_s / messages.buckets
    # Parameters of the last step arrive under the first micro-batch's forward, which cannot start
    # before the first bucket has. Gradients leave under the last micro-batch's backward.
    in_forward = _overhead(compute.forward / micro_batches, half_s, bucket_s, contention)
    in_backward = _overhead(compute.backward / micro_batches, half_s, bucket_s, contention)
    packed_again_s = (messages.reductions - 1) * compute.pack
    return StepTime(
        compute=_busy_seconds(strategy, compute) + packed_again_s,
        optimizer=compute.optimizer / ranks,
        overhead=in_forward + messages.reductions * in_backward,
        communication=(1 + messages.reductions) * half_s,
        calls=messages.calls,
    )


def _time_of_all_reduces(
    strategy: Form,
    compute: ComputeTime,
    messages: Messages,
    network: Network,
    ranks: int,
    contention: tuple[float, float],
    micro_batches: int,
) -> StepTime:
    """Return the time of a step that all-reduces gradients: after backward or under it."""
    # All collectives are all-reduces, unless owners also broadcast their parameters.
    count = messages.buckets if strategy.updates == "owned" else messages.calls
    communication_s = network.seconds(messages.gradient_bytes, ranks, count)
    if strategy.after_backward:
        overhead_s = communication_s
    else:
        # The last message holds gradients that are complete only when backward is.
        last_message_s = network.seconds(messages.gradient_bytes / count, ranks)
        backward_s = compute.backward / micro_batches
        overhead_s = _overhead(backward_s, communication_s, last_message_s, contention)
    optimizer_s = compute.optimizer
    if strategy.updates == "owned":
        # Each rank updates its own parameters and broadcasts them. The broadcasts of different
        # owners load the links of a ring evenly, as an all-gather does.
        broadcasts = messages.calls - count
        broadcast_s = network.seconds(messages.gradient_bytes, ranks, broadcasts, "all_gather")
        optimizer_s = optimizer_s / ranks
        overhead_s += broadcast_s
        communication_s += broadcast_s
    return StepTime(
        compute=_busy_seconds(strategy, compute),
        optimizer=optimizer_s,
        overhead=overhead_s,
        communication=communication_s,
        calls=messages.calls,
    )


def _busy_seconds(strategy: Form, compute: ComputeTime) -> float:
    """Return the seconds of forward, backward and the copies into buffers, if there are any."""
    busy_s = compute.forward + compute.backward
    if strategy.sends in ("all", "buckets"):
        busy_s += compute.pack
    return busy_s


def _overhead(
    work_s: float, communication_s: float, tail_s: float, contention: tuple[float, float]
) -> float:
    """Return the seconds that communication adds to computation.

    Args:
        work_s: seconds of computation.
        communication_s: seconds of communication.
        tail_s: seconds of communication at the end that no computation can cover.
        contention: rates p and q.
    """
    if communication_s == 0:
        return 0.0  # exactly, where the difference below would leave a rounding error
    compute_rate, communication_rate = contention
    together_s = pipeline(
        [0.0],
        [communication_s - tail_s],
        work_s,
        compute_rate=compute_rate,
        communication_rate=communication_rate,
    )
    return together_s + tail_s - work_s


def sharding_group(
    strategy: Form, ranks: int, devices_per_node: int, group: int | None = None
) -> int:
    """Return the size of a strategy's shard groups.

    It is `group` with a mesh, else all ranks if the strategy shards parameters, or one.

    Args:
        strategy: entry of the strategy.
        ranks: number of ranks.
        devices_per_node: number of devices of a node.
        group: number of ranks in a group. None: the largest divisor of the ranks that fits a node.

    Raises:
        ValueError: a group that does not divide the ranks. The message lists what does.
    """
    if not strategy.takes_mesh:
        return ranks if strategy.sends == "units" else 1
    if group is None:
        return max(size for size in divisors(ranks) if size <= devices_per_node)
    if not 1 <= group <= ranks or ranks % group:
        allowed = ", ".join(str(size) for size in divisors(ranks))
        raise ValueError(f"groups of {group} do not divide {ranks} ranks; choose one of {allowed}")
    return group


def pipeline(
    ready_s: Sequence[float],
    message_s: Sequence[float],
    backward_s: float,
    *,
    compute_rate: float = 1.0,
    communication_rate: float = 1.0,
) -> float:
    """Return the seconds from the start of backward until all buckets are sent, by events.

    It has none of the closed form's assumptions: buckets may be complete at any time and cost any
    time. They leave in order, and while one is sent backward runs at p = `compute_rate` and the
    message at q = `communication_rate` of their speed alone.

    Args:
        ready_s: seconds of undisturbed backward after which each bucket is complete. Later ones
            wait for earlier.
        message_s: seconds of each message alone.
        backward_s: T, seconds of backward, undisturbed.
        compute_rate: p, speed of backward while a message is sent, relative to its speed alone.
        communication_rate: q, speed of a message during backward, relative to its speed alone.

    Raises:
        ValueError: unequal lengths, a negative time, a rate outside (0, 1].
    """
    rates = (compute_rate, communication_rate)
    if len(ready_s) != len(message_s) or not all(0 < rate <= 1 for rate in rates):
        raise ValueError(
            f"{len(ready_s)} buckets, {len(message_s)} messages, rates {rates}: see the docstring"
        )
    if min([backward_s, *ready_s, *message_s]) < 0:
        raise ValueError("times must not be negative")
    now = 0.0  # seconds since the start
    done = 0.0  # seconds of undisturbed backward that are done by then
    for ready, message in zip(ready_s, message_s, strict=True):
        ready = min(ready, backward_s)
        if ready > done:
            # No message is being sent, and backward runs alone until the bucket is complete.
            now = now + ready - done
            done = ready
        # Backward and the message run together until the first of them is done.
        together = min(message / communication_rate, (backward_s - done) / compute_rate)
        now += together
        done = min(backward_s, done + compute_rate * together)
        # The rest of the message runs alone, if backward was done first.
        now += message - communication_rate * together
    return now + backward_s - done
