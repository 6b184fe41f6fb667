"""One rank's steps: the account of each, and the communication in it with its exposed time."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distlab.measure.trace.account import StepAccount, account
from distlab.measure.trace.capture import OPTIMIZER
from distlab.measure.trace.intervals import Cover, Interval, subtract
from distlab.measure.trace.kernels import category
from distlab.measure.trace.names import POINT_TO_POINT, operation_of
from distlab.measure.trace.reader import Event, HostSpan, Trace
from distlab.trace.steps import Steps

OPTIMIZER_STEP = "Optimizer.step#"  # range of torch's optimizers
# The profiler's times are exact to some µs, so a kernel may seem to begin before what it waits for
# has ended.
_TINY_MS = 0.002


@dataclass(eq=False)
class Message:
    """One communication of one rank in one step.

    Attributes:
        event: the communication in the rank's trace.
        step: number of the step.
        rank: number of the rank.
        place: number among the communications of its operation and group in the step. None if it
            began before the step.
        exposed: intervals in which neither compute nor an earlier communication covers it.
        peers: rank → the same collective there, this rank included. Empty for a send and a receive.
    """

    event: Event
    step: int
    rank: int
    place: int | None
    exposed: list[Interval]
    peers: dict[int, Message] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Duration in ms."""
        return self.event.end_ms - self.event.start_ms

    @property
    def exposed_ms(self) -> float:
        """Length of `exposed` in ms."""
        return sum(end - start for start, end in self.exposed)

    @property
    def is_point_to_point(self) -> bool:
        """True for a send, a receive, and several of them in one kernel."""
        operation = self.event.collective.operation
        if operation == "other":  # c10d calls several of them `coalesced`
            operation = operation_of(self.event.name)
        return operation == POINT_TO_POINT

    @property
    def late_rank(self) -> int | None:
        """Rank that arrived last. None without traces of other ranks.

        A collective ends everywhere at the same moment. So the rank on which it is shortest began
        it last, whatever the clocks of the ranks show.
        """
        if len(self.peers) < 2:
            return None
        return min(self.peers, key=lambda rank: self.peers[rank].ms)

    @property
    def wait_ms(self) -> float:
        """Length in ms of the wait for the rank that arrived last, 0 if it is not known."""
        late = self.late_rank
        return 0.0 if late is None else self.ms - self.peers[late].ms


