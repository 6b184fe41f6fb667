"""How sure a timing is: percentiles of samples, ratios of paired samples with their interval, and the noise floor."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_SAMPLES = 3  # below that p20 and p80 describe nothing
MIN_PAIRS = 5  # below that a bootstrap interval of a median hardly varies
RESAMPLES, CONFIDENCE_PCT = 10_000, 95


class Ratio(NamedTuple):
    """A ratio with its confidence interval ``[low, high]``."""

    ratio: float
    low: float
    high: float


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """``{"p20": …, "p50": …, "p80": …}`` of the samples, in their unit, with linear interpolation.

    Raises:
        ValueError: fewer than three samples, or one that is not finite.
    """
    values = _checked(samples, MIN_SAMPLES, "percentiles")
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (20, 50, 80)}


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """median(a) / median(b) with its 95 % percentile bootstrap interval, where ``a[i]`` and ``b[i]`` form a pair.

    Pairs (two variants timed right after each other) are resampled jointly, so that drift of the machine,
    which hits both, does not widen the interval (Efron & Tibshirani, *An Introduction to the Bootstrap*, ch.
    13).

    Raises:
        ValueError: unequal lengths, fewer than five pairs, or a sample that is not finite and positive.
    """
    first, second = _series((a, b), "paired_ratio")
    if min(first.min(), second.min()) <= 0:
        raise ValueError("paired_ratio needs positive samples")
    return overhead_ratio(first, second, np.zeros(len(first)))


def unpaired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """median(a) / median(b) of two series that share no moment, such as two runs: each is resampled by itself.

    Raises:
        ValueError: fewer than five samples of either, or one that is not finite and positive.
    """
    first, second = (_checked(samples, MIN_PAIRS, "unpaired_ratio") for samples in (a, b))
    if min(first.min(), second.min()) <= 0:
        raise ValueError("unpaired_ratio needs positive samples")
    generator = np.random.default_rng(0)  # the same resamples in every run
    medians = [np.median(s[generator.integers(len(s), size=(RESAMPLES, len(s)))], axis=1) for s in (first, second)]
    low, high = np.percentile(medians[0] / medians[1], [(100 - CONFIDENCE_PCT) / 2, (100 + CONFIDENCE_PCT) / 2])
    return Ratio(float(np.median(first) / np.median(second)), float(low), float(high))


def overhead_ratio(a: Sequence[float], b: Sequence[float], without: Sequence[float]) -> Ratio | None:
    """(median(a) − median(without)) / (median(b) − median(without)) with its bootstrap interval.

    The overhead of one variant over another's, where ``without`` are steps that send nothing;
    ``a[i]``, ``b[i]`` and ``without[i]`` were timed in one round and are resampled jointly.

    Returns:
        None where b's overhead is not above 0 in every resample: nothing to compare with.

    Raises:
        ValueError: as `paired_ratio`.
    """
    together = _series((a, b, without), "overhead_ratio")
    count = len(together[0])
    picks = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))  # the same ones in every run
    medians = [np.median(samples[picks], axis=1) for samples in together]
    if (medians[1] <= medians[2]).any():
        return None
    first, second, base = (np.median(samples) for samples in together)
    tail = (100 - CONFIDENCE_PCT) / 2
    low, high = np.percentile((medians[0] - medians[2]) / (medians[1] - medians[2]), [tail, 100 - tail])
    return Ratio(float((first - base) / (second - base)), float(low), float(high))


def noise_floor(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the difference in % that two series of the *same* variant show: differences below it mean nothing.

    The largest distance from 1 of their `paired_ratio`'s interval. Raises ValueError as `paired_ratio` does.
    """
    _, low, high = paired_ratio(a, b)
    return 100 * max(abs(high - 1), abs(1 - low))


def own_noise_floor(samples: Sequence[float]) -> float | None:
    """Return the `noise_floor` of one series: its even against its odd samples; None below 2·MIN_PAIRS of them."""
    half = len(samples) // 2
    return noise_floor(samples[0::2][:half], samples[1::2][:half]) if half >= MIN_PAIRS else None


def _series(together: Sequence[Sequence[float]], who: str) -> list[np.ndarray]:
    """Series whose samples at equal positions were measured in one round."""
    checked = [_checked(samples, MIN_PAIRS, who) for samples in together]
    if len({len(samples) for samples in checked}) > 1:
        kind = "pairs" if len(checked) == 2 else "triples"
        raise ValueError(f"{who} needs {kind}, got {', '.join(str(len(s)) for s in checked)} samples")
    return checked


def _checked(samples: Sequence[float], least: int, who: str) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or len(values) < least:
        raise ValueError(f"{who} needs at least {least} samples, got {values.size}: time more repetitions")
    if not np.isfinite(values).all():
        raise ValueError(f"{who} got a sample that is not a finite number")
    return values
