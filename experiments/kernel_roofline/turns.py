"""The variants of a row timed in turns, so that a drift of the clock falls on all of them alike.

Every round (`distlab.measure.rounds`) times each of them for a moment, every other round in reverse, and ours stands at
both ends of a round. What is compared are times of one round.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from distlab.measure.clock import PhaseTimer
from distlab.measure.rounds import interleave
from distlab.measure.statistics import noise_floor

from .timing import quantiles

AGAIN = "ours again"
Rounds = Mapping[str, list[list[float]]]  # variant → times in ms, round by round


def in_turns(calls: Mapping[str, Callable[[], Any]], repeat_ms: float, rounds: int, device: str) -> Rounds:
    """Time the calls in `rounds` rounds, each for `repeat_ms` in all; "ours", if among them, once more as AGAIN."""
    line = list(calls.items()) + [(AGAIN, call) for name, call in calls.items() if name == "ours"]
    counts = {name: max(1, int(repeat_ms / rounds / statistics.median(_timed(call, 3, device)))) for name, call in line}
    return interleave({name: partial(_timed, call, counts[name], device) for name, call in line}, rounds)


def _timed(call: Callable[[], Any], count: int, device: str) -> list[float]:
    """Milliseconds of `count` calls after one that is not timed; the L2 holds something else before each."""
    flush = torch.empty(2**28, dtype=torch.int8, device=device).zero_ if device == "cuda" else lambda: None
    timer = PhaseTimer(device)
    call()
    for _ in range(count):
        flush()
        timer.start()
        call()
        timer.mark("call")
    return [step["step"] for step in timer.steps()]


def summary(times: Rounds) -> dict[str, dict[str, float]]:
    """Variant → percentiles of all its times and the number of rounds, and beside ours

    `over_ours` of a peer: the median over rounds of its time over ours in the same round;
    `noise_pct` of ours: how far from 1 the 95 % interval of ours over ours reaches.
    """
    pooled = {name: list(chain(*parts)) for name, parts in times.items() if name != AGAIN}
    if "ours" in pooled:
        pooled["ours"] += chain(*times[AGAIN])
    found = {name: quantiles(samples) | {"rounds": len(times[name])} for name, samples in pooled.items()}
    if "ours" not in times:
        return found
    middle = {name: [statistics.median(part) for part in parts] for name, parts in times.items()}
    mine = [(a + b) / 2 for a, b in zip(middle["ours"], middle[AGAIN], strict=True)]
    for name in pooled.keys() - {"ours"}:
        found[name]["over_ours"] = statistics.median(t / m for t, m in zip(middle[name], mine, strict=True))
    twice = [b / a for a, b in zip(middle["ours"], middle[AGAIN], strict=True)]
    found["ours"]["noise_pct"] = noise_floor(twice, [1.0] * len(twice))
    return found


def over_ours(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> float:
    """A peer's time over ours: that of the rounds where they were timed in turns."""
    return theirs.get("over_ours") or theirs["time_p50_ms"] / ours["time_p50_ms"]


def fits(held: Sequence[int]) -> bool:
    """Whether what variants hold at most, in bytes, can be held at once: a graph keeps what its run allocated.

    Half as much again is left for what is lost between blocks, and for the runs before a capture.
    """
    if not held:  # nothing is known of a CPU's memory, and nothing is captured there
        return True
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return 1.5 * sum(held) <= free
