"""Time of events on a machine, with a stream that computes and one that communicates.

The two streams wait for each other and slow each other down.

The computing stream runs operators in order. A collective is ready when that stream reaches its
issue, runs when those issued before it are done, and the stream stops at a wait until the
collective is. While both streams run, each runs at its rate of the machine's contention.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from distlab.measure.collectives import CollectiveCall
from distlab.measure.trace.intervals import Interval, intersect, subtract, total, union
from distlab.simulate.events import Compute, GroupCall, Wait
from distlab.simulate.step import SimulatedStep
from distlab.theory.step_time import Network

ROUNDING_S = 1e-15  # seconds; a rest below this is a rounding error


@dataclass(frozen=True)
class DeviceModel:
    """Roofline model of a device: the longer of arithmetic and memory traffic, plus a launch.

    Args:
        flops_per_s: FLOP/s that matmuls reach (peak × efficiency).
        bytes_per_s: bytes per second that memory-bound operators reach.
        launch_s: seconds added to every operator: the gap before its kernel, the kernel's ramp and
            its tail.
        update_bytes_per_s: bytes per second of the optimizer, one long pass over contiguous
            tensors. None: as `bytes_per_s`.
        attention_flops_per_s: FLOP/s of fused attention. None: as `flops_per_s`.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float = 0.0
    update_bytes_per_s: float | None = None
    attention_flops_per_s: float | None = None

    def seconds(self, operator: Compute) -> float:
        """Return the seconds of one operator."""
        bytes_per_s = self.bytes_per_s
        if operator.phase == "optimizer" and self.update_bytes_per_s is not None:
            bytes_per_s = self.update_bytes_per_s
        flops_per_s = self.flops_per_s
        if operator.is_attention and self.attention_flops_per_s is not None:
            flops_per_s = self.attention_flops_per_s
        return self.launch_s + max(operator.flops / flops_per_s, operator.bytes / bytes_per_s)


@dataclass(frozen=True)
class Machine:
    """Cost model of equal devices, of the network between them, and of the contention.

    Args:
        device: cost model of one device.
        network: cost model of a message between devices.
        contention: rates of computation and of communication while both run, relative to each alone
            (1: no disturbance). Both use SMs and memory bandwidth.

    Raises:
        ValueError: a rate outside (0, 1].
    """

    device: DeviceModel
    network: Network
    contention: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if not all(0 < rate <= 1 for rate in self.contention):
            raise ValueError(
                f"contention={self.contention}: two rates in (0, 1]; 1 means no disturbance"
            )


@dataclass(frozen=True)
class Timeline:
    """Times of one step in the steady state, in ms of the computing stream.

    Args:
        step_ms: ms from the end of the step before to the end of this one.
        comm_ms: ms in which the communication stream ran.
        overhead_ms: ms that the step takes longer than the same operators without communication.
        overlap_pct: share of `comm_ms` in which computation also ran, in %. None without
            communication.
        phases: ms of the computing stream in `forward`, `backward` and `optimizer`, waits included.
        lanes: `compute`, `communication` and `exposed` as disjoint intervals. 0 is the start of the
            step.
    """

    step_ms: float
    comm_ms: float
    overhead_ms: float
    overlap_pct: float | None
    phases: dict[str, float]
    lanes: dict[str, list[Interval]] = field(repr=False)


def replay(step: SimulatedStep, machine: Machine) -> Timeline:
    """Return the times of a step on a machine. The same arguments give the same times."""
    streams = _Streams(step.world_size, machine)
    # The first step only puts in flight what the second waits for.
    streams.run(step.items[: step.boundary])
    begin = streams.now
    streams.phases.clear()
    streams.run(step.items[step.boundary :])
    end = streams.now
    # The collectives that are in flight at the end stand for those that were in flight at the
    # beginning, so both are cut off.
    window = [(begin, end)]
    compute = intersect(streams.compute, window)
    comm = intersect(streams.comm, window)
    exposed = subtract(comm, compute)
    step_ms = 1e3 * (end - begin)
    comm_ms = 1e3 * total(comm)
    # Operators one after the other, at full rate: the step without communication.
    local_ms = 1e3 * sum(machine.device.seconds(item) for item in step.operators)
    overlap_pct = None
    if comm_ms:
        overlap_pct = 100 * (1 - 1e3 * total(exposed) / comm_ms)
    return Timeline(
        step_ms=step_ms,
        comm_ms=comm_ms,
        overhead_ms=step_ms - local_ms,
        overlap_pct=overlap_pct,
        phases={phase: 1e3 * seconds for phase, seconds in streams.phases.items()},
        lanes={
            "compute": _ms_after(begin, compute),
            "communication": _ms_after(begin, comm),
            "exposed": _ms_after(begin, exposed),
        },
    )


