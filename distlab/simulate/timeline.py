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


@dataclass(frozen=True)
class DeviceModel:
    """An operator takes the longer of its arithmetic and its memory traffic, and a launch.

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
        """Time of one operator."""
        updates = operator.phase == "optimizer" and self.update_bytes_per_s is not None
        bytes_per_s = self.update_bytes_per_s if updates else self.bytes_per_s
        attends = operator.is_attention and self.attention_flops_per_s is not None
        flops_per_s = self.attention_flops_per_s if attends else self.flops_per_s
        return self.launch_s + max(operator.flops / flops_per_s, operator.bytes / bytes_per_s)


@dataclass(frozen=True)
class Machine:
    """A kind of device, the network between devices, and the slow-down of each by the other.

    Args:
        device: model of one device.
        network: model of the messages.
        contention: rates of computation and of communication while both run, relative to each alone
            (1: no disturbance); both use SMs and memory bandwidth.

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
    """One step in the steady state, in ms of the computing stream.

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
    """Time the step; deterministic."""
    streams = _Streams(step.world_size, machine)
    streams.run(step.items[: step.boundary])
    begin = streams.now
    streams.phases.clear()
    streams.run(step.items[step.boundary :])
    end = streams.now
    window = [(begin, end)]
    # The last step leaves in flight what its predecessor left in flight for it.
    compute, comm = intersect(streams.compute, window), intersect(streams.comm, window)
    local_ms = 1e3 * sum(machine.device.seconds(item) for item in step.operators)
    exposed, comm_ms = subtract(comm, compute), 1e3 * total(comm)
    step_ms = 1e3 * (end - begin)
    lanes = {"compute": compute, "communication": comm, "exposed": exposed}
    return Timeline(
        step_ms=step_ms,
        comm_ms=comm_ms,
        overhead_ms=step_ms - local_ms,
        overlap_pct=100 * (1 - 1e3 * total(exposed) / comm_ms) if comm_ms else None,
        phases={phase: 1e3 * seconds for phase, seconds in streams.phases.items()},
        lanes={
            name: [(1e3 * (a - begin), 1e3 * (b - begin)) for a, b in spans]
            for name, spans in lanes.items()
        },
    )


class _Streams:
    def __init__(self, ranks: int, machine: Machine):
        self.ranks, self.machine = ranks, machine
        self.now = 0.0
        # [number, seconds left] of collectives issued and not done
        self.queue: deque[list] = deque()
        self.compute: list[Interval] = []
        self.comm: list[Interval] = []
        self.phases: dict[str, float] = {}
        self.phase = "forward"

    def run(self, items: Sequence[Compute | CollectiveCall | Wait]) -> None:
        for item in items:
            begin = self.now
            if isinstance(item, Compute):
                self.phase = item.phase
                self._compute(self.machine.device.seconds(item))
            elif isinstance(item, CollectiveCall):
                network, ranks = self.machine.network, self.ranks
                if isinstance(item, GroupCall):
                    network, ranks = network.across(item.stride), item.ranks
                seconds = network.seconds(item.bytes, ranks, operation=item.op)
                self.queue.append([item.sequence, seconds])
            else:
                while any(number == item.sequence for number, _ in self.queue):
                    self._communicate(self.queue[0][1])
            self.phases[self.phase] = self.phases.get(self.phase, 0.0) + self.now - begin
        self.compute, self.comm = union(self.compute), union(self.comm)

    def _compute(self, work: float) -> None:
        """Run an operator of `work` seconds, slowed while there is communication."""
        begin, (compute_rate, comm_rate) = self.now, self.machine.contention
        while work > 0 and self.queue:
            share = min(work / compute_rate, self.queue[0][1] / comm_rate)
            work -= share * compute_rate
            work = 0.0 if work < 1e-15 else work
            self._communicate(share, comm_rate)
        self.now += work
        if self.now > begin:
            self.compute.append((begin, self.now))

    def _communicate(self, lasts: float, rate: float = 1.0) -> None:
        """Run the first collective for `lasts` seconds at `rate`.

        It does the work that takes `lasts · rate` alone.
        """
        if lasts > 0:
            self.comm.append((self.now, self.now + lasts))
        self.now += lasts
        self.queue[0][1] -= lasts * rate
        if self.queue[0][1] <= 1e-15:
            self.queue.popleft()
