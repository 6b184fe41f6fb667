"""Interleaved rounds: every variant is timed once per round, so that clock drift affects all of them alike.

A GPU's clocks follow its temperature and its power limit and drift by several per cent within seconds. If variants
are timed one after the other, the drift decides which one wins; in interleaved rounds, times of one round can be
compared.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def interleave(
    calls: Mapping[K, Callable[[], R]], rounds: int, *, progress: Callable[[str], None] = lambda text: None
) -> dict[K, list[R]]:
    """Call each of `calls` once per round, every other round in reverse: a linear drift cancels over two rounds.

    Args:
        calls: name → what measures this variant once; it may time a block of steps.
        progress: takes a line before each call.

    Returns:
        name → what its calls returned, round by round; equal positions were measured in one round.
    """
    found: dict[K, list[R]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in reversed(calls) if number % 2 else calls:
            progress(f"round {number + 1}/{rounds}: {name}")
            found[name].append(calls[name]())
    return found
