"""Certainty of a timing: percentiles, ratios of samples with intervals, and the noise floor."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_SAMPLES = 3  # below that p20 and p80 describe nothing
MIN_PAIRS = 5  # below that a bootstrap interval of a median hardly varies
RESAMPLES, CONFIDENCE_PCT = 10_000, 95

Samples = Sequence[float]


class Ratio(NamedTuple):
    """A ratio with its confidence interval ``[low, high]``."""

    ratio: float
    low: float
    high: float


def percentiles(samples: Samples) -> dict[str, float]:
    """Return ``{"p20": …, "p50": …, "p80": …}`` of the samples, with linear interpolation.

    Raises:
        ValueError: fewer than three samples, or one that is not finite.
    """
    values = _checked(samples, MIN_SAMPLES, "percentiles")
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (20, 50, 80)}


def percentile_metrics(name: str, samples: Samples) -> dict[str, float]:
    """Return `NAME_p20_ms`, `NAME_p50_ms` and `NAME_p80_ms` of samples. Raises as `percentiles`."""
    return {f"{name}_{p}_ms": ms for p, ms in percentiles(samples).items()}


def paired_ratio(a: Samples, b: Samples) -> Ratio:
    """Return median(a) / median(b) with its 95 % bootstrap interval. Equal indices form a pair.

    Pairs (two variants timed right after each other) are resampled jointly, so that drift of the
    machine, which hits both, does not widen the interval (Efron & Tibshirani, *An Introduction to
    the Bootstrap*, ch. 13).

    Raises:
        ValueError: unequal lengths, fewer than five pairs, or a sample that is not finite and
            positive.
    """
    first, second = (_positive(samples, "paired_ratio") for samples in (a, b))
    if len(first) != len(second):
        raise ValueError(f"paired_ratio needs pairs, got {len(first)} and {len(second)} samples")
    picks = _picks(len(first), np.random.default_rng(0))
    return _ratio(first, second, first[picks], second[picks])


def unpaired_ratio(a: Samples, b: Samples) -> Ratio:
    """Return median(a) / median(b) of two series without common moments, such as two runs.

    Each is resampled by itself.

    Raises:
        ValueError: fewer than five samples of either, or one that is not finite and positive.
    """
    first, second = (_positive(samples, "unpaired_ratio") for samples in (a, b))
    generator = np.random.default_rng(0)  # the same resamples in every run
    return _ratio(
        first, second, *(samples[_picks(len(samples), generator)] for samples in (first, second))
    )


def _picks(count: int, generator: np.random.Generator) -> np.ndarray:
    """Return the samples of each resample, as numbers (RESAMPLES, count)."""
    return generator.integers(count, size=(RESAMPLES, count))


def _ratio(first: np.ndarray, second: np.ndarray, firsts: np.ndarray, seconds: np.ndarray) -> Ratio:
    """Return the ratio of two medians. The rows of resamples give its interval."""
    tail = (100 - CONFIDENCE_PCT) / 2
    low, high = np.percentile(
        np.median(firsts, axis=1) / np.median(seconds, axis=1), [tail, 100 - tail]
    )
    return Ratio(float(np.median(first) / np.median(second)), float(low), float(high))


def noise_floor(a: Samples, b: Samples) -> float:
    """Return the difference in % between two series of the *same* variant.

    A difference below it means nothing.

    The largest distance from 1 of their `paired_ratio`'s interval. Raises ValueError as
    `paired_ratio` does.
    """
    _, low, high = paired_ratio(a, b)
    return 100 * max(abs(high - 1), abs(1 - low))


def own_noise_floor(samples: Samples) -> float | None:
    """Return the `noise_floor` of one series, its even against its odd samples.

    None if there are fewer than 2·MIN_PAIRS samples.
    """
    half = len(samples) // 2
    return noise_floor(samples[0::2][:half], samples[1::2][:half]) if half >= MIN_PAIRS else None


def _positive(samples: Samples, who: str) -> np.ndarray:
    values = _checked(samples, MIN_PAIRS, who)
    if values.min() <= 0:
        raise ValueError(f"{who} needs positive samples")
    return values


def _checked(samples: Samples, least: int, who: str) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or len(values) < least:
        raise ValueError(
            f"{who} needs at least {least} samples, got {values.size}: time more repetitions"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{who} got a sample that is not a finite number")
    return values