@dataclass(eq=False)
class RankStep:
    """One step of one rank.

    Attributes:
        number: number of the step.
        window: interval of the step in ms.
        events: events that overlap it, by start.
        account: division of its time.
        messages: its communications, by start.
        phases: where its phases are.
    """

    number: int
    window: Interval
    events: list[Event]
    account: StepAccount
    messages: list[Message]
    phases: Phases

    @functools.cached_property
    def compute(self) -> Cover:
        """Time in which something computes."""
        return self._cover("compute")

    @functools.cached_property
    def communication(self) -> Cover:
        """Time in which something communicates."""
        return self._cover("communication")

    @functools.cached_property
    def copies(self) -> Cover:
        """Time in which something is copied."""
        return self._cover("copy")

    @functools.cached_property
    def idle(self) -> Cover:
        """Time in which nothing runs."""
        busy = [(event.start_ms, event.end_ms) for event in self.events]
        return Cover(subtract([self.window], busy))

    @functools.cached_property
    def without_compute(self) -> Cover:
        """Time in which nothing computes and nothing is copied; something may communicate."""
        busy = [*self.compute.intervals, *self.copies.intervals]
        return Cover(subtract([self.window], busy))

    @functools.cached_property
    def without_work(self) -> Cover:
        """Time in which nothing computes or communicates; something may be copied."""
        busy = [*self.compute.intervals, *self.communication.intervals]
        return Cover(subtract([self.window], busy))

    @functools.cached_property
    def point_to_point(self) -> Cover:
        """Time in which a send or a receive is exposed."""
        found = []
        for message in self.messages:
            if message.is_point_to_point:
                found += message.exposed
        return Cover(found)

    def idle_before(self, moment: float) -> Interval | None:
        """Return the idle interval that ends at a moment, or None."""
        found = self.idle.within(moment - _TINY_MS, moment)
        if not found or found[-1][1] < moment - _TINY_MS:
            return None
        return self.idle.around(found[-1][0])

    def before(self, event: Event) -> Iterator[Event]:
        """Yield the events that begin before this one, the last one first."""
        for place in range(bisect_left(self._starts, event.start_ms) - 1, -1, -1):
            yield self.events[place]

    def after(self, moment: float) -> Event | None:
        """Return the first event of the step that begins at a moment or later, or None."""
        place = bisect_left(self._starts, moment - _TINY_MS)
        return self.events[place] if place < len(self.events) else None

    def compute_after(self, moment: float) -> Event | None:
        """Return the first compute of the step that begins at a moment or later, or None."""
        events, starts = self._computes
        place = bisect_left(starts, moment - _TINY_MS)
        return events[place] if place < len(events) else None

    def communication_from(self, moment: float) -> Message | None:
        """Return the first communication of the step that begins at a moment or later, or None."""
        place = bisect_left(self._message_starts, moment - _TINY_MS)
        return self.messages[place] if place < len(self.messages) else None

    def communication_until(self, moment: float) -> Message | None:
        """Return a communication of the step that ends at a moment, or None."""
        ends, messages = self._messages_by_end
        place = bisect_left(ends, moment - _TINY_MS)
        if place < len(ends) and ends[place] <= moment + _TINY_MS:
            return messages[place]
        return None

    @functools.cached_property
    def _messages_by_end(self) -> tuple[list[float], list[Message]]:
        messages = sorted(self.messages, key=lambda message: message.event.end_ms)
        return [message.event.end_ms for message in messages], messages

    @functools.cached_property
    def _message_starts(self) -> list[float]:
        return [message.event.start_ms for message in self.messages]

    @functools.cached_property
    def _starts(self) -> list[float]:
        return [event.start_ms for event in self.events]

    @functools.cached_property
    def _computes(self) -> tuple[list[Event], list[float]]:
        events = [event for event in self.events if event.kind == "compute"]
        return events, [event.start_ms for event in events]

    @functools.cached_property
    def compute_by_phase(self) -> dict[str | None, Cover]:
        """Phase (None if it is not known) → time in which its work computes."""
        intervals: dict[str | None, list[Interval]] = {}
        for event in self.events:
            if event.kind == "compute":
                phase = self.phases.of(event)
                intervals.setdefault(phase, []).append((event.start_ms, event.end_ms))
        return {phase: Cover(found) for phase, found in intervals.items()}

    def _cover(self, kind: str) -> Cover:
        begin, end = self.window
        found = []
        for event in self.events:
            if event.kind == kind:
                found.append((max(event.start_ms, begin), min(event.end_ms, end)))
        return Cover(found)


