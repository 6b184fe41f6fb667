"""Progress of a long loop, and the time that the rest of it will take."""

import time
from collections.abc import Callable
from datetime import timedelta

EVERY_S = 5.0


class Pace:
    """Progress of a loop, as a line now and then: `small: step: 40 of 500, 0:01:32 left`.

    Call it once after each repetition. A loop that is over within `every_s` seconds says nothing.

    Args:
        total: number of repetitions.
        what: name of the work that is repeated.
        say: function that takes the line.
        every_s: seconds between lines.
        clock: function that returns the time in seconds.

    Raises:
        ValueError: no repetition.
    """

    def __init__(
        self,
        total: int,
        what: str,
        say: Callable[[str], None],
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total < 1:
            raise ValueError(f"total={total}: at least one repetition")
        self.total = total
        self.what = what
        self.say = say
        self.every_s = every_s
        self.clock = clock
        self.done = 0
        begin = clock()
        self._first_done_at = begin
        self._said_at = begin

    def __call__(self) -> None:
        """Count one more repetition, and say a line if the last one is `every_s` seconds ago."""
        self.done += 1
        now = self.clock()
        if self.done == 1:
            self._first_done_at = now
        # The end is not said: the result of the loop follows it.
        if self.done == self.total or now - self._said_at < self.every_s:
            return
        self._said_at = now
        left = ""
        if self.done > 1:
            # The first repetition compiles and allocates, so it does not tell how long the others
            # take.
            each_s = (now - self._first_done_at) / (self.done - 1)
            rest_s = each_s * (self.total - self.done)
            left = f", {timedelta(seconds=round(rest_s))} left"
        self.say(f"{self.what}: {self.done} of {self.total}{left}")
