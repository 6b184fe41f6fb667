"""Why communication is exposed, and why a device is idle: one cause for every exposed millisecond.

Each exposed communication has the first of these causes that applies:

1. *straggler*: it waits for a rank that arrives late, for at least half of its exposed time.
   If that rank is not late in most steps, or not beyond their spread, the cause is *jitter*;
2. *send or receive*: it is no collective, and may wait for its peer;
3. *small messages*: it moves fewer bytes than the network moves during its latency;
4. *one CTA*: a large message, but NCCL's kernel runs on a single multiprocessor;
5. *blocking wait*: the host waits for it, and launches further work only afterwards;
6. *late launch*: the device was idle when the host launched it, or the copies into its buffer.
   If the host was late for a reason that has a name (reading a value, data loading), that is the
   cause;
7. *end of step*: only the optimizer is left, which needs its result;
8. *dependency*: further work follows, and waits for it.

*Copies* are those next to which nothing computes or communicates.

Each idle interval has one of the causes data loading, garbage collection, item, synchronisation,
late launch, small messages (the host prepares them), host-bound (without a GPU: between operators)
and unknown. *Contention* is the extra time of kernels next to which communication runs. It is the
price of overlap, and a fault only if it is high for what the overlap hides.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distlab.measure.interleaved import MIN_PAIRS, MIN_SAMPLES, paired_ratio
from distlab.measure.trace.intervals import Cover, Interval, total
from distlab.measure.trace.kernels import short_kernel_name
from distlab.measure.trace.reader import Event, HostSpan
from distlab.report.derived import few_pairs_ratio
from distlab.trace.ranks import Message, RankStep, RankSteps, common_steps

STRAGGLER = "straggler"
JITTER = "jitter"
PEER = "send or receive"
SMALL = "small messages"
ONE_CTA = "one CTA"
BLOCKING = "blocking wait"
LATE = "late launch"
LAST = "end of step"
DEPENDENCY = "dependency"
COPIES = "copies"
LOADER = "data loading"
GARBAGE = "garbage collection"
ITEM = "item"
SYNCHRONISATION = "synchronisation"
HOST = "host-bound"
PYTHON = "between operators"
UNKNOWN = "unknown"
CONTENTION = "contention"
LAUNCHING = "launching work"  # part of the step in which a late rank's device waits for its host
MESSAGES = "messages"  # role of host spans that prepare and launch communication

FINDING_PCT = 5.0  # share of a step from which on a cause is a finding
# Share of the hidden communication from which on the compute that it slows is a finding. Below, the
# overlap gains more than it costs.
HIGH_PRICE = 0.5
# A kernel that begins so soon after its launch found an idle device: launching takes 3 to 10 µs,
# and a profiler some more.
PROMPT_MS = 0.05
# Idle time between two kernels of a queue that is not empty is shorter than this.
GAP_MS = 0.003
# An idle interval of this length comes from something that Python does between two operators, and
# not from the time that every operator takes in Python.
LONG_GAP_MS = 5.0
# Bytes below which latency dominates, where the trace has no larger message to tell the bandwidth.
SMALL_BYTES = 256 * 1024
LARGE_BYTES = 16 * SMALL_BYTES  # bytes from which on NCCL uses several CTAs, if it may
# Share of the longest wait from which on ranks that wait for each other do so in turn.
_TURN_SHARE = 0.1
_LISTED_RANKS = 3  # late ranks that a sentence lists
_PIECES = 3  # calls of a kernel, covered and not, that are needed to compare them


@dataclass(frozen=True)
class Blame:
    """A cause of some milliseconds of one step of one rank.

    Attributes:
        cause: one of the causes above.
        ms: ms of the step.
        detail: what it is about: a collective, kernel or operator.
        late_rank: rank that arrives late, for a straggler and for jitter.
        behind: what the late rank does longer than others, for a straggler.
        message: communication that is exposed, or None.
        idle: interval in which the device waits for the host, or None for other causes.
    """

    cause: str
    ms: float
    detail: str
    late_rank: int | None = None
    behind: str | None = None
    message: Message | None = None
    idle: Interval | None = None


@dataclass(frozen=True)
class Finding:
    """A cause, summed over the steps.

    Attributes:
        cause: one of the causes above.
        ms: ms of the average step, on the rank where it is largest.
        pct: share of that rank's step in %.
        rank: number of that rank.
        count: number of intervals or collectives in an average step.
        detail: what it is mostly about.
        late_rank, behind: as in `Blame`, for a straggler.
        frame: Python frame in which the host mostly is while the device waits for it, or None.
        is_price: True for contention that costs much less than the communication that it hides.
        long_gaps: number of intervals of at least `LONG_GAP_MS` in an average step, if these are at
            least half of `ms`, else 0.
        compared_steps: number of steps that all ranks have.
        late_ms: late rank → ms of the average step for which a rank waits for it, for jitter.
    """

    cause: str
    ms: float
    pct: float
    rank: int
    count: float
    detail: str
    late_rank: int | None
    behind: str | None
    frame: str | None
    is_price: bool = False
    long_gaps: float = 0.0
    compared_steps: int = 0
    late_ms: dict[int, float] = field(default_factory=dict)

    @property
    def is_large(self) -> bool:
        """True if it is worth acting on."""
        return self.pct >= FINDING_PCT and self.cause != UNKNOWN and not self.is_price

    @property
    def is_unexplained(self) -> bool:
        """True if it would be worth acting on, and the trace does not tell how."""
        return self.pct >= FINDING_PCT and self.cause == UNKNOWN

    @property
    def about(self) -> str:
        """Its main subject in words, with the Python frame if there is one."""
        if self.is_price:
            return f"{self.detail}; the price of overlap"
        return self.detail if self.frame is None else f"{self.frame}, {self.detail}"

    @property
    def sentence(self) -> str:
        """Sentence about what happens, and what to do about it."""
        much = f"{self.ms:.2f} ms per step ({self.pct:.0f} %)"
        where = f"on rank {self.rank}"
        if self.cause == STRAGGLER:
            return self._straggler_sentence(much)
        if self.cause == JITTER:
            return self._jitter_sentence(much)
        has_gaps = self.cause == PYTHON and self.long_gaps > 0
        sentence = _LONG_GAPS if has_gaps else _SENTENCES[self.cause]
        said = sentence.format(
            much=much, where=where, detail=self.detail, gaps=f"{self.long_gaps:.3g}"
        )
        if has_gaps and self.frame is None:
            said += " A trace with with_stack=True shows in which function."
        if self.frame is not None:
            said += f" Meanwhile Python is mostly in {self.frame}."
        return said

    def _straggler_sentence(self, much: str) -> str:
        late = f"rank {self.late_rank}"
        behind = f", which spends more time in {self.behind}" if self.behind else ""
        said = f"Rank {self.rank} waits {much} for {late}{behind}."
        if self.behind == PEER:
            return (
                f"Rank {self.rank} waits {much} for {late}, which waits longer in sends and "
                "receives before. Use more micro-batches, or balance the stages."
            )
        steps = self.compared_steps
        if steps == 0:
            return (
                f"{said} The ranks have no step in common, so this cannot tell whether {late} is "
                "always the late one: trace the same steps on all ranks."
            )
        if steps < MIN_SAMPLES:
            return (
                f"{said} {steps} step{'s' * (steps != 1)} cannot tell whether {late} is always the "
                "late one: trace ten or more."
            )
        return (
            f"{said} Give {late} less of it, or find out why its {self.behind or 'step'} is slower."
        )

    def _jitter_sentence(self, much: str) -> str:
        longest_ms = max(self.late_ms.values())
        waits = {late: ms for late, ms in self.late_ms.items() if ms >= _TURN_SHARE * longest_ms}
        spread = f"slower beyond the spread of {self.compared_steps} steps"
        if len(waits) == 1:
            (late,) = waits
            said = (
                f"Rank {self.rank} waits {much} for rank {late}, but not steadily: rank {late} is "
                f"not {spread}."
            )
        else:
            listed = sorted(waits, key=waits.get, reverse=True)[:_LISTED_RANKS]
            parts = ", ".join(f"{waits[late]:.2f} ms for rank {late}" for late in sorted(listed))
            others = len(waits) - len(listed)
            if others:
                parts += f", less for {others} other rank{'s' * (others > 1)}"
            said = (
                f"Ranks wait for each other in turn, up to {much}: {parts}; none of them is "
                f"{spread}."
            )
        return (
            f"{said} Trace more steps, or find out what delays single ones, such as other programs "
            "on the machine."
        )


# For `PYTHON` with few long intervals in place of many short ones.
_LONG_GAPS = (
    "No operator runs for {much} {where}, mostly {detail}. Long gaps per step: {gaps}. Python does "
    "something else there, such as waiting or preparing data."
)
_SENTENCES = {
    PEER: (
        "Sends and receives take {much} {where} in which nothing computes, mostly {detail}. They "
        "include the wait for the peer. Start them earlier, use more micro-batches, or balance the "
        "stages."
    ),
    SMALL: (
        "Small messages cost {much} {where}, mostly {detail}: their latency counts, not their "
        "bytes. Use larger buckets, or coalesce the messages."
    ),
    ONE_CTA: (
        "{much} of communication {where} runs on a single multiprocessor, mostly {detail}. Let "
        "NCCL use more: raise NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS or the group's config.max_ctas."
    ),
    BLOCKING: (
        "The host waits for communication, {much} {where}, mostly for {detail}, and launches "
        "nothing meanwhile. Use async_op=True, and wait where the result is needed."
    ),
    LATE: (
        "Communication is launched late by the host, {much} {where}, mostly {detail}: the device "
        "was idle before. Launch it earlier, or make the host faster (compile, CUDA graphs, fewer "
        "hooks)."
    ),
    LAST: (
        "{much} of communication {where} comes after the last compute that could hide it, mostly "
        "{detail}. Start it during backward, make the last bucket smaller, or overlap it with the "
        "optimizer."
    ),
    DEPENDENCY: (
        "Compute waits for communication, {much} {where}, mostly for {detail}: nothing else was "
        "ready. Start it earlier (prefetch), or split the work so that something is left to "
        "compute."
    ),
    COPIES: (
        "Copies take {much} {where} in which nothing computes, mostly {detail}. Copy less, or copy "
        "earlier: from pinned memory, with non_blocking=True, on a stream of their own."
    ),
    LOADER: (
        "The step waits {much} {where} for data ({detail}). Use more DataLoader workers, prefetch, "
        "or pin_memory with non_blocking copies."
    ),
    GARBAGE: (
        "Python's garbage collection costs {much} {where} ({detail}). Call gc.freeze() after the "
        "first step, or gc.disable() and collect at fixed steps."
    ),
    ITEM: (
        "Reading values from the device stalls the step for {much} {where} ({detail}). "
        "Remove .item() and the like from the step, or read them every few steps."
    ),
    SYNCHRONISATION: (
        "The host waits for the device and then launches anew, {much} {where} ({detail}). Remove "
        "the synchronisation from the step. torch.cuda.set_sync_debug_mode('warn') warns at each. "
        "A copy from host memory that is not pinned waits, too, such as torch.zeros(()).cuda()."
    ),
    HOST: (
        "The device waits {much} {where} for the host to launch work, mostly {detail}. Make the "
        "host faster (compile, CUDA graphs, larger batches), or do less between the operators."
    ),
    PYTHON: (
        "No operator runs for {much} {where}, mostly {detail}: Python works between the operators. "
        "Compile the model, or use larger batches."
    ),
    UNKNOWN: "Nothing runs for {much} {where}, for a reason that the trace does not have.",
    CONTENTION: (
        "Compute is slower next to communication, {much} {where}, mostly {detail}. Give "
        "communication fewer multiprocessors (NCCL_MAX_CTAS), or use copy engines."
    ),
}


def findings(ranks: Sequence[RankSteps]) -> tuple[list[Finding], list[Blame]]:
    """Return the causes, the largest first, and the exposed communication with its causes."""
    small_bytes = latency_bytes(ranks)
    behind = Behind(ranks)
    causes: dict[int, list[Blame]] = {}  # rank → causes in all its steps
    for rank in ranks:
        host = Host(rank)
        found = contention(rank)
        for step in rank.steps.values():
            for message in step.messages:
                if message.exposed:
                    found += why_exposed(message, step, host, behind, small_bytes)
            found += exposed_copies(step)
            found += why_idle(step, host, small_bytes)
        causes[rank.rank] = found
    compared = common_steps(ranks)
    causes = _with_jitter(causes, ranks, compared)
    exposed = []
    totals: dict[tuple, dict[int, list[Blame]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in causes.items():
        for blame in found:
            if blame.message is not None:
                exposed.append(blame)
            # Straggler findings are kept apart by the rank that is late, since each needs another
            # remedy. Jitter is one finding.
            late_rank = blame.late_rank if blame.cause == STRAGGLER else None
            totals[blame.cause, late_rank][rank].append(blame)
    means = {rank.rank: rank.mean for rank in ranks}
    steps = {rank.rank: len(rank.steps) for rank in ranks}
    frames = {rank.rank: rank.trace.frames for rank in ranks}
    listed = []
    cost_ms: dict[tuple[str, int], float] = {}  # cause, rank → ms of its average step
    for (cause, late_rank), by_rank in totals.items():
        # The ms of an average step, since ranks may have recorded different numbers of steps.
        sums = {r: sum(blame.ms for blame in blames) / steps[r] for r, blames in by_rank.items()}
        late_ms = {}
        if cause == JITTER:
            for r, blames in by_rank.items():
                for late, ms in _waits_for(blames).items():
                    late_ms[late] = max(late_ms.get(late, 0.0), ms / steps[r])
        rank = max(sums, key=sums.get)
        if late_rank is None:
            cost_ms |= {(cause, r): ms for r, ms in sums.items()}
        # The detail with the most ms speaks for the whole finding, not the most frequent one.
        details, reasons = Counter(), Counter()
        for blame in by_rank[rank]:
            details[blame.detail] += blame.ms
            reasons[blame.behind] += blame.ms
        idle = [blame.idle for blame in by_rank[rank] if blame.idle is not None]
        frame = None
        if frames[rank] is not None:
            frame = frames[rank].mostly_in(idle)
        hidden_ms = means[rank].comm_ms - means[rank].exposed_ms
        gaps_ms = [blame.ms for blame in by_rank[rank] if blame.ms >= LONG_GAP_MS]
        is_in_gaps = sum(gaps_ms) >= 0.5 * sums[rank] * steps[rank]
        finding = Finding(
            cause=cause,
            ms=sums[rank],
            pct=100 * sums[rank] / means[rank].step_ms,
            rank=rank,
            count=len(by_rank[rank]) / steps[rank],
            detail=details.most_common(1)[0][0],
            late_rank=late_rank,
            behind=reasons.most_common(1)[0][0],
            frame=frame,
            is_price=cause == CONTENTION and sums[rank] < HIGH_PRICE * hidden_ms,
            long_gaps=len(gaps_ms) / steps[rank] if is_in_gaps else 0.0,
            compared_steps=len(compared),
            late_ms=late_ms,
        )
        listed.append(finding)
    return sorted(listed, key=lambda finding: _place(finding, cost_ms)), exposed


def _with_jitter(
    causes: Mapping[int, list[Blame]], ranks: Sequence[RankSteps], compared: set[int]
) -> dict[int, list[Blame]]:
    """Return the causes, with jitter in place of stragglers that the noise does not support.

    Args:
        causes: rank → causes in all its steps.
        ranks: all ranks.
        compared: numbers of the steps that all ranks have. If there are fewer than three, all
            stragglers stay, and their sentences say that these steps cannot tell.
    """
    if len(compared) < MIN_SAMPLES:
        return dict(causes)
    waits: dict[int, list[Blame]] = {}
    longest: dict[int, tuple[float, int]] = {}  # late rank → longest wait for it, and whose it is
    for rank, blames in causes.items():
        waits[rank] = [blame for blame in blames if blame.cause == STRAGGLER]
        for late, ms in _waits_for(waits[rank]).items():
            longest[late] = max(longest.get(late, (0.0, rank)), (ms, rank))
    step_ms = {rank.rank: rank.mean.step_ms for rank in ranks}
    steady = set()
    for late, (_, waiting) in longest.items():
        if _is_steadily_late(late, waits[late], waits[waiting], step_ms[waiting], compared):
            steady.add(late)
    found = {}
    for rank, blames in causes.items():
        found[rank] = []
        for blame in blames:
            if blame.cause == STRAGGLER and blame.late_rank not in steady:
                blame = replace(blame, cause=JITTER, behind=None)
            found[rank].append(blame)
    return found


def _is_steadily_late(
    late: int,
    its_waits: Sequence[Blame],
    waits: Sequence[Blame],
    step_ms: float,
    compared: set[int],
) -> bool:
    """Return whether a rank is late in most steps, by more than what they spread.

    If it is slower than the rank that waits longest for it, it waits less itself.

    Args:
        late: the rank in question.
        its_waits: its own waits for late ranks.
        waits: those of the rank that waits longest for it.
        step_ms: ms of the average step.
        compared: numbers of at least three steps that all ranks have.
    """
    if _is_longer(waits, its_waits, step_ms, compared):
        return True
    # One rank can be slower in the forward and another one in the backward of every step. Over the
    # whole step, neither is. So the part in which the rank is behind also counts by itself.
    parts = Counter()
    for blame in waits:
        if blame.late_rank == late:
            parts[blame.behind] += blame.ms
    part = parts.most_common(1)[0][0]
    same_part = [blame for blame in waits if blame.behind == part]
    its_same_part = [blame for blame in its_waits if blame.behind == part]
    return _is_longer(same_part, its_same_part, step_ms, compared)


def _is_longer(
    waits: Sequence[Blame], others: Sequence[Blame], step_ms: float, compared: set[int]
) -> bool:
    """Return whether waits are longer than others in most steps, and beyond their spread."""
    pairs = zip(_in_steps(waits, compared), _in_steps(others, compared), strict=True)
    # A step in which neither rank waits does not tell which one is slower.
    excess_ms = [ms - other_ms for ms, other_ms in pairs if ms != other_ms]
    longer = sum(ms > 0 for ms in excess_ms)
    if 2 * longer <= len(compared) or len(excess_ms) < MIN_SAMPLES:
        return False
    # A ratio needs positive samples, so these are of a step that is as long on both ranks, but for
    # the excess.
    first = [step_ms + max(ms, 0.0) for ms in excess_ms]
    second = [step_ms + max(-ms, 0.0) for ms in excess_ms]
    ratio = paired_ratio if len(excess_ms) >= MIN_PAIRS else few_pairs_ratio
    return ratio(first, second).low > 1


def _in_steps(waits: Sequence[Blame], compared: set[int]) -> list[float]:
    """Return the ms of waits in each step, in the order of the steps."""
    found = Counter()
    for blame in waits:
        found[blame.message.step] += blame.ms
    return [found[number] for number in sorted(compared)]


def _waits_for(blames: Iterable[Blame]) -> Counter[int]:
    """Return late rank → ms of the waits for it."""
    found = Counter()
    for blame in blames:
        found[blame.late_rank] += blame.ms
    return found


def _place(finding: Finding, cost_ms: Mapping[tuple[str, int], float]) -> tuple[bool, float, bool]:
    """Return the key by which findings are sorted: the largest first, the price of overlap last.

    If a rank is late because its host is, the reason on that rank comes before the wait for it,
    which it explains.

    Args:
        finding: finding to place.
        cost_ms: (cause, rank) → ms of the average step, for all causes except stragglers.
    """
    ms = finding.ms
    is_wait = finding.cause == STRAGGLER
    if is_wait:
        causes = (HOST, SMALL, LATE) if finding.behind == LAUNCHING else (finding.behind,)
        reasons_ms = [cost_ms.get((cause, finding.late_rank), 0.0) for cause in causes]
        if sum(reasons_ms) >= 0.5 * ms:
            ms = min(ms, max(reasons_ms))
    return finding.is_price, -ms, is_wait


def latency_bytes(ranks: Sequence[RankSteps]) -> float:
    """Return the bytes below which a message takes mostly latency.

    It is half of what the network moves, by its largest message, during the shortest message.
    """
    shortest_ms: dict[int, float] = {}  # bytes → shortest duration of a message of this size
    for rank in ranks:
        for step in rank.steps.values():
            for message in step.messages:
                size = message.event.collective.size_bytes
                # The duration of a receive is mostly the wait for its peer.
                if size and message.ms > 0 and not message.is_point_to_point:
                    shortest_ms[size] = min(message.ms, shortest_ms.get(size, message.ms))
    # If even the largest message is not large, it may be mostly latency, and tells no bandwidth.
    if not shortest_ms or max(shortest_ms) < LARGE_BYTES:
        return SMALL_BYTES
    # The bandwidth is largest/shortest_ms[largest]: the fastest message of the largest size waits
    # least for other ranks. The shortest message of any size is nearly all latency.
    largest = max(shortest_ms)
    return 0.5 * min(shortest_ms.values()) * largest / shortest_ms[largest]


def named(event: Event) -> str:
    """Return a communication in words: operation, size and group."""
    known = event.collective
    words = [known.operation if known.operation != "other" else event.name[:40]]
    if known.size_bytes:
        words.append(f"of {known.size_bytes / 1e6:.3g} MB")
    if known.group:
        words.append(f"in group {known.group[:30]}")
    return " ".join(words)


def _kernel_or_copy(event: Event) -> str:
    """Return the name of a kernel without its types, or that of a copy."""
    if event.name.startswith(("Memcpy", "Memset")):
        return event.name
    return short_kernel_name(event.name)


class Host:
    """Activities of the host of one rank, to be asked about intervals of the device.

    Args:
        rank: the rank's trace and its steps.
    """

    def __init__(self, rank: RankSteps) -> None:
        by_role: dict[str, list] = defaultdict(list)
        for span in rank.trace.host:
            by_role[span.role].append(span)
        self.on_gpu = rank.trace.on_gpu
        self._spans = {}
        for role in (LOADER, GARBAGE, SYNCHRONISATION, ITEM, MESSAGES):
            spans = by_role["loader" if role == LOADER else role]
            # Spans end in the order of this list, in which `bisect` finds the last one before.
            spans = sorted(spans, key=lambda span: span.end_ms)
            cover = Cover((span.start_ms, span.end_ms) for span in spans)
            self._spans[role] = ([span.end_ms for span in spans], spans, cover)

    def share(self, role: str, interval: Interval) -> float:
        """Return the share of an interval that spans of a role cover, 0 to 1."""
        # Cover merges overlapping spans, so nested ones do not count twice.
        start, end = interval
        return self._spans[role][2].length(start, end) / (end - start)

    def around(self, role: str, moment: float) -> Interval | None:
        """Return the interval around a moment that spans of a role cover, or None."""
        return self._spans[role][2].around(moment)

    def launching_ms(self, messages: Iterable[Message]) -> float:
        """Return how long the host prepares and launches some messages, in ms."""
        spans = []
        for message in messages:
            launched_ms = message.event.launched_ms
            span = None if launched_ms is None else self.around(MESSAGES, launched_ms)
            if span is not None:
                spans.append(span)
        return total(spans)

    def name_in(self, role: str, interval: Interval) -> str:
        """Return the name of the span of a role that covers an interval."""
        start, end = interval
        ends, spans, _ = self._spans[role]
        place = min(bisect_left(ends, (start + end) / 2), len(spans) - 1)
        return spans[place].name

    def waited_until(self, role: str, interval: Interval) -> HostSpan | None:
        """Return the span of a role that the beginning of an interval ended, or None.

        The span must have begun before. Reading a value that is on the host already also is an
        `aten::item`, and begins and ends inside the interval.
        """
        begin, end = interval
        ends, spans, _ = self._spans[role]
        # The first span that ends at the interval's beginning or later, but for a gap between two
        # kernels.
        place = bisect_left(ends, begin - GAP_MS)
        if place < len(spans) and spans[place].start_ms < begin and ends[place] <= end:
            return spans[place]
        return None

    def wait_before(self, interval: Interval) -> tuple[str, HostSpan] | None:
        """Return the wait for the device that ended as an interval began, and its cause, or None.

        The device ran empty while the host waited for it.
        """
        for role in (ITEM, SYNCHRONISATION):
            span = self.waited_until(role, interval)
            if span is not None:
                return role, span
        return None

    def reason(self, interval: Interval) -> tuple[str, str] | None:
        """Return the cause with a name for which the device is idle in an interval, and its span.

        None if the host shows no such reason.
        """
        # These two stop the host whatever the device does, so covering half of the interval
        # suffices.
        for role in (LOADER, GARBAGE):
            if self.share(role, interval) >= 0.5:
                return role, self.name_in(role, interval)
        if not self.on_gpu:
            return None  # the host computes, so it never waits for a device
        waited = self.wait_before(interval)
        return None if waited is None else (waited[0], waited[1].name)


def why_exposed(
    message: Message, step: RankStep, host: Host, behind: Behind, small_bytes: float
) -> list[Blame]:
    """Return the causes of a message's exposed time, which add up to it.

    There is one, or two if a wait for a late rank is a part of it.
    """
    found = []
    left_ms = message.exposed_ms
    late = message.late_rank
    # The late rank itself waits for no other rank. Its message has one of the causes below.
    if late not in (None, message.rank) and message.wait_ms >= 0.5 * left_ms:
        wait_ms = min(message.wait_ms, left_ms)
        part = behind.part(message)
        about = named(message.event)
        found.append(Blame(STRAGGLER, wait_ms, about, late, part, message))
        left_ms -= wait_ms
    # The rest is what the message would also take if all ranks came at once.
    if left_ms > 0:
        cause, about = PEER, named(message.event)
        if not message.is_point_to_point:
            cause, about = _own_cause(message.event, step, host, small_bytes)
        found.append(Blame(cause, left_ms, about, message=message))
    return found


def _own_cause(event: Event, step: RankStep, host: Host, small_bytes: float) -> tuple[str, str]:
    """Return the cause of a message's exposed time, unless a rank is late, and what it is about."""
    about = named(event)
    size = event.collective.size_bytes
    if size is not None and size < small_bytes:
        return SMALL, about
    if size is not None and size >= LARGE_BYTES and event.grid == (1, 1, 1):
        return ONE_CTA, about
    following = step.compute_after(event.end_ms)
    # Only a trace with a device has launches. On a CPU, the host itself communicates.
    if event.launched_ms is not None:
        # If the following work was launched before the message ended, the host did not wait for it.
        is_launched_after = False
        if following is not None:
            is_launched_after = following.on_host_ms >= event.end_ms - PROMPT_MS
        if is_launched_after and host.share(SYNCHRONISATION, (event.start_ms, event.end_ms)) >= 0.5:
            return BLOCKING, about
        # A message that starts right after its launch found an empty queue. If the device was idle
        # before, the host was late. The same holds for the first copy into the message's buffer.
        first = _first_copy(event, step, host)
        idle = step.idle_before(first.start_ms)
        is_prompt = first.start_ms - first.launched_ms < PROMPT_MS
        if is_prompt and idle is not None and idle[1] - idle[0] > GAP_MS:
            return host.reason(idle) or (LATE, about)
    if following is None or step.phases.of(following) == "optimizer":
        return LAST, about
    return DEPENDENCY, about


