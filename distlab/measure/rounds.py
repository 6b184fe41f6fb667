"""Interleaved rounds of calls that may fail, as metrics of a record."""

import statistics
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeVar

from distlab.measure.interleaved import interleave, percentile_metrics
from distlab.measure.validity import attempt

K = TypeVar("K", bound=Hashable)


def sample_rounds(
    calls: Mapping[K, Callable[[], Mapping[str, list[float]]]], rounds: int
) -> dict[K, dict[str, Any]]:
    """Return metrics of each of `calls`, which are called in interleaved rounds.

    Args:
        calls: name → function that returns clock → times of one round in ms.
        rounds: number of rounds, at least three for percentiles.

    Returns:
        name → `CLOCK_samples_ms`, the medians of the rounds, and their `CLOCK_p20_ms`, p50 and p80.
        If a call failed, only a `status`.
    """
    attempts = {name: partial(attempt, call) for name, call in calls.items()}
    return {name: _metrics(times) for name, times in interleave(attempts, rounds).items()}


def _metrics(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of one call from what each of its rounds returned."""
    for found in rounds:
        if found["status"] != "ok":
            return dict(found)
    metrics: dict[str, Any] = {}
    for clock in rounds[0]:
        if clock != "status":
            samples = [statistics.median(found[clock]) for found in rounds]
            metrics |= percentile_metrics(clock, samples)
            metrics[f"{clock}_samples_ms"] = samples
    return metrics
