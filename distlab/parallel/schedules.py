"""Pipeline schedules as data: what each rank does, in which order.

The same lists are run, simulated and drawn.

    F s m   forward of stage s for micro-batch m
    B s m   its backward; where that is split, only the gradient of the stage's input, which the stage before waits for
    W s m   the rest of a split backward: the gradients of its matrices, which nobody waits for

With p ranks, m micro-batches and v stages a rank (stage s lies on rank s mod p), times of F, B and
W as their names:

    schedule      idle share of a rank's time, where B takes twice F's       micro-batches held by rank r
    gpipe         (p − 1)/(m + p − 1)                                        m
    1f1b          (p − 1)/(m + p − 1)                                        p − r
    interleaved   (p − 1)/(v·m + p − 1)                                      of 1/v of the blocks: see `held`
    zero-bubble   (p − 1)(F + B − W) instead of (p − 1)(F + B + W) idle      p, of which r wait for W only

Sources: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, PipeDream), interleaved (Narayanan
et al. 2021), ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Action(NamedTuple):
    """One step of a rank: what (F, B or W), of which stage, for which micro-batch."""

    kind: str
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.batch}"


Schedule = list[list[Action]]  # the actions of each rank, in order


def gpipe(ranks: int, batches: int) -> Schedule:
    """All forwards, then all backwards."""
    return [
        [Action(kind, rank, m) for kind in "FB" for m in range(batches)] for rank in range(ranks)
    ]


def one_f_one_b(ranks: int, batches: int) -> Schedule:
    """After as many forwards as the ranks behind need, a forward and a backward in turn."""
    return [_alternating(rank, batches, warm_up=ranks - 1 - rank) for rank in range(ranks)]


def zero_bubble(ranks: int, batches: int) -> Schedule:
    """ZB-H1: 1F1B whose rank r puts off the W of r micro-batches, and does them where it would wait at the end."""
    schedule = []
    for rank, actions in enumerate(one_f_one_b(ranks, batches)):
        found: list[Action] = []
        for action in actions:
            found.append(action)
            if action.kind == "B" and action.batch >= rank:
                found.append(Action("W", rank, action.batch - rank))
        owed = range(max(batches - rank, 0), batches)
        schedule.append(found + [Action("W", rank, m) for m in owed])
    return schedule


def interleaved(ranks: int, batches: int, chunks: int = 2) -> Schedule:
    """1F1B of `chunks` stages a rank: groups of as many micro-batches as ranks go through one after the other.

    Raises:
        ValueError: micro-batches that are no multiple of the ranks.
    """
    if batches % ranks:
        enough = -(-batches // ranks) * ranks
        raise ValueError(
            f"interleaved: {batches} micro-batches are no multiple of {ranks} ranks: take {enough} (--accumulate)"
        )

    def nth(rank: int, number: int, kind: str) -> Action:
        group, place = divmod(number, ranks * chunks)
        chunk = place // ranks if kind == "F" else chunks - 1 - place // ranks
        return Action(kind, chunk * ranks + rank, group * ranks + place % ranks)

    count, schedule = batches * chunks, []
    for rank in range(ranks):
        warm_up = (ranks - 1 - rank) * 2 + (chunks - 1) * ranks
        order = _alternating(rank, count, warm_up)
        schedule.append([nth(rank, action.batch, action.kind) for action in order])
    return schedule


def _alternating(rank: int, count: int, warm_up: int) -> list[Action]:
    """So many forwards first, then one forward and one backward in turn, then the backwards that are left."""
    first = min(warm_up, count)
    actions = [Action("F", rank, m) for m in range(first)]
    for m in range(count - first):
        actions += [Action("F", rank, first + m), Action("B", rank, m)]
    return actions + [Action("B", rank, m) for m in range(count - first, count)]


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
CHUNKS = {"interleaved": 2}  # stages of a rank, where it is not one


class Step(NamedTuple):
    """An action and when it runs, in the unit of its durations."""

    action: Action
    start: float
    end: float


def simulate(
    schedule: Schedule, duration: Callable[[Action], float], message: float = 0.0
) -> list[list[Step]]:
    """When each rank does what, if each begins an action as soon as what it needs is there.

    Args:
        schedule: what each rank does.
        duration: of an action.
        message: what a message between ranks takes.

    Raises:
        ValueError: ranks that wait for each other, for ever.
    """
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    ended: dict[Action, float] = {}
    timeline: list[list[Step]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for actions, steps in zip(schedule, timeline, strict=True):
            while len(steps) < len(actions):
                action = actions[len(steps)]
                needed = list(needs(action, stages))
                if any(each not in ended for each in needed):
                    break
                ready = [ended[each] + message * (each.stage != action.stage) for each in needed]
                start = max([*ready, steps[-1].end if steps else 0.0])
                ended[action] = start + duration(action)
                steps.append(Step(action, start, ended[action]))
                moved = True
    waiting = [
        f"rank {rank} for {actions[len(steps)]}"
        for rank, (actions, steps) in enumerate(zip(schedule, timeline, strict=True))
        if len(steps) < len(actions)
    ]
    if waiting:
        raise ValueError(
            f"this schedule never ends, since ranks wait for each other: {', '.join(waiting)}"
        )
    return timeline


def needs(action: Action, stages: int) -> Iterator[Action]:
    """Yield the actions whose results it takes."""
    kind, stage, batch = action
    if kind == "F" and stage > 0:
        yield Action("F", stage - 1, batch)
    if kind == "B":
        yield Action("F", stage, batch)
        if stage < stages - 1:
            yield Action("B", stage + 1, batch)
    if kind == "W":
        yield Action("B", stage, batch)


def check(schedule: Schedule) -> None:
    """Refuse a schedule that would not end, or would not compute the gradient of the mean loss.

    Raises:
        ValueError: ranks that wait for each other; an action that is missing or done twice;
            backwards of a stage in another order than one process has, whose sum would have other
            bits; or messages between two ranks that one sends in another order than the other takes
            them.
    """
    simulate(schedule, lambda action: 1.0)
    counts = Counter(action for actions in schedule for action in actions)
    ranks, stages, batches = (
        len(schedule),
        1 + max(a.stage for a in counts),
        1 + max(a.batch for a in counts),
    )
    split = any(action.kind == "W" for action in counts)
    kinds = "FBW" if split else "FB"
    wanted = [
        Action(kind, stage, batch)
        for kind in kinds
        for stage in range(stages)
        for batch in range(batches)
    ]
    wrong = [str(action) for action in {**dict.fromkeys(wanted), **counts} if counts[action] != 1]
    if wrong:
        raise ValueError(f"this schedule does not do each of these once: {', '.join(wrong[:5])}")
    for rank, actions in enumerate(schedule):
        if any(action.stage % ranks != rank for action in actions):
            raise ValueError(f"this schedule lets rank {rank} do what is of stages of other ranks")
        for stage in range(rank, stages, ranks):
            for kind in "BW":
                order = [action.batch for action in actions if action[:2] == (kind, stage)]
                if order != sorted(order):
                    raise ValueError(
                        f"this schedule sums the gradients of stage {stage} in the order {order}"
                    )
    for kind, step in (("F", 1), ("B", -1)):
        for rank, actions in enumerate(schedule):
            receiver = (rank + step) % ranks
            sent = [
                (a.stage + step, a.batch)
                for a in actions
                if a.kind == kind and 0 <= a.stage + step < stages
            ]
            taken = [
                a[1:] for a in schedule[receiver] if a.kind == kind and 0 <= a.stage - step < stages
            ]
            if sent != taken:
                raise ValueError(
                    f"this schedule lets rank {receiver} take messages in another order than rank {rank} sends them"
                )


def idle_share(timeline: Sequence[Sequence[Step]]) -> float:
    """Return the bubble: the part of all ranks' time, until the last one ends, in which they do nothing."""
    end = max(steps[-1].end for steps in timeline)
    busy = sum(step.end - step.start for steps in timeline for step in steps)
    return 1 - busy / (end * len(timeline))


def held(actions: Sequence[Action]) -> int:
    """Count the activations of a stage for a micro-batch that a rank holds at most, until the last part of backward."""
    now = most = 0
    last = "W" if any(action.kind == "W" for action in actions) else "B"
    for action in actions:
        now += (action.kind == "F") - (action.kind == last)
        most = max(most, now)
    return most


def draw(timeline: Sequence[Sequence[Step]]) -> str:
    """One line a rank, one character for a unit of time: the micro-batch, and a dot where it waits.

    Forward in digits, backward in letters (a is micro-batch 0), the rest of a split one in
    capitals.
    """
    end = round(max(steps[-1].end for steps in timeline))
    first = {"F": "0", "B": "a", "W": "A"}
    lines = []
    for steps in timeline:
        line = ["."] * end
        for (kind, _, batch), start, stop in steps:
            line[round(start) : round(stop)] = chr(ord(first[kind]) + batch) * round(stop - start)
        lines.append("".join(line))
    return "\n".join(lines)