def _first_copy(event: Event, step: RankStep, host: Host) -> Event:
    """Return the first of the kernels before a message that the host launched for it.

    FSDP2 copies a unit's shards into one buffer, and then gathers it. It is the message itself if
    nothing prepares it.
    """
    span = host.around(MESSAGES, event.launched_ms)
    first = event
    if span is None:
        return first
    for earlier in step.before(event):
        launched_ms = earlier.launched_ms
        if launched_ms is None or not span[0] <= launched_ms < span[1]:
            break
        first = earlier
    return first


def exposed_copies(step: RankStep) -> list[Blame]:
    """Return the copies of a step next to which nothing computes or communicates.

    They add up to the copies of the step's account.
    """
    begin, end = step.window
    counted_to = begin  # time before it belongs to copies that began earlier
    found = []
    for event in step.events:
        if event.kind != "copy":
            continue
        first, last = max(event.start_ms, counted_to), min(event.end_ms, end)
        ms = step.without_work.length(first, last) if first < last else 0.0
        if ms > 0:
            found.append(Blame(COPIES, ms, event.name))
        counted_to = max(counted_to, event.end_ms)
    return found


def why_idle(step: RankStep, host: Host, small_bytes: float) -> list[Blame]:
    """Return the causes of the idle intervals of a step, which add up to its idle time.

    A host that waits until the device has nothing to compute loses its lead over it, which is as
    long as the wait. Until the device has idled for as long, the wait is also the cause of
    intervals in which the host is late. In the same way, what the host spends on small messages
    makes it late for other work (`_owed_to_small_messages`).
    """
    found = []
    usual_cause = HOST if host.on_gpu else PYTHON
    lost: Blame | None = None  # the last wait of the host
    lost_ms = 0.0  # ms of the lead lost in that wait for which the device has not idled yet
    for gap in step.without_compute.intervals:
        # Messages may still run when the wait ends, so that the device is not idle at once.
        waited = host.wait_before(gap) if host.on_gpu else None
        if waited is not None:
            cause, span = waited
            lost, lost_ms = Blame(cause, 0.0, span.name), span.end_ms - span.start_ms
        for begin, end in step.idle.within(*gap):
            ms = end - begin
            reason = host.reason((begin, end))
            if reason is not None:
                cause, about = reason
                awaited = step.communication_until(begin)
                if cause == SYNCHRONISATION and "Device" not in about and awaited is not None:
                    cause, about = BLOCKING, named(awaited.event)
                found.append(Blame(cause, ms, about))
                waited = host.wait_before((begin, end))
                if waited is not None:
                    lost = found[-1]
                    # The device may have idled for longer than the host had waited.
                    lost_ms = max(0.0, waited[1].end_ms - waited[1].start_ms - ms)
                continue
            late = _why_host_is_late((begin, end), step, host, small_bytes, usual_cause)
            if late.cause == UNKNOWN:
                found.append(late)
                continue
            owed_ms = 0.0 if lost is None else min(ms, lost_ms)
            if owed_ms > 0:
                found.append(Blame(lost.cause, owed_ms, lost.detail))
                lost_ms -= owed_ms
            if ms > owed_ms:
                # What the wait has cost is the first part of the interval.
                idle = None if late.idle is None else (begin + owed_ms, end)
                found.append(replace(late, ms=ms - owed_ms, idle=idle))
    return _owed_to_small_messages(found, step, host, small_bytes) if host.on_gpu else found