class Phases:
    """The phases of training in a trace, as far as its names tell them apart.

    Args:
        events: events of the whole trace.
        host: spans of the host.
    """

    def __init__(self, events: Sequence[Event], host: Sequence[HostSpan]) -> None:
        ranges = [event for event in events if event.kind == "range"]
        names = (OPTIMIZER, OPTIMIZER_STEP)
        self._optimizer = Cover(_named(ranges, names))
        self._forward = Cover(_named(ranges, ("distlab:forward",)))
        backward = [(span.start_ms, span.end_ms) for span in host if span.role == "backward"]
        self._backward = Cover([*backward, *_named(ranges, ("distlab:backward",))])
        # Without any sign of a backward, work may belong to it all the same.
        self._tells_backward = bool(self._backward.intervals)
        for event in events:
            # A few kernels have such a name as well. Without operators, it tells of these alone.
            is_operator = event.operator is not None or not event.lane.startswith("stream")
            if event.kind == "compute" and is_operator and "Backward" in _operator(event):
                self._tells_backward = True
                break

        self._launches = Counter(event.launched_ms for event in events if event.kind == "compute")

    def of(self, event: Event) -> str | None:
        """Return `forward`, `backward` or `optimizer`. None if the trace does not tell."""
        if self._optimizer.contains(event.on_host_ms):
            return "optimizer"
        if category(event.name, event.operator) == "optimizer":
            return "optimizer"
        if "Backward" in _operator(event) or self._backward.contains(event.on_host_ms):
            return "backward"
        if self._forward.contains(event.on_host_ms):
            return "forward"
        # The kernels of a CUDA graph have one launch and no operator. Kernels whose launch the file
        # lacks have None in common.
        is_of_graph = self._launches[event.launched_ms] > 1 and event.operator is None
        is_on_gpu = event.lane.startswith("stream")
        if (is_on_gpu and is_of_graph) or not self._tells_backward:
            return None
        return "forward"


def _operator(event: Event) -> str:
    """Return the operator that launched an event, else its own name."""
    return event.operator or event.name


@dataclass(eq=False)
class RankSteps:
    """Steps of one rank.

    Attributes:
        rank: number of the rank.
        trace: content of the rank's trace file.
        steps: number of a step → the step.
        found_by: how the steps were found.
    """

    rank: int
    trace: Trace
    steps: dict[int, RankStep]
    found_by: str

    @property
    def mean(self) -> StepAccount:
        """Account of the average step."""
        accounts = [step.account for step in self.steps.values()]
        comm_ms = sum(each.comm_ms for each in accounts) / len(accounts)
        exposed_ms = sum(each.exposed_ms for each in accounts) / len(accounts)
        return StepAccount(
            step_ms=sum(each.step_ms for each in accounts) / len(accounts),
            compute_ms=sum(each.compute_ms for each in accounts) / len(accounts),
            optimizer_ms=sum(each.optimizer_ms for each in accounts) / len(accounts),
            comm_ms=comm_ms,
            exposed_ms=exposed_ms,
            exposed_gather_ms=sum(each.exposed_gather_ms for each in accounts) / len(accounts),
            # From the sums and not the mean of the steps' percentages: a step with little
            # communication counts little.
            overlap_pct=100 * (1 - exposed_ms / comm_ms) if comm_ms else None,
            copy_ms=sum(each.copy_ms for each in accounts) / len(accounts),
            idle_ms=sum(each.idle_ms for each in accounts) / len(accounts),
            kernels={},
        )


def rank_steps(trace: Trace, steps: Steps, rank: int) -> RankSteps:
    """Account for every step of a trace."""
    phases = Phases(trace.events, trace.host)
    # `_sliced` leaves ranges out, as they are no work. `account` needs those of the optimizer, to
    # tell its kernels apart.
    optimizer_ranges = []
    for event in trace.events:
        if event.kind == "range" and event.name.startswith((OPTIMIZER, OPTIMIZER_STEP)):
            optimizer_ranges.append(event)
    found = {}
    windows = list(steps.windows.values())
    slices = _sliced(trace.events, windows)
    for number, window, events in zip(steps.windows, windows, slices, strict=True):
        found[number] = RankStep(
            number=number,
            window=window,
            events=events,
            account=account([*events, *optimizer_ranges], window),
            messages=_messages(events, window, number, rank),
            phases=phases,
        )
    return RankSteps(rank, trace, found, steps.found_by)


