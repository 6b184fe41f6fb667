"""The time of a step in closed form: compute, what communication adds to it under each strategy, and the optimizer.

Two streams run work of A (compute) and B (communication) seconds, each alone. While both run, compute proceeds at the
rate p and communication at q (both in (0, 1], 1 without contention). They share

    min(A/p, B/q)   seconds; then the rest of the longer one runs alone, and both are done after

    B/q + A − p·B/q   if B/q ≤ A/p,   else   A/p + B − q·A/p

`together` is this. A strategy says what runs beside what:

    naive, flat          all-reduce after backward
    overlap, bucketed    all-reduce beside backward, the last message alone
    zero1                reduce-scatter beside backward, all-gather beside the next forward
    fsdp                 all-gather beside forward, the first alone; all-gather and reduce-scatter beside backward

Strategies with buffers also copy every gradient once (`ComputeTime.pack`).
"""

import math
from dataclasses import dataclass

ALL_REDUCE, ONE_PASS = 2, 1
PACKS = ("flat", "bucketed", "sharded-optimizer", "zero1")


@dataclass(frozen=True)
class Network:
    """Rings over nodes of several devices.

    Args:
        inside_bytes_per_s: what a device sends inside its node.
        between_bytes_per_s: what a device sends to other nodes; a node's devices send side by side.
        devices_per_node: how many share a node.
        latency_s: of a collective between two devices, its launch included.
        hop_s: more per further device on the ring.

    Raises:
        ValueError: something not positive.
    """

    inside_bytes_per_s: float
    between_bytes_per_s: float
    devices_per_node: int = 8
    latency_s: float = 0.0
    hop_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("inside_bytes_per_s", "between_bytes_per_s", "devices_per_node"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")

    def ring_bytes_per_s(self, ranks: int) -> float:
        """Bytes per second through the slowest place of the rings. Several rings run side by side, each leaving a node
        through another device's link, so a node's links add up and meet those inside."""
        if ranks <= self.devices_per_node:
            return self.inside_bytes_per_s
        return min(self.inside_bytes_per_s, self.between_bytes_per_s * self.devices_per_node)

    def seconds(self, num_bytes: float, ranks: int, messages: int = 1, passes: int = ALL_REDUCE) -> float:
        """`messages` collectives of together `num_bytes`; an all-reduce passes twice, each other collective once.

        Latency grows along the ring; an all-reduce of many ranks goes up and down a tree instead, 2·log₂N hops.
        """
        if ranks < 1 or num_bytes < 0:
            raise ValueError(f"ranks={ranks}, num_bytes={num_bytes}: at least one rank and no negative size")
        if ranks == 1:
            return 0.0
        hops = ranks - 2
        if passes == ALL_REDUCE:
            hops = min(hops, math.ceil(2 * math.log2(ranks)))
        volume = passes * (ranks - 1) / ranks * num_bytes
        return messages * (self.latency_s + self.hop_s * hops) + volume / self.ring_bytes_per_s(ranks)


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of one rank without communication.

    Args:
        forward, backward: of all micro-batches.
        optimizer: of stepping all parameters.
        pack: of copying all gradients into buffers once.
    """

    forward: float
    backward: float
    optimizer: float
    pack: float = 0.0


@dataclass(frozen=True)
class Messages:
    """What is sent in a step: bytes of all gradients, bytes of all parameters as gathered, and in how many messages.

    Args:
        gradient_bytes, parameter_bytes: on one rank, whole.
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
    """Seconds of a step and what they consist of.

    Args:
        step: all of it.
        compute: forward and backward alone.
        optimizer: the optimizer's part, sharded where the strategy shards it.
        exposed: what communication adds.
        communication: all communication, covered or not, undisturbed.
    """

    step: float
    compute: float
    optimizer: float
    exposed: float
    communication: float


def together(compute: float, communication: float, p: float = 1.0, q: float = 1.0) -> float:
    """Seconds until both are done that start at once; see above.

    Raises:
        ValueError: a rate outside (0, 1] or a negative time.
    """
    if not (0 < p <= 1 and 0 < q <= 1) or compute < 0 or communication < 0:
        raise ValueError(
            f"compute={compute}, communication={communication}, rates {p}, {q}: see the docstring"
        )
    if communication / q <= compute / p:
        return communication / q + compute - p * communication / q
    return compute / p + communication - q * compute / p


def step_time(
    strategy: str,
    compute: ComputeTime,
    messages: Messages,
    network: Network,
    ranks: int,
    *,
    contention: tuple[float, float] = (1.0, 1.0),
    micro_batches: int = 1,
) -> StepTime:
    """The step of a strategy.

    Args:
        compute: see `ComputeTime`; of all micro-batches together.
        contention: p and q.
        micro_batches: accumulated; the DDPs communicate beside the last one's backward only, FSDP gathers anew in each.

    Raises:
        ValueError: an unknown strategy.
    """
    p, q = contention
    size, n, m = messages.gradient_bytes, ranks, micro_batches
    base = compute.forward + compute.backward + (compute.pack if strategy in PACKS else 0.0)
    last = compute.backward / m  # what the synchronised backward can cover
    if strategy == "local":
        return StepTime(base + compute.optimizer, base, compute.optimizer, 0.0, 0.0)
    if strategy in ("naive", "flat"):
        comm = network.seconds(size, n, messages.parameters if strategy == "naive" else 1)
        return StepTime(base + comm + compute.optimizer, base, compute.optimizer, comm, comm)
    if strategy in ("overlap", "bucketed", "sharded-optimizer"):
        count = messages.parameters if strategy == "overlap" else messages.buckets
        comm, tail = network.seconds(size, n, count), network.seconds(size / count, n)
        exposed = together(last, comm - tail, p, q) + tail - last
        optimizer = compute.optimizer
        if strategy == "sharded-optimizer":
            sending = network.seconds(size, n, messages.buckets, ONE_PASS)
            optimizer, exposed, comm = optimizer / n, exposed + sending, comm + sending
    elif strategy == "zero1":
        half, tail = (
            network.seconds(size / k, n, c, ONE_PASS)
            for k, c in ((1, messages.buckets), (messages.buckets, 1))
        )
        gathered = together(compute.forward / m, half - tail, p, q) + tail - compute.forward / m
        exposed = gathered + together(last, half - tail, p, q) + tail - last
        optimizer, comm = compute.optimizer / n, 2 * half
    elif strategy in ("fsdp", "hsdp"):
        # HSDP shards inside a node, and all-reduces the shards' gradients between the nodes.
        inner = min(n, network.devices_per_node) if strategy == "hsdp" else n
        gather = network.seconds(messages.parameter_bytes, inner, messages.units, ONE_PASS)
        scatter = network.seconds(size, inner, messages.units, ONE_PASS)
        if inner < n:
            across = Network(
                network.between_bytes_per_s, network.between_bytes_per_s, 1, network.latency_s, network.hop_s
            )
            scatter += across.seconds(size / inner, n // inner, messages.units)
        first = gather / messages.units
        forward = together(compute.forward / m, gather - first, p, q) + first - compute.forward / m
        plain = together(last, gather, p, q) - last  # of a micro-batch whose gradients stay
        backward = together(last, gather + scatter, p, q) - last
        exposed = m * forward + (m - 1) * plain + backward
        optimizer, comm = compute.optimizer / inner, (2 * m) * gather + scatter
    else:
        raise ValueError(
            f"strategy {strategy!r} has no closed form of its time; choose one of local, naive, flat, overlap, "
            "bucketed, sharded-optimizer, zero1, fsdp, hsdp"
        )
    return StepTime(base + exposed + optimizer, base, optimizer, exposed, comm)
