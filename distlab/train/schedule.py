"""The learning rate as a pure function of the step, without scheduler state that could be lost."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up to `peak`, then half a cosine down to `floor · peak`.

    By Loshchilov & Hutter 2017, SGDR, eq. 5.

    Args:
        peak: largest learning rate.
        steps: number of optimizer steps of the run. After them the rate stays at its floor.
        warmup: number of steps until the peak. 0 starts there.
        floor: last rate as a fraction of the peak.
    """

    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.1

    def __call__(self, step: int) -> float:
        """Return the rate of a step, counted from 0.

        The first step of a warm-up of k steps has peak/k, and its last step the peak.
        """
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if step >= self.steps:
            return self.peak * self.floor
        # A run that only warms up has no steps after it.
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
        return self.peak * (self.floor + (1 - self.floor) * cosine)