def _why_host_is_late(
    idle: Interval, step: RankStep, host: Host, small_bytes: float, usual_cause: str
) -> Blame:
    """Return the cause of an idle interval for which the host shows no reason of its own."""
    begin, end = idle
    ms = end - begin
    following = step.after(end)
    if following is None:
        return Blame(usual_cause, ms, "at the end of the step", idle=idle)
    if following.launched_ms is not None and following.launched_ms < begin:
        # It was in the queue before the device became idle.
        return Blame(UNKNOWN, ms, _kernel_or_copy(following))
    if host.on_gpu and _is_small_message_next(idle, following, step, host, small_bytes):
        return Blame(SMALL, ms, named(step.communication_from(end).event))
    if host.on_gpu and following.kind == "communication":
        return Blame(LATE, ms, named(following), idle=idle)
    about = f"before {following.operator or _kernel_or_copy(following)}"
    return Blame(usual_cause, ms, about, idle=idle)


def _owed_to_small_messages(
    blames: Sequence[Blame], step: RankStep, host: Host, small_bytes: float
) -> list[Blame]:
    """Return the causes of a step's idle time with the host's time for small messages moved.

    The host launches these ahead of the device, and is late for something else because of them. So
    intervals in which it is late count as small messages, up to the time that it spent on them.
    """
    small = _small_messages(step, small_bytes)
    at_once_ms = sum(blame.ms for blame in blames if blame.cause == SMALL)
    owed_ms = host.launching_ms(small) - at_once_ms
    found = []
    for blame in blames:
        if blame.cause == HOST and owed_ms > 0:
            moved_ms = min(blame.ms, owed_ms)
            owed_ms -= moved_ms
            found.append(Blame(SMALL, moved_ms, named(small[0].event)))
            if blame.ms == moved_ms:
                continue
            _, end = blame.idle
            left_ms = blame.ms - moved_ms
            blame = Blame(HOST, left_ms, blame.detail, idle=(end - left_ms, end))
        found.append(blame)
    return found


