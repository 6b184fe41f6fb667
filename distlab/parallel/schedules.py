"""Pipeline schedules as data: the actions of each rank, in order.

The pipeline runs these lists, `simulate` predicts their time, and `draw` prints them.

    F s m   forward of stage s for micro-batch m
    B s m   backward of stage s for micro-batch m. In a schedule with W it computes only the
            gradient of the stage's input, which the stage before needs.
    W s m   gradients of the stage's matrices, which no other stage needs

Below, p is the number of ranks, m the number of micro-batches and v the number of stages per rank.
Stage s is on rank s mod p. F, B and W are the times of one action. B = 2·F in the first three rows.

    schedule      idle share of a rank's time                        micro-batches held by rank r
    gpipe         (p − 1)/(m + p − 1)                                m
    1f1b          (p − 1)/(m + p − 1)                                p − r
    interleaved   (p − 1)/(v·m + p − 1)                              1/v of the blocks: see `held`
    zero-bubble   time (p − 1)(F + B − W), not (p − 1)(F + B + W)    p, r of them only until their W

Sources: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, PipeDream), interleaved (Narayanan
et al. 2021), ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Action(NamedTuple):
    """One step of a rank.

    Attributes:
        kind: F, B or W.
        stage: number of the stage.
        batch: number of the micro-batch.
    """

    kind: str
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.batch}"


Schedule = list[list[Action]]  # the actions of each rank, in order

# -- the schedules --------------------------------------------------------------------------------


def gpipe(ranks: int, batches: int) -> Schedule:
    """Return the schedule with all forwards first and then all backwards."""
    schedule = []
    for rank in range(ranks):
        forwards = [Action("F", rank, batch) for batch in range(batches)]
        backwards = [Action("B", rank, batch) for batch in range(batches)]
        schedule.append(forwards + backwards)
    return schedule


def one_f_one_b(ranks: int, batches: int) -> Schedule:
    """Return the schedule that alternates forward and backward after a warm-up.

    The warm-up of a rank is one forward for each rank after it.
    """
    schedule = []
    for rank in range(ranks):
        warm_up = ranks - 1 - rank
        schedule.append(_alternating(rank, batches, warm_up))
    return schedule


def interleaved(ranks: int, batches: int, chunks: int = 2) -> Schedule:
    """Return the 1F1B schedule of `chunks` stages per rank.

    Micro-batches go through the stages in groups, one group after another. A group has one
    micro-batch for each rank.

    Raises:
        ValueError: the number of micro-batches is not a multiple of the number of ranks.
    """
    if batches % ranks:
        enough = -(-batches // ranks) * ranks  # rounded up
        raise ValueError(
            f"interleaved: {batches} micro-batches are not a multiple of {ranks} ranks: "
            f"take {enough} (--accumulate)"
        )

    def nth_action(rank: int, number: int, kind: str) -> Action:
        """Return a rank's action of this kind with this number."""
        group, place = divmod(number, ranks * chunks)
        chunk = place // ranks
        if kind == "B":
            chunk = chunks - 1 - chunk  # backward runs through the chunks in reverse
        return Action(kind, chunk * ranks + rank, group * ranks + place % ranks)

    schedule = []
    for rank in range(ranks):
        warm_up = (ranks - 1 - rank) * 2 + (chunks - 1) * ranks
        # Here `batch` is a number for `nth_action`: it counts the rank's forwards or backwards.
        order = _alternating(rank, batches * chunks, warm_up)
        schedule.append([nth_action(rank, action.batch, action.kind) for action in order])
    return schedule


def zero_bubble(ranks: int, batches: int) -> Schedule:
    """Return ZB-H1: 1F1B in which rank r delays W by r micro-batches.

    A rank runs the delayed W at the end, where it would wait otherwise.
    """
    schedule = []
    for rank, one_f_one_b_actions in enumerate(one_f_one_b(ranks, batches)):
        actions: list[Action] = []
        for action in one_f_one_b_actions:
            actions.append(action)
            if action.kind == "B" and action.batch >= rank:
                actions.append(Action("W", rank, action.batch - rank))
        for batch in range(max(batches - rank, 0), batches):
            actions.append(Action("W", rank, batch))
        schedule.append(actions)
    return schedule


