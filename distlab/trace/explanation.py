"""The explanation of a run from its traces: account, causes, process groups and kernels."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distlab.files import AnyPath
from distlab.measure.trace.account import StepAccount, lanes
from distlab.measure.trace.intervals import Interval, intersect
from distlab.measure.trace.reader import read_trace
from distlab.measure.trace.stream import Progress
from distlab.text import for_terminal
from distlab.trace.causes import Blame, Finding, findings, named
from distlab.trace.ranks import RankSteps, common_steps, match, number_alike, rank_steps
from distlab.trace.steps import find_steps

WIDTH = 100  # characters of a line
TOP = 10  # kernels and collectives that are listed
SHOWN_CAUSES = 8  # rows of the table of causes in a terminal
SHOWN_PCT = 0.1  # share of a step below which a cause has no row there


@dataclass(frozen=True)
class Group:
    """Communication of one operation in one process group, as averages per step of a rank.

    Attributes:
        operation, group: operation, and name and ranks of the process group.
        count: number of messages.
        ms: sum of their durations, with waiting.
        exposed_ms: ms of them that nothing covers.
        size_bytes: bytes of all messages. None if the trace does not have them.
        bus_gb_per_s: bus bandwidth in GB/s, without waiting for late ranks. None without bytes, and
            for sends and receives.
    """

    operation: str
    group: str
    count: float
    ms: float
    exposed_ms: float
    size_bytes: float | None
    bus_gb_per_s: float | None


@dataclass(frozen=True)
class TopKernel:
    """A kernel (operator, on a CPU): ms and calls per step, on the first rank."""

    name: str
    ms: float
    count: float


def _host_lanes(rank: RankSteps, window: Interval) -> dict[str, list[Interval]]:
    """Return the host's lanes of a step's timeline. Empty without a GPU, where the host computes.

    A launch is an interval without length.
    """
    if not rank.trace.on_gpu:
        return {}
    begin, end = window
    launches = []
    for event in rank.trace.events:
        if event.launched_ms is not None and begin <= event.launched_ms < end:
            launches.append((event.launched_ms - begin, event.launched_ms - begin))
    waits = []
    for span in rank.trace.host:
        if span.role in ("synchronisation", "item"):
            waits.append((span.start_ms, span.end_ms))
    waits_of_step = [(start - begin, stop - begin) for start, stop in intersect(waits, [window])]
    return {"host waits": waits_of_step, "host launches": launches}


@dataclass
class Explanation:
    """Explanation of a run by its traces.

    Attributes:
        ranks: steps of every rank.
        findings: causes, the largest first.
        exposed: exposed communication with its causes.
        notes: sentences about what the traces lack.
    """

    ranks: list[RankSteps]
    findings: list[Finding]
    exposed: list[Blame]
    notes: list[str]

    @property
    def first(self) -> str:
        """The sentence to act on."""
        for finding in self.findings:
            if finding.is_large:
                return finding.sentence
        for finding in self.findings:
            if finding.is_unexplained:
                return (
                    "No cause with a remedy takes 5 % of the step, but nothing runs for "
                    f"{finding.ms:.2f} ms per step ({finding.pct:.0f} %) on rank {finding.rank}, "
                    "although the next work was queued. Look at the timeline of the longest step."
                )
        return "Nothing to act on: no cause of lost time takes 5 % of the step."

    @property
    def summary(self) -> str:
        """One line about the run."""
        slowest = max(self.ranks, key=lambda rank: rank.mean.step_ms)
        mean = slowest.mean
        steps = len(slowest.steps)
        # The ranks wait for each other. So even then the step is as long as on the rank that needs
        # most time without its exposed communication.
        without_ms = max(rank.mean.step_ms - rank.mean.exposed_ms for rank in self.ranks)
        saved_ms = mean.step_ms - without_ms
        overlap = "no communication"
        if mean.overlap_pct is not None:
            overlap = f"{mean.overlap_pct:.0f} % of communication overlapped"
        return (
            f"{len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}, {steps} "
            f"step{'s' * (steps > 1)} (by {slowest.found_by}) of {mean.step_ms:.2f} ms on average: "
            f"{overlap}; perfect overlap would save {saved_ms:.2f} ms "
            f"({100 * saved_ms / mean.step_ms:.0f} %)"
        )

    def groups(self) -> list[Group]:
        """Return the communication by operation and group, the most exposed first."""
        messages = defaultdict(list)
        exposed_ms = Counter()
        for rank in self.ranks:
            counted = set()
            for step in rank.steps.values():
                for message in step.messages:
                    known = message.event.collective
                    exposed_ms[known.operation, known.group] += message.exposed_ms
                    # One that a step's end divides is exposed in both steps, but is one message.
                    if id(message.event) not in counted:
                        counted.add(id(message.event))
                        messages[known.operation, known.group].append(message)
        steps = sum(len(rank.steps) for rank in self.ranks)
        found = []
        for (operation, group), several in messages.items():
            sizes = [each.event.collective.size_bytes for each in several]
            size_bytes = bus = None
            if all(sizes):
                size_bytes = sum(sizes) / steps
                ranks = several[0].event.collective.ranks or len(self.ranks)
                # Without the wait for the late rank, in which nothing is sent. With it, a straggler
                # would look like a slow network.
                moving_ms = sum(each.ms - each.wait_ms for each in several) / steps
                # The duration of a receive contains the wait for its peer, which is not known.
                if ranks > 1 and moving_ms > 0 and not several[0].is_point_to_point:
                    bus = _bus_factor(operation, ranks) * size_bytes / moving_ms / 1e6
            group_found = Group(
                operation=operation,
                group=group or "unknown",
                count=len(several) / steps,
                ms=sum(each.ms for each in several) / steps,
                exposed_ms=exposed_ms[operation, group] / steps,
                size_bytes=size_bytes,
                bus_gb_per_s=bus,
            )
            found.append(group_found)
        return sorted(found, key=lambda each: -each.exposed_ms)

    def kernels(self) -> list[TopKernel]:
        """Return the kernels of the first rank with the most time."""
        ms, count = Counter(), Counter()
        rank = self.ranks[0]
        counted = set()
        for step in rank.steps.values():
            for event in step.events:
                # A step's end may divide a kernel, which then is an event of both steps.
                if event.kind == "compute" and id(event) not in counted:
                    counted.add(id(event))
                    ms[event.name] += event.end_ms - event.start_ms
                    count[event.name] += 1
        steps = len(rank.steps)
        return [
            TopKernel(name, total / steps, count[name] / steps)
            for name, total in ms.most_common(TOP)
        ]

    def collectives(self) -> list[dict[str, Any]]:
        """Return the most exposed collectives of an average step, each with its cause."""
        groups = defaultdict(list)
        for blame in self.exposed:
            message = blame.message
            known = message.event.collective
            key = (message.rank, known.operation, known.group, message.place)
            groups[key].append(blame)
        steps = {rank.rank: len(rank.steps) for rank in self.ranks}
        found = []
        for (rank, _, _, place), blames in groups.items():
            causes = Counter()
            for blame in blames:
                causes[blame.cause] += blame.ms
            row = {
                "rank": rank,
                "collective": named(blames[0].message.event),
                "number": place,
                "exposed_ms": sum(blame.ms for blame in blames) / steps[rank],
                "cause": causes.most_common(1)[0][0],
            }
            found.append(row)
        return sorted(found, key=lambda row: -row["exposed_ms"])[:TOP]

    def worst(self) -> tuple[int, dict[str, dict[str, list[Interval]]]]:
        """Return the number of the longest step, and the lanes of its timeline for each rank."""
        longest: dict[int, float] = {}
        for rank in self.ranks:
            for number, step in rank.steps.items():
                longest[number] = max(longest.get(number, 0.0), step.account.step_ms)
        number = max(longest, key=longest.get)
        found = {}
        for rank in self.ranks:
            if number in rank.steps:
                step = rank.steps[number]
                label = f"rank {rank.rank}\n{step.account.step_ms:.2f} ms"
                found[label] = lanes(step.events, step.window) | _host_lanes(rank, step.window)
        return number, found

    def samples(self) -> dict[str, list[float]]:
        """Return part of the step → its ms in each step, on the average rank."""
        # Only steps that all ranks have: a mean over other ranks in each step would jump.
        numbers = common_steps(self.ranks)
        steps = [[rank.steps[number] for number in sorted(numbers)] for rank in self.ranks]
        if not numbers:
            # Then the first step of each rank with the first one of the others, and so on.
            steps = [list(rank.steps.values()) for rank in self.ranks]
        found = defaultdict(list)
        for of_ranks in zip(*steps, strict=False):
            parts = [parts_of(step.account) for step in of_ranks]
            for part in parts[0]:
                found[part].append(statistics.fmean(each[part] for each in parts))
        return dict(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain values, for JSON."""
        ranks = []
        for rank in self.ranks:
            steps = []
            for number, step in rank.steps.items():
                begin, end = step.window
                place = {"step": number, "begin_ms": begin, "end_ms": end}
                steps.append(place | parts_of(step.account))
            overlap_pct = rank.mean.overlap_pct
            ranks.append(
                {
                    "rank": rank.rank,
                    "file": rank.trace.path,
                    "steps_found_by": rank.found_by,
                    "mean": parts_of(rank.mean) | {"overlap_pct": overlap_pct},
                    "steps": steps,
                }
            )
        causes = []
        for finding in self.findings:
            causes.append(asdict(finding) | {"sentence": finding.sentence})
        return {
            "act_on": self.first,
            "summary": self.summary,
            "notes": self.notes,
            "ranks": ranks,
            "causes": causes,
            "collectives": self.collectives(),
            "groups": [asdict(group) for group in self.groups()],
            "kernels": [asdict(kernel) for kernel in self.kernels()],
        }

    def __str__(self) -> str:
        titles = ["rank", "step ms", "compute", "optimizer", "exposed", "copies", "idle"]
        rows = []
        for rank in self.ranks:
            parts = parts_of(rank.mean)
            rows.append([str(rank.rank), *(f"{ms:.2f}" for ms in parts.values())])
        causes = []
        shown = [finding for finding in self.findings if finding.pct >= SHOWN_PCT]
        for finding in shown[:SHOWN_CAUSES]:
            row = [finding.cause, f"{finding.ms:.2f}", f"{finding.pct:.1f}", str(finding.rank)]
            causes.append([*row, f"{finding.count:.3g}", finding.about[:44]])
        cause_titles = ["cause", "ms per step", "% of step", "rank", "times", "mostly"]
        first = textwrap.fill(self.first, WIDTH)
        summary = textwrap.fill(self.summary, WIDTH)
        lines = [first, "", summary, "", *_table(titles, rows), ""]
        if causes:
            lines += [*_table(cause_titles, causes, text_columns=(0, 5)), ""]
        lines += [textwrap.fill(f"({note})", WIDTH) for note in self.notes]
        return for_terminal("\n".join(lines).rstrip())


