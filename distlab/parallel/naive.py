"""Naive data parallelism: after backward, one blocking all-reduce per parameter.

    compute        │ forward │ backward │                          │ optimizer │
    communication  │         │          │ flags │ p0 │ p1 │ p2 │ … │           │

Nothing overlaps, and each small message pays the full latency. The other strategies improve on this
baseline. The flags say which parameters a rank has used (`UsedFlags` in `ddp.py`).
"""

from distlab.parallel.ddp import DataParallel


class NaiveDDP(DataParallel):
    """Averages gradients one parameter at a time in `finish_gradient_synchronization()`.

    Args:
        module: model to wrap; see `DataParallel` for checks and errors.
        mesh, process_group: see `DataParallel`.
    """

    def _synchronize(self) -> None:
        for index in range(len(self.trainable)):  # the same order on all ranks
            wait_for_mean = self.average(index)
            wait_for_mean()
