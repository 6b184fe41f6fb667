"""One experiment on a submission, as data."""

from dataclasses import dataclass, field
from typing import Any

from distlab.grade.hooks import Part


@dataclass(frozen=True)
class Job:
    """An experiment to run in child processes.

    Attributes:
        experiment: name of a function in `experiments.py` or `kernels.py`.
        part: part that is examined.
        ranks: number of processes that form a group; 0 for one process without a group.
        settings: keyword arguments of the function.
        folder: copy of the submission.
        adapters: module of hooks; empty for `tests/adapters.py`.
        device: `cpu` or `cuda`.
        is_interpreted: True if Triton's kernels run in its interpreter. It is the same for all jobs
            of an examination, also for those that run on a CPU where there is a GPU.
        backend: `gloo` or `nccl`.
        seconds: time after which the processes are ended.
    """

    experiment: str
    part: Part
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    adapters: str = ""
    device: str = "cpu"
    is_interpreted: bool = True
    backend: str = "gloo"
    seconds: float = 30.0

    @property
    def processes(self) -> int:
        """Number of processes."""
        return max(self.ranks, 1)