def _ms_after(begin: float, spans: list[Interval]) -> list[Interval]:
    """Return intervals of seconds as ms after `begin`."""
    return [(1e3 * (first - begin), 1e3 * (last - begin)) for first, last in spans]


@dataclass(slots=True)
class _InFlight:
    """A collective that was issued and is not done.

    Args:
        sequence: number of the collective.
        seconds_left: seconds that the rest of it takes alone.
    """

    sequence: int
    seconds_left: float


class _Streams:
    """Computing stream and communication stream, and the clock of both.

    Attributes:
        now: seconds since the beginning, on the computing stream.
        queue: collectives in flight, in the order of issue. Only the first one runs.
        compute: seconds in which the computing stream ran.
        comm: seconds in which the communication stream ran.
        phases: phase → seconds.
    """

    def __init__(self, ranks: int, machine: Machine):
        self.ranks = ranks
        self.machine = machine
        self.now = 0.0
        self.queue: deque[_InFlight] = deque()
        self.compute: list[Interval] = []
        self.comm: list[Interval] = []
        self.phases: dict[str, float] = {}
        self.phase = "forward"

    def run(self, items: Sequence[Compute | CollectiveCall | Wait]) -> None:
        """Run the events in order."""
        for item in items:
            begin = self.now
            if isinstance(item, Compute):
                self.phase = item.phase
                self._compute(self.machine.device.seconds(item))
            elif isinstance(item, CollectiveCall):
                network = self.machine.network
                ranks = self.ranks
                if isinstance(item, GroupCall):
                    network = network.across(item.stride)
                    ranks = item.ranks
                seconds = network.seconds(item.bytes, ranks, operation=item.op)
                self.queue.append(_InFlight(item.sequence, seconds))
            else:
                # A collective runs when those before it are done.
                while any(each.sequence == item.sequence for each in self.queue):
                    self._communicate(self.queue[0].seconds_left)
            # Waits and collectives have no phase of their own. They count in that of the last
            # operator.
            self.phases[self.phase] = self.phases.get(self.phase, 0.0) + self.now - begin
        # Operators that touch become one interval, of which a step has thousands otherwise.
        self.compute = union(self.compute)
        self.comm = union(self.comm)

    def _compute(self, work: float) -> None:
        """Run an operator of `work` seconds, slowed while there is communication."""
        begin = self.now
        compute_rate, comm_rate = self.machine.contention
        while work > 0 and self.queue:
            # Both run until the first of them is done.
            lasts = min(work / compute_rate, self.queue[0].seconds_left / comm_rate)
            work -= lasts * compute_rate
            # A rest of a rounding error would go round again, with an empty communication.
            work = 0.0 if work < ROUNDING_S else work
            self._communicate(lasts, comm_rate)
        self.now += work
        if self.now > begin:
            self.compute.append((begin, self.now))

    def _communicate(self, lasts: float, rate: float = 1.0) -> None:
        """Run the first collective for a while.

        Args:
            lasts: seconds.
            rate: rate relative to the collective alone. It does the work that takes `lasts · rate`
                alone.
        """
        if lasts > 0:
            self.comm.append((self.now, self.now + lasts))
        self.now += lasts
        first = self.queue[0]
        first.seconds_left -= lasts * rate
        if first.seconds_left <= ROUNDING_S:
            self.queue.popleft()
