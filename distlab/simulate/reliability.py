"""Stragglers, failures and checkpoints by drawing them: every host's every step, every failure of a run.

Beside the closed forms of `distlab.theory.reliability`, of which nothing is used here but the descriptions.
"""

from dataclasses import dataclass, replace

import numpy as np

from distlab.theory.reliability import Failures, Jitter

WEEK_S = 7 * 86_400.0


def step_times(compute: float, exposed: float, hosts: int, jitter: Jitter, *, steps: int) -> np.ndarray:
    """Seconds of each of `steps` synchronous steps.

    Args:
        compute: seconds that a median host computes in a step.
        exposed: seconds of communication behind the last of them.
    """
    draw = np.random.default_rng(0)
    slow = np.exp(jitter.of_host * draw.standard_normal(hosts))
    slowest = np.zeros(steps)
    for begin in range(0, steps, 100):  # thousands of hosts × steps in pieces
        some = min(100, steps - begin)
        spread = np.exp(jitter.of_step * draw.standard_normal((some, hosts)))
        slowest[begin : begin + some] = (spread * slow).max(axis=1)
    return compute * slowest + exposed


@dataclass(frozen=True)
class Week:
    """What became of a run.

    Args:
        goodput: share of the time in work that lasted.
        failures: mean number of them.
        lost: share in work that was done again.
        saving: share in checkpoints.
        down: share in restarts.
    """

    goodput: float
    failures: float
    lost: float
    saving: float
    down: float


def run(failures: Failures, interval: float, *, runs: int) -> Week:
    """Runs of a week: failures strike at any time, also during a checkpoint or a restart; work since the last finished
    checkpoint is lost. At the end everything done counts.
    """
    if not interval > 0:
        raise ValueError(f"interval={interval}: seconds of work between checkpoints must be positive")
    if np.isinf(failures.between):
        failures = replace(failures, between=1e12 * WEEK_S)
    draw = np.random.default_rng(0)
    period, worked, saved, down, struck = interval + failures.checkpoint, 0.0, 0.0, 0.0, 0
    for _ in range(runs):
        now = 0.0
        while True:
            until = min(WEEK_S, now + draw.exponential(failures.between))
            periods, rest = divmod(until - now, period)
            worked, saved = worked + periods * interval, saved + periods * failures.checkpoint
            if until == WEEK_S:
                worked, saved = worked + min(rest, interval), saved + max(0.0, rest - interval)
                break
            struck += 1
            now, again = until, draw.exponential(failures.between)
            while again < failures.restart and now + again < WEEK_S:  # a restart may fail too
                struck, down, now = struck + 1, down + again, now + again
                again = draw.exponential(failures.between)
            spent = min(failures.restart, WEEK_S - now)
            down, now = down + spent, now + spent
            if now == WEEK_S:
                break
    whole = runs * WEEK_S
    return Week(worked / whole, struck / runs, 1 - (worked + saved + down) / whole, saved / whole, down / whole)


def best_interval(failures: Failures, *, runs: int) -> float:
    """The interval with the largest simulated goodput among 21 between a quarter and four times Young's, all drawn
    from the same seed.
    """
    tried = failures.young() * np.geomspace(0.25, 4, 21)
    return float(max(tried, key=lambda each: run(failures, each, runs=runs).goodput))
