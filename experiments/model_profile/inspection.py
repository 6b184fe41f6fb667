"""What of a step to look at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Inspection:
    """What `run` looks at.

    Args:
        profile: kernels and kinds of work, from a trace.
        profile_ranks: which ranks write a trace; the first of them is summarised.
        profile_steps: first and last step that is traced, counted from 0; the steps before run without the profiler.
        memory: memory over time; on a GPU the allocator's history too.
        saved: what is kept for backward, eager, compiled and by this lab's kernels.
    """

    profile: bool = False
    profile_ranks: tuple[int, ...] = (0,)
    profile_steps: tuple[int, int] = (3, 5)
    memory: bool = False
    saved: bool = False

    def __post_init__(self) -> None:
        first, last = self.profile_steps
        if not 0 <= first <= last:
            raise ValueError(f"profile steps {first} to {last}: give 0 <= first <= last")
        if not self.profile_ranks or min(self.profile_ranks) < 0:
            raise ValueError(f"profile ranks {self.profile_ranks}: give at least one, none below 0")

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError if a rank is to be profiled that does not exist."""
        if self.profile and max(self.profile_ranks) >= world_size:
            raise ValueError(f"profile ranks {self.profile_ranks}: there are ranks 0 to {world_size - 1}")