def _small_messages(step: RankStep, small_bytes: float) -> list[Message]:
    """Return the messages of a step that are known to be small."""
    found = []
    for message in step.messages:
        size = message.event.collective.size_bytes
        if size is not None and size < small_bytes:
            found.append(message)
    return found


def _is_small_message_next(
    idle: Interval, following: Event, step: RankStep, host: Host, small_bytes: float
) -> bool:
    """Return whether the device is idle while the host prepares a small message.

    So it is if the work that ends the idle time is the message or FSDP2's copies for it, or if the
    host spends most of the time in FSDP or in c10d.
    """
    message = step.communication_from(idle[1])
    if message is None:
        return False
    size = message.event.collective.size_bytes
    if size is None or size >= small_bytes:
        return False
    if following.kind == "communication" or (following.operator or "").startswith("fsdp::"):
        return True
    return host.share(MESSAGES, idle) >= 0.5


def contention(rank: RankSteps) -> list[Blame]:
    """Return the extra time of kernels next to which communication runs.

    Calls with communication next to them are compared with the median of the same kernel on the
    same grid without it. Without a GPU the sizes of an operator are not known.
    """
    alone: dict[tuple, list[float]] = defaultdict(list)
    covered: dict[tuple, list[float]] = defaultdict(list)
    for step in rank.steps.values():
        for event in step.events:
            if event.kind != "compute" or event.grid is None:
                continue
            # It began in an earlier step, which has compared it.
            if event.start_ms < step.window[0]:
                continue
            ms = event.end_ms - event.start_ms
            share = step.communication.length(event.start_ms, event.end_ms) / ms if ms else 0.0
            # The same kernel on another grid has other work, and its times are not comparable.
            kernel = (event.name, event.grid, event.operator)
            # Calls that are covered by 10 to 50 % belong to neither set: they would blur the
            # comparison.
            if share < 0.1:
                alone[kernel].append(ms)
            elif share > 0.5:
                covered[kernel].append(ms)
    found = []
    for kernel, slower in covered.items():
        if len(slower) < _PIECES or len(alone[kernel]) < _PIECES:
            continue
        usual_ms = statistics.median(alone[kernel])
        extra_ms = sum(slower) - usual_ms * len(slower)
        if extra_ms > 0:
            found.append(Blame(CONTENTION, extra_ms, kernel[2] or kernel[0]))
    return found