def match(ranks: Sequence[RankSteps]) -> None:
    """Tell every message its peers: the same collective on the other ranks.

    Collectives with a sequence number match by it. The others match by their place among those of
    the same operation and group in a step.

    Sends and receives match nothing: a trace does not tell the peer, and each rank numbers its own.
    """
    table: dict[tuple, dict[int, Message]] = {}
    for rank in ranks:
        for step in rank.steps.values():
            for message in step.messages:
                # It began in an earlier step, where it has a place.
                if message.place is None or message.is_point_to_point:
                    continue
                known = message.event.collective
                # Without a sequence number: the n-th all-reduce of a group in step k is the same
                # one on every rank, as collectives match by order.
                key = (message.step, known.operation, known.group, message.place)
                if known.sequence is not None:
                    key = (known.operation, known.group, known.sequence)
                table.setdefault(key, {})[rank.rank] = message
    for peers in table.values():
        for message in peers.values():
            message.peers = peers


def number_alike(ranks: Sequence[RankSteps]) -> bool:
    """Number the steps of all ranks alike if no number is common to all of them.

    Each rank gets the numbers of the first one, by the collectives that both have.

    Returns:
        True if a rank has other numbers now.
    """
    if len(ranks) < 2 or common_steps(ranks):
        return False
    first, *others = ranks
    known = _step_of_collective(first)
    is_changed = False
    for rank in others:
        differences = Counter()
        for key, number in _step_of_collective(rank).items():
            if key in known:
                differences[number - known[key]] += 1
        # A collective at a step's end may begin a step later on another rank, but few do.
        ((difference, _),) = differences.most_common(1) or [(0, 0)]
        if difference == 0:
            continue
        is_changed = True
        for step in rank.steps.values():
            step.number -= difference
            for message in step.messages:
                message.step = step.number
        rank.steps = {step.number: step for step in rank.steps.values()}
    return is_changed


def common_steps(ranks: Sequence[RankSteps]) -> set[int]:
    """Return the numbers of the steps that all ranks have."""
    return set.intersection(*(set(rank.steps) for rank in ranks))


def _step_of_collective(rank: RankSteps) -> dict[tuple, int]:
    """Return (operation, group, sequence number) → number of the step in which it begins."""
    found = {}
    for step in rank.steps.values():
        for message in step.messages:
            known = message.event.collective
            is_numbered = message.place is not None and known.sequence is not None
            if is_numbered and not message.is_point_to_point:
                found[known.operation, known.group, known.sequence] = step.number
    return found


def _messages(events: Sequence[Event], window: Interval, step: int, rank: int) -> list[Message]:
    """Return the communications of a step with their exposed intervals, which are disjoint."""
    begin, end = window
    compute = [(event.start_ms, event.end_ms) for event in events if event.kind == "compute"]
    uncovered = Cover(subtract([window], compute))
    places: dict[tuple, int] = {}
    found = []
    counted_to = begin  # time before it belongs to messages that began earlier
    for event in events:
        if event.kind != "communication":
            continue
        known = event.collective
        place = None
        if event.start_ms >= begin:
            place = places.get((known.operation, known.group), 0)
            places[known.operation, known.group] = place + 1
        first, last = max(event.start_ms, counted_to), min(event.end_ms, end)
        # A communication that ends before an earlier one has no time of its own.
        exposed = uncovered.within(first, last) if first < last else []
        counted_to = max(counted_to, event.end_ms)
        found.append(Message(event, step, rank, place, exposed))
    return found


def _sliced(events: Sequence[Event], windows: Sequence[Interval]) -> list[list[Event]]:
    """Return for each window the events that overlap it. Both are in ascending order."""
    ends = [end for _, end in windows]
    found = [[] for _ in windows]
    for event in events:
        if event.kind == "range":
            continue
        # The first window that ends after the event begins. An event may reach into several.
        place = bisect_right(ends, event.start_ms)
        while place < len(windows) and windows[place][0] < event.end_ms:
            found[place].append(event)
            place += 1
    return found


def _named(ranges: Sequence[Event], names: tuple[str, ...]) -> list[Interval]:
    return [(event.start_ms, event.end_ms) for event in ranges if event.name.startswith(names)]
