"""Interleaved rounds: every variant is timed once per round, so that clock drift affects all alike.

A GPU's clocks follow its temperature and its power limit and drift by several per cent within
seconds. If variants are timed one after the other, the drift decides which one wins; in interleaved
rounds, times of one round can be compared.
"""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from distlab.measure.statistics import percentile_metrics
from distlab.measure.validity import attempt

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def back_and_forth(number: int, names: Sequence[K]) -> Sequence[K]:
    """Every other round in reverse: a linear drift cancels over two rounds."""
    return names[::-1] if number % 2 else names


def rotated(number: int, names: Sequence[K]) -> Sequence[K]:
    """Return an order that begins each round with the next variant: none is always first."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def interleave(
    calls: Mapping[K, Callable[[], R]],
    rounds: int,
    *,
    order: Callable[[int, Sequence[K]], Sequence[K]] = back_and_forth,
    progress: Callable[[str], None] = lambda text: None,
    ended: Callable[[], None] = lambda: None,
) -> dict[K, list[R]]:
    """Call each of `calls` once per round.

    Args:
        calls: name → function that measures this variant once. It may time a block of steps.
        order: function from a round's number and the names to their order: `back_and_forth`,
            `rotated`, or any other.
        progress: function that is called with a line before each call.
        ended: function that is called after each round.

    Returns:
        name → what its calls returned, round by round; equal positions were measured in one round.
    """
    found = {name: [] for name in calls}
    for number in range(rounds):
        for name in order(number, list(calls)):
            progress(f"round {number + 1}/{rounds}: {name}")
            found[name].append(calls[name]())
        ended()
    return found


def sample_rounds(
    calls: Mapping[K, Callable[[], Mapping[str, list[float]]]], rounds: int
) -> dict[K, dict[str, Any]]:
    """Return metrics of each of `calls`, which are called in interleaved rounds.

    A call returns the times of one round by clock.

    Returns:
            name → `CLOCK_samples_ms`, the medians of the rounds, and their `CLOCK_p20_ms`, p50 and
        p80. If a call failed, only a `status`.
    """
    found = {}
    for name, times in interleave(
        {name: partial(attempt, call) for name, call in calls.items()}, rounds
    ).items():
        found[name] = next((dict(one) for one in times if one["status"] != "ok"), {})
        for clock in [clock for clock in times[0] if clock != "status"] if not found[name] else ():
            samples = [statistics.median(one[clock]) for one in times]
            found[name] |= percentile_metrics(clock, samples)
            found[name][f"{clock}_samples_ms"] = samples
    return found