class Behind:
    """Search for what a late rank does longer than the others before a collective.

    Args:
        ranks: all ranks, with their messages matched.
    """

    def __init__(self, ranks: Sequence[RankSteps]) -> None:
        self._steps = {}
        self._meeting: dict[Message, Message] = {}  # message → last meeting before it
        self._hosts = {rank.rank: Host(rank) for rank in ranks}
        for rank in ranks:
            for step in rank.steps.values():
                self._steps[rank.rank, step.number] = step
        for rank in ranks:
            for step in rank.steps.values():
                last = None
                for message in step.messages:
                    if last is not None:
                        self._meeting[message] = last
                    if self._is_meeting(message):
                        last = message

    def part(self, message: Message) -> str | None:
        """Return the part of the step in which the late rank falls behind, in words."""
        late = message.late_rank
        times = {}
        for rank, peer in message.peers.items():
            times[rank] = self._times(peer)
        largest, part = 0.0, None
        # The median of the other ranks, so that a second slow rank does not hide the first.
        others = [rank for rank in times if rank != late]
        for name, ms in times[late].items():
            extra = ms - statistics.median(times[rank].get(name, 0.0) for rank in others)
            if extra > largest:
                largest, part = extra, name
        return part

    def _is_meeting(self, message: Message) -> bool:
        """Return whether all ranks leave a message with nothing computed ahead.

        A rank that computes beyond a collective keeps its lead over a late one, and shows it only
        at a later collective that nothing covers.
        """
        if len(message.peers) < 2:
            return False
        for peer in message.peers.values():
            compute = self._steps[peer.rank, peer.step].compute
            if compute.contains(peer.event.end_ms - GAP_MS):
                return False
        return True

    def _times(self, message: Message) -> dict[str, float]:
        """Return what a rank does between the last meeting and its arrival: part → ms."""
        step = self._steps[message.rank, message.step]
        host = self._hosts[message.rank]
        previous = self._meeting.get(message)
        begin = step.window[0] if previous is None else previous.event.end_ms
        end = max(message.event.start_ms, begin)
        times = {}
        for phase, cover in step.compute_by_phase.items():
            name = "compute" if phase is None else f"compute of the {phase}"
            times[name] = cover.length(begin, end)
        times["copies"] = step.copies.length(begin, end)
        times[PEER] = step.point_to_point.length(begin, end)
        for start, stop in step.idle.within(begin, end):
            reason = host.reason((start, stop))
            name = LAUNCHING if reason is None else reason[0]
            times[name] = times.get(name, 0.0) + stop - start
        return times