def _bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth over bytes per time, as NCCL's performance page defines it."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def parts_of(account: StepAccount) -> dict[str, float]:
    """Return the parts of a step in ms. All but the first add up to the first."""
    return {
        "step": account.step_ms,
        "compute": account.compute_ms - account.optimizer_ms,
        "optimizer": account.optimizer_ms,
        "exposed communication": account.exposed_ms,
        "copies": account.copy_ms,
        "idle": account.idle_ms,
    }


def explain_traces(
    paths: Sequence[AnyPath],
    *,
    window: Interval | None = None,
    communication: Sequence[str] = (),
    progress: Progress | None = None,
) -> Explanation:
    """Explain a run by the traces of its ranks.

    Args:
        paths: paths of the files, one per rank, ``.json`` or ``.json.gz``.
        window: interval in ms since the first event of each trace, to take as the only step.
        communication: further regular expressions for names of communication.
        progress: function that receives a sentence about how far it is.

    Raises:
        OSError: a file cannot be opened.
        ValueError: a file is damaged or not a trace, holds no work, or two are of one rank.
    """
    ranks: list[RankSteps] = []
    for position, path in enumerate(paths):
        trace = read_trace(path, communication, progress)
        if progress is not None:
            progress(f"accounting for {Path(path).name}")
        rank = _rank_of(trace.rank, path, position)
        for other in ranks:
            if other.rank == rank:
                raise ValueError(
                    f"{other.trace.path} and {path} are both of rank {rank}: give one file per rank"
                )
        ranks.append(rank_steps(trace, find_steps(trace, window), rank))
    ranks.sort(key=lambda rank: rank.rank)
    notes = []
    if number_alike(ranks):
        notes.append("the ranks number their steps differently; the collectives tell which are one")
    # Before the causes: waits for a late rank follow from the durations on the other ranks.
    match(ranks)
    found, exposed = findings(ranks)
    return Explanation(ranks, found, exposed, [*notes, *_notes(ranks)])