def _alternating(rank: int, count: int, warm_up: int) -> list[Action]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the other backwards.

    Args:
        rank: number of the rank, which is also the number of the stage.
        count: number of forwards, and of backwards.
        warm_up: number of forwards before the first pair. At most `count` of them are done.
    """
    first = min(warm_up, count)
    actions = [Action("F", rank, batch) for batch in range(first)]
    for batch in range(count - first):
        actions.append(Action("F", rank, first + batch))
        actions.append(Action("B", rank, batch))
    for batch in range(count - first, count):
        actions.append(Action("B", rank, batch))
    return actions


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
CHUNKS = {"interleaved": 2}  # number of stages per rank; 1 for schedules that are not listed

# -- their time -----------------------------------------------------------------------------------


class Step(NamedTuple):
    """An action with its start and end, in the unit of the given durations."""

    action: Action
    start: float
    end: float


def simulate(
    schedule: Schedule, duration: Callable[[Action], float], message: float = 0.0
) -> list[list[Step]]:
    """Return the timeline of each rank, if each action starts as soon as its inputs have arrived.

    Args:
        schedule: actions of each rank.
        duration: function that returns the time of an action.
        message: time of a message between ranks.

    Raises:
        ValueError: ranks that wait for each other for ever.
    """
    stages = _stages(schedule)
    ended: dict[Action, float] = {}
    timeline: list[list[Step]] = [[] for _ in schedule]
    # Let each rank run until it waits for another, again and again, until no rank can go on.
    progress = True
    while progress:
        progress = False
        for actions, steps in zip(schedule, timeline, strict=True):
            while len(steps) < len(actions):
                action = actions[len(steps)]
                inputs = list(needs(action, stages))
                if any(each not in ended for each in inputs):
                    break
                start = steps[-1].end if steps else 0.0
                for each in inputs:
                    is_sent = each.stage != action.stage
                    arrival = ended[each] + message * is_sent
                    start = max(start, arrival)
                ended[action] = start + duration(action)
                steps.append(Step(action, start, ended[action]))
                progress = True
    waiting = []
    for rank, (actions, steps) in enumerate(zip(schedule, timeline, strict=True)):
        if len(steps) < len(actions):
            waiting.append(f"rank {rank} for {actions[len(steps)]}")
    if waiting:
        raise ValueError(
            f"this schedule never ends, since ranks wait for each other: {', '.join(waiting)}"
        )
    return timeline


def needs(action: Action, stages: int) -> Iterator[Action]:
    """Yield the actions whose results this action uses."""
    kind, stage, batch = action
    if kind == "F" and stage > 0:
        yield Action("F", stage - 1, batch)
    if kind == "B":
        yield Action("F", stage, batch)
        if stage < stages - 1:
            yield Action("B", stage + 1, batch)
    if kind == "W":
        yield Action("B", stage, batch)


def idle_share(timeline: Sequence[Sequence[Step]]) -> float:
    """Return the bubble: the fraction of time that ranks wait, until the last one ends."""
    end = max(steps[-1].end for steps in timeline)
    busy = sum(step.end - step.start for steps in timeline for step in steps)
    return 1 - busy / (end * len(timeline))


def held(actions: Sequence[Action]) -> int:
    """Return the largest number of activations that a rank holds at once.

    One activation is that of one stage for one micro-batch. It is held from F until the last part
    of its backward.
    """
    is_split = any(action.kind == "W" for action in actions)
    last = "W" if is_split else "B"
    now = 0
    max_held = 0
    for action in actions:
        if action.kind == "F":
            now += 1
        elif action.kind == last:
            now -= 1
        max_held = max(max_held, now)
    return max_held


def draw(timeline: Sequence[Sequence[Step]]) -> str:
    """Return a drawing with one line per rank and one character per unit of time.

    The character is the micro-batch: digits in forward, lower-case letters in backward (a is
    micro-batch 0), and capitals in W. A dot means that the rank waits.
    """
    end = round(max(steps[-1].end for steps in timeline))
    first_character = {"F": "0", "B": "a", "W": "A"}
    lines = []
    for steps in timeline:
        line = ["."] * end
        for action, start, stop in steps:
            character = chr(ord(first_character[action.kind]) + action.batch)
            line[round(start) : round(stop)] = character * round(stop - start)
        lines.append("".join(line))
    return "\n".join(lines)


# -- checks ---------------------------------------------------------------------------------------


def check(schedule: Schedule) -> None:
    """Refuse a schedule that would not end, or would not compute the gradient of the mean loss.

    Raises:
        ValueError: ranks that wait for each other. An action that is missing, done twice, or on
            another stage's rank. Backwards of a stage in another order than in one process, whose
            sum would have other bits. Messages that one rank sends in another order than the other
            rank receives them.
    """
    simulate(schedule, lambda action: 1.0)
    _check_actions(schedule)
    _check_stages(schedule)
    _check_messages(schedule)


def _check_actions(schedule: Schedule) -> None:
    """Check that every stage does every kind of action once for every micro-batch."""
    counts = Counter(action for actions in schedule for action in actions)
    batches = 1 + max(action.batch for action in counts)
    is_split = any(action.kind == "W" for action in counts)
    expected = []
    for kind in "FBW" if is_split else "FB":
        for stage in range(_stages(schedule)):
            for batch in range(batches):
                expected.append(Action(kind, stage, batch))
    in_order = dict.fromkeys([*expected, *counts])  # each once
    wrong = [str(action) for action in in_order if counts[action] != 1]
    if wrong:
        raise ValueError(f"this schedule does not do each of these once: {', '.join(wrong[:5])}")


def _check_stages(schedule: Schedule) -> None:
    """Check that each rank runs its own stages, and sums gradients in the order of one process."""
    ranks = len(schedule)
    for rank, actions in enumerate(schedule):
        if any(action.stage % ranks != rank for action in actions):
            raise ValueError(f"this schedule lets rank {rank} run stages of other ranks")
        for stage in range(rank, _stages(schedule), ranks):
            for kind in "BW":
                order = [
                    action.batch
                    for action in actions
                    if action.kind == kind and action.stage == stage
                ]
                if order != sorted(order):
                    raise ValueError(
                        f"this schedule sums the gradients of stage {stage} in the order {order}"
                    )


def _check_messages(schedule: Schedule) -> None:
    """Check that each rank receives messages in the order in which its neighbour sends them."""
    ranks = len(schedule)
    stages = _stages(schedule)
    for kind, step in (("F", 1), ("B", -1)):  # F sends to the stage after, B to the stage before
        for rank, actions in enumerate(schedule):
            receiver = (rank + step) % ranks
            sent = []
            for action in actions:
                target = action.stage + step
                if action.kind == kind and 0 <= target < stages:
                    sent.append((target, action.batch))
            received = []
            for action in schedule[receiver]:
                source = action.stage - step
                if action.kind == kind and 0 <= source < stages:
                    received.append((action.stage, action.batch))
            if sent != received:
                raise ValueError(
                    f"this schedule lets rank {receiver} take messages in another order than rank "
                    f"{rank} sends them"
                )


def _stages(schedule: Schedule) -> int:
    """Return the number of stages."""
    return 1 + max(action.stage for actions in schedule for action in actions)
