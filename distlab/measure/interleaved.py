"""Timings that can be compared: interleaved rounds, percentiles, paired ratios with an interval.

This file needs numpy and nothing of distlab. To use it elsewhere, copy it next to your script:

    import time
    from functools import partial
    from interleaved import interleave, paired_ratio, percentiles

    def call_ms(function):  # on a GPU, time with torch.cuda.Event
        begin = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - begin)

    ms = interleave({"old": partial(call_ms, old), "new": partial(call_ms, new)}, rounds=20)
    print(percentiles(ms["new"]), paired_ratio(ms["new"], ms["old"]))

On several ranks, call it on each with the same names in the same order, begin each block with a
barrier, and take the maximum over ranks of each sample: the slowest rank counts.

Why rounds are interleaved. A GPU's clocks follow its temperature and its power limit, and drift by
several per cent within seconds. If variants are timed one after the other, the drift decides which
one wins. In interleaved rounds each variant is timed once per round, so the drift hits all alike,
and times of one round form a pair.

How to read a ratio. It is *first ÷ second*, with a 95 % interval. Two variants are a tie if the
interval contains 1.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

MIN_SAMPLES = 3  # p20 and p80 of fewer samples describe nothing
MIN_PAIRS = 5  # a bootstrap interval of a median of fewer pairs hardly varies
RESAMPLES = 10_000
CONFIDENCE_PCT = 95

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
Samples = Sequence[float]


def back_and_forth(number: int, names: Sequence[K]) -> Sequence[K]:
    """Reverse every other round: a linear drift cancels over two rounds."""
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
        rounds: number of rounds.
        order: function from a round's number and the names to their order: `back_and_forth`,
            `rotated`, or any other.
        progress: function that is called with a line before each call.
        ended: function that is called after each round.

    Returns:
        name → what its calls returned, round by round. Equal positions were measured in one round.
    """
    found: dict[K, list[R]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in order(number, list(calls)):
            progress(f"round {number + 1}/{rounds}: {name}")
            found[name].append(calls[name]())
        ended()
    return found


def percentiles(samples: Samples) -> dict[str, float]:
    """Return `{"p20": …, "p50": …, "p80": …}` of the samples, with linear interpolation.

    Raises:
        ValueError: fewer than three samples, or one that is not finite.
    """
    values = _checked(samples, MIN_SAMPLES, "percentiles")
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (20, 50, 80)}


def percentile_metrics(name: str, samples: Samples) -> dict[str, float]:
    """Return `NAME_p20_ms`, `NAME_p50_ms` and `NAME_p80_ms` of samples. Raises as `percentiles`."""
    return {f"{name}_{p}_ms": ms for p, ms in percentiles(samples).items()}


class Ratio(NamedTuple):
    """A ratio with its confidence interval `[low, high]`."""

    ratio: float
    low: float
    high: float


def paired_ratio(a: Samples, b: Samples) -> Ratio:
    """Return median(a) / median(b) with its 95 % bootstrap interval. Equal indices form a pair.

    Pairs are resampled jointly, so that drift of the machine, which hits both of a pair, does not
    widen the interval (Efron & Tibshirani, *An Introduction to the Bootstrap*, ch. 13).

    Raises:
        ValueError: unequal lengths, fewer than five pairs, or a sample that is not finite and
            positive.
    """
    first = _positive(a, "paired_ratio")
    second = _positive(b, "paired_ratio")
    if len(first) != len(second):
        raise ValueError(f"paired_ratio needs pairs, got {len(first)} and {len(second)} samples")
    # A fixed seed: the same samples give the same interval in every report.
    picks = _picks(len(first), np.random.default_rng(0))
    # The same picks for both, so that each resample consists of whole pairs.
    return _ratio(first, second, first[picks], second[picks])


def unpaired_ratio(a: Samples, b: Samples) -> Ratio:
    """Return median(a) / median(b) of two series without common moments, such as two runs.

    Each is resampled by itself.

    Raises:
        ValueError: fewer than five samples of either, or one that is not finite and positive.
    """
    first = _positive(a, "unpaired_ratio")
    second = _positive(b, "unpaired_ratio")
    generator = np.random.default_rng(0)  # the same resamples in every run
    firsts = first[_picks(len(first), generator)]
    seconds = second[_picks(len(second), generator)]
    return _ratio(first, second, firsts, seconds)


def noise_floor(a: Samples, b: Samples) -> float:
    """Return the difference in % between two series of the *same* variant.

    It is the largest distance from 1 of the interval of their `paired_ratio`. A difference between
    variants that is smaller means nothing. Raises ValueError as `paired_ratio` does.
    """
    _, low, high = paired_ratio(a, b)
    return 100 * max(abs(high - 1), abs(1 - low))


def own_noise_floor(samples: Samples) -> float | None:
    """Return the `noise_floor` of one series, one half of its samples against the other.

    Of two neighbours each half gets one. None if there are fewer than 2·MIN_PAIRS samples.
    """
    if len(samples) // 2 < MIN_PAIRS:
        return None
    # Neighbours are compared, and not early samples with late ones, so that drift does not count as
    # noise. Pairs swap sides in the order 0 1 1 0 1 0 0 1 … (Thue and Morse), because steps on a
    # GPU may go up and down, probably at its power limit: in one record, every second of 24 steps
    # was 1.5 % longer, in all rounds. A median has both kinds in equal parts, but even samples
    # against odd ones would set one kind against the other.
    halves: tuple[list[float], list[float]] = ([], [])
    for pair in range(len(samples) // 2):
        swap = pair.bit_count() % 2
        halves[swap].append(samples[2 * pair])
        halves[1 - swap].append(samples[2 * pair + 1])
    return noise_floor(*halves)


def _picks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Return the samples of each resample, as numbers of shape (RESAMPLES, count)."""
    return generator.integers(count, size=(RESAMPLES, count))


def _ratio(first: np.ndarray, second: np.ndarray, firsts: np.ndarray, seconds: np.ndarray) -> Ratio:
    """Return the ratio of two medians. Resamples, one per row, give its interval."""
    # 2.5 % on either side.
    tail = (100 - CONFIDENCE_PCT) / 2
    ratios = np.median(firsts, axis=1) / np.median(seconds, axis=1)
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Ratio(float(np.median(first) / np.median(second)), float(low), float(high))


def _positive(samples: Samples, caller: str) -> np.ndarray:
    values = _checked(samples, MIN_PAIRS, caller)
    if values.min() <= 0:
        raise ValueError(f"{caller} needs positive samples")
    return values


def _checked(samples: Samples, smallest: int, caller: str) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or len(values) < smallest:
        raise ValueError(
            f"{caller} needs at least {smallest} samples, got {values.size}: time more repetitions"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{caller} got a sample that is not a finite number")
    return values