def _rank_of(known: int | None, path: AnyPath, position: int) -> int:
    """Return the rank that the file names, else its name, else its position."""
    if known is not None:
        return known
    written = re.search(r"rank[-_ ]?(\d+)", Path(path).name)
    return position if written is None else int(written[1])


def _notes(ranks: Sequence[RankSteps]) -> list[str]:
    """Return sentences about what the traces lack."""
    notes = list(dict.fromkeys(note for rank in ranks for note in rank.trace.notes))
    counts = {rank.rank: len(rank.steps) for rank in ranks}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
        notes.append(f"the ranks have different numbers of steps ({said})")
    if not common_steps(ranks):
        notes.append(
            "the ranks have no step in common: trace the same steps on all ranks, so that waiting "
            "for a late rank can be told"
        )
    messages = []
    for rank in ranks:
        for step in rank.steps.values():
            for message in step.messages:
                # One that began before the step counts there, and no other rank tells the peer of a
                # send.
                if message.place is not None and not message.is_point_to_point:
                    messages.append(message)
    if len(ranks) == 1 and messages:
        notes.append("with the traces of all ranks, waiting for a late rank can be told")
    unmatched = sum(len(message.peers) < 2 for message in messages)
    if len(ranks) > 1 and unmatched:
        notes.append(f"{unmatched} of {len(messages)} collectives have no partner on another rank")
    return notes


def _table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int] = (0,)
) -> list[str]:
    """Return the lines of a table. Numbers are aligned right."""
    lines = []
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for row in [titles, *rows]:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if place in text_columns else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines
