"""Progress of a long loop, and the time that the rest of it will take."""

import time
from collections.abc import Callable
from datetime import timedelta

EVERY_S = 5.0


class Pace:
    """Called once per repetition, says a line now and then: `small: step: 40 of 500, 0:01:32 left`.

    What is left is estimated from the repetitions since the first, which compiles and allocates. A
    loop that is over within `every_s` seconds says nothing.

    Args:
        total: repetitions.
        what: is repeated.
        say: takes the line.
        every_s: seconds between lines.
        clock: in seconds.

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
        self.total, self.what, self.say = total, what, say
        self.every_s, self.clock = every_s, clock
        self.done = 0
        self._first = self._said = clock()

    def __call__(self) -> None:
        """One more repetition is done."""
        self.done += 1
        now = self.clock()
        if self.done == 1:
            self._first = now
        if self.done == self.total or now - self._said < self.every_s:
            return
        self._said = now
        rest_s = (now - self._first) / max(1, self.done - 1) * (self.total - self.done)
        left = f", {timedelta(seconds=round(rest_s))} left" if self.done > 1 else ""
        self.say(f"{self.what}: {self.done} of {self.total}{left}")
