"""Naive data parallelism: after backward, one blocking all-reduce per parameter.

    compute        │ forward │ backward │                          │ optimizer │
    communication  │         │          │ flags │ p0 │ p1 │ p2 │ … │           │

Nothing overlaps, and each small message pays the full latency: the baseline that the others improve
on. The flags say which parameters a rank has used (`UsedFlags`).
"""

from distlab.parallel.data_parallel import DataParallel


class NaiveDDP(DataParallel):
    """Averages gradients one parameter at a time in `finish_gradient_synchronization()`.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        mesh, process_group: see `DataParallel`.
    """

    def _synchronize(self) -> None:
        for parameter in self.trainable:  # the same order on all ranks
            self.average(parameter).wait()
