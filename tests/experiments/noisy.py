"""Made-up timings of variants of known speed, for tests that findings claim no more than their
intervals.
"""

from random import Random

from distlab.measure import percentile_metrics

SEEDS = 200
NOISES = (0.005, 0.05, 0.3, 0.8)  # sigma of a lognormal distribution
PAIRS = (3, 4, 5, 12)


def each_seed(check):
    """Call `check(seed)` with every seed.

    One test of them all costs less than 200 tests to collect and report.
    """
    for seed in range(SEEDS):
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"with seed {seed}")
            raise


class Noise:
    """The noise of one made-up run.

    Args:
        seed: decides on how noisy it is, on its number of rounds and on every sample.
    """

    def __init__(self, seed):
        self.random = Random(seed)
        self.sigma = self.random.choice(NOISES)
        self.pairs = self.random.choice(PAIRS)
        self.keeps_samples = self.random.random() < 0.8  # otherwise only medians, as old records do

    def metrics(self, *clocks):
        """Timings of a variant by each of `clocks`, of which the true one is 1.0, 1.04 or
        1.3 ms.
        """
        found = {}
        for clock in clocks:
            true_ms = self.random.choice([1.0, 1.04, 1.3])
            samples = [
                true_ms * self.random.lognormvariate(0, self.sigma) for _ in range(self.pairs)
            ]
            percentiles = percentile_metrics(clock, samples)
            if self.keeps_samples:
                found |= percentiles | {f"{clock}_samples_ms": samples}
            else:
                found[f"{clock}_p50_ms"] = percentiles[f"{clock}_p50_ms"]
        return found


def side_of_one(metrics, name):
    """Return `faster`, `slower`, or `unclear` where a ratio's interval contains 1 or there
    is none.
    """
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    if low is None or high is None or low <= 1 <= high:
        return "unclear"
    return "faster" if high < 1 else "slower"
