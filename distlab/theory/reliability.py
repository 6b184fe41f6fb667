"""Cost of failures and checkpoints in a synchronous run, in closed form.

Failures come at random, one in M seconds (exponential). A checkpoint takes δ seconds, a restart R.
With τ seconds of work between checkpoints, work and checkpoint are repeated, each time after a
restart, until no failure comes in τ + δ seconds. On average that takes

    M·exp(R/M)·(exp((τ + δ)/M) − 1)   seconds

(Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps"). The
share of it that is work, the goodput, is largest near

    Young 1974     √(2·δ·M)
    Daly 2006      √(2·δ·M)·(1 + ⅓·√(δ/(2M)) + δ/(18M)) − δ,   M where δ ≥ 2M

Young's rule is that of M much longer than δ: checkpoints cost δ/τ of the time, and failures on
average τ/(2M). Their sum is smallest at √(2·δ·M).
"""

import math
from dataclasses import dataclass

# GPU-hours between unexpected interruptions: 419 in 54 days on 16,384 H100s (Grattafiori et al.
# 2024, The Llama 3 Herd of Models, section 3.3.4).
GPU_HOURS_BETWEEN_FAILURES = 16_384 * 54 * 24 / 419


@dataclass(frozen=True)
class Failures:
    """Times of failures, of saving and of starting again.

    Args:
        between: M, mean seconds between failures of the whole run. Infinite for none.
        checkpoint: δ, seconds for which the run waits for a checkpoint.
        restart: R, seconds from a failure to the first new step.

    Raises:
        ValueError: a time between failures that is not positive, or a negative number.
    """

    between: float
    checkpoint: float
    restart: float

    def __post_init__(self) -> None:
        if not self.between > 0 or min(self.checkpoint, self.restart) < 0:
            raise ValueError(f"{self}: time between failures must be positive, no time negative")

    @staticmethod
    def of_gpus(gpus: int, checkpoint: float, restart: float) -> "Failures":
        """Return the times of a run on GPUs that fail every `GPU_HOURS_BETWEEN_FAILURES`.

        Args:
            gpus: number of GPUs.
            checkpoint: δ, seconds for which the run waits for a checkpoint.
            restart: R, seconds from a failure to the first new step.
        """
        seconds_between = 3600 * GPU_HOURS_BETWEEN_FAILURES / gpus
        return Failures(seconds_between, checkpoint, restart)

    def young(self) -> float:
        """Return the seconds of work between checkpoints by Young's rule.

        Infinite without failures.
        """
        return math.sqrt(2 * self.checkpoint * self.between)

    def daly(self) -> float:
        """Return the seconds of work between checkpoints by Daly's rule."""
        if math.isinf(self.between):
            return math.inf
        ratio = self.checkpoint / (2 * self.between)
        # δ ≥ 2M: the series no longer converges to an interval.
        if ratio >= 1:
            return self.between
        # With ratio = δ/(2M), Daly's last term δ/(18M) is ratio/9.
        correction = 1 + math.sqrt(ratio) / 3 + ratio / 9
        return self.young() * correction - self.checkpoint

    def goodput(self, interval: float) -> float:
        """Return the share of time that is lasting work.

        Args:
            interval: τ, seconds of work between checkpoints.

        Raises:
            ValueError: an interval that is not positive.
        """
        if not interval > 0:
            raise ValueError(
                f"interval={interval}: seconds of work between checkpoints must be positive"
            )
        if math.isinf(self.between):
            return interval / (interval + self.checkpoint) if math.isfinite(interval) else 1.0
        exponent = (interval + self.checkpoint) / self.between
        exponent_of_restart = self.restart / self.between
        # The exponential would overflow a float. At that rate of failures no work lasts.
        if exponent + exponent_of_restart > 700:
            return 0.0
        # Daly 2006: the expected time of one interval is M·e^(R/M)·(e^((τ + δ)/M) − 1).
        seconds = self.between * math.exp(exponent_of_restart) * math.expm1(exponent)
        return interval / seconds
