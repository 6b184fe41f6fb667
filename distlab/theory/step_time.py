"""The time of a step in closed form: compute, the overhead of communication, and the optimizer.

Two streams run work of A (compute) and B (communication) seconds, each alone. While both run,
compute proceeds at the rate p and communication at q (both in (0, 1], 1 without contention). They
share

    min(A/p, B/q)   seconds; then the rest of the longer one runs alone, and both are done after

    B/q + A − p·B/q   if B/q ≤ A/p,   else   A/p + B − q·A/p

`pipeline` of one message that is ready at once gives this. A strategy says which work overlaps:

    after backward       all-reduce after it
        gradients, buckets   all-reduce during backward, the last message alone
        slices (ZeRO-1)      reduce-scatter during backward, all-gather during the next forward
        units (FSDP)         all-gather during forward, the first alone; all-gather and reduce-scatter during backward,
                         the last reduce-scatter alone

Strategies with buffers also copy every gradient once (`ComputeTime.pack`).

How many buckets? docs/learn/theory/buckets.md has the closed form for buckets of equal size.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from distlab.theory.collective_time import further_hops, link_share
from distlab.theory.forms import Form
from distlab.theory.model_shape import divisors


@dataclass(frozen=True)
class Network:
    """Rings over nodes of several devices.

    Args:
        inside_bytes_per_s: bytes per second that a device sends inside its node.
        between_bytes_per_s: bytes per second that a device sends to other nodes. A node's devices
            send at the same time.
        devices_per_node: number of devices of a node.
        latency_s: seconds of a collective between two devices, its launch included.
        hop_s: seconds per further device on the ring.
        between_hop_s: seconds per further node. None: `hop_s`.

    Raises:
        ValueError: a number that is not positive.
    """

    inside_bytes_per_s: float
    between_bytes_per_s: float
    devices_per_node: int = 8
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

        Latency grows along the ring; an all-reduce of many ranks goes up and down a tree instead,
        2·log₂N hops. Several rings run side by side, each leaving a node through another device's
        link, so a node's links add up and meet those inside; the slowest place decides.
        """
        if ranks < 1 or num_bytes < 0:
            raise ValueError(
                f"ranks={ranks}, num_bytes={num_bytes}: at least one rank and no negative size"
            )
        if ranks == 1:
            return 0.0
        nodes, all_reduce = -(-ranks // self.devices_per_node), operation == "all_reduce"
        hops = further_hops(ranks, all_reduce=all_reduce)
        across = min(
            hops, further_hops(nodes, all_reduce=True) + 1 if all_reduce else nodes - 1
        ) * (nodes > 1)
        between_hop = self.hop_s if self.between_hop_s is None else self.between_hop_s
        latency = self.latency_s + self.hop_s * (hops - across) + between_hop * across
        volume = link_share(operation, ranks) * num_bytes
        between = self.between_bytes_per_s * self.devices_per_node if nodes > 1 else math.inf
        return messages * latency + volume / min(self.inside_bytes_per_s, between)

    def across(self, group: int) -> "Network":
        """Return the network of one device if all groups of `group` devices communicate at once.

        Each member sends to the members of other groups that have its place.
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
        return ComputeTime(
            *(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True))
        )


@dataclass(frozen=True)
class Messages:
    """Messages of a step: bytes of all gradients and of all gathered parameters, and their numbers.

    Args:
        gradient_bytes, parameter_bytes: bytes on one rank, whole.
        parameters: number of parameter tensors.
        buckets: number of buckets.
        units: number of FSDP's units.
    """

    gradient_bytes: float
    parameter_bytes: float
    parameters: int
    buckets: int
    units: int


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
        """All of it: the longer of device and host decides."""
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
        compute: seconds of compute of all micro-batches together, see `ComputeTime`.
        contention: rates p and q.
        micro_batches: number accumulated. DDP strategies communicate only during the last one's
            backward, FSDP gathers in each.
        group: number of ranks that share a copy of the parameters, with a mesh. Default: a node.

    Raises:
        ValueError: a strategy without a closed form, or a group that does not divide the ranks.
    """
    if not has_closed_form(strategy):
        raise ValueError(f"strategy {strategy.name!r} has no closed form of its time")
    p, q = contention
    size, n, m = messages.gradient_bytes, ranks, micro_batches
    base = (
        compute.forward + compute.backward + compute.pack * (strategy.sends in ("all", "buckets"))
    )
    last = compute.backward / m  # what the synchronised backward can cover
    optimizer = compute.optimizer

    def beside(work: float, comm: float, tail: float = 0.0) -> float:
        """Return the seconds that communication adds to `work`.

        All of it except its last `tail` may run at the same time.
        """
        if comm == 0:
            return 0.0  # exactly, where the sum below would leave what rounding does
        return (
            pipeline([0.0], [comm - tail], work, compute_rate=p, communication_rate=q) + tail - work
        )

    if strategy.sends == "nothing":
        comm, overhead, calls = 0.0, 0.0, 0
    elif strategy.sends == "units":
        # HSDP shards inside a group, and all-reduces the shards' gradients between the groups.
        inner = sharding_group(strategy, n, network.devices_per_node, group)
        gather = network.seconds(messages.parameter_bytes, inner, messages.units, "all_gather")
        scatter = network.seconds(size, inner, messages.units, "reduce_scatter")
        if inner < n:
            scatter += network.across(inner).seconds(size / inner, n // inner, messages.units)
        forward = beside(compute.forward / m, gather, gather / messages.units)
        plain = beside(last, gather)  # of a micro-batch whose gradients stay
        overhead = (
            m * forward + (m - 1) * plain + beside(last, gather + scatter, scatter / messages.units)
        )
        optimizer, comm = compute.optimizer / inner, (2 * m) * gather + scatter
        calls = messages.units * (2 * m + 1 + (inner < n))
    elif strategy.updates == "slices":
        half = network.seconds(size, n, messages.buckets, "reduce_scatter")
        tail = half / messages.buckets
        overhead = beside(compute.forward / m, half, tail) + beside(last, half, tail)
        optimizer, comm, calls = compute.optimizer / n, 2 * half, 2 * messages.buckets
    else:
        calls = count = {"gradients": messages.parameters, "all": 1, "buckets": messages.buckets}[
            strategy.sends
        ]
        comm, tail = network.seconds(size, n, count), network.seconds(size / count, n)
        overhead = comm if strategy.after_backward else beside(last, comm, tail)
        if strategy.updates == "owned":
            # Broadcasts of different owners load the ring's links evenly, as an all-gather does.
            sending = network.seconds(size, n, messages.buckets, "all_gather")
            optimizer, overhead, comm = optimizer / n, overhead + sending, comm + sending
            calls = 2 * count
    return StepTime(base, optimizer, overhead, comm, calls)


def sharding_group(
    strategy: Form, ranks: int, devices_per_node: int, group: int | None = None
) -> int:
    """Return the size of a strategy's shard groups.

    It is `group` with a mesh, else all ranks if the strategy shards parameters, or one.

    Raises:
        ValueError: a group that does not divide the ranks; the message lists what does.
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
        ready_s: seconds of undisturbed backward after which each bucket is complete; later ones
            wait for earlier.
        message_s: seconds of each message alone.
        backward_s: T, seconds of backward, undisturbed.

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
    now = done = 0.0  # seconds, and seconds of backward's own time
    for ready, message in zip(ready_s, message_s, strict=True):
        ready = min(ready, backward_s)
        if ready > done:  # nothing is under way
            now, done = now + ready - done, ready
        beside = min(message / communication_rate, (backward_s - done) / compute_rate)
        now, done = now + beside, min(backward_s, done + compute_rate * beside)
        now += message - communication_rate * beside
    return now + backward_s - done
