"""Facts about a strategy that the closed forms need."""

from typing import Protocol


class Form(Protocol):
    """Messages of a strategy, and the state that it divides.

    An entry of `distlab.parallel.STRATEGIES` has these attributes. `distlab/parallel/build.py`
    explains them.

    Args:
        name: name of the strategy, for errors.
        sends, updates, after_backward, pads_buckets, has_buckets, frees_gradients, takes_mesh,
            is_peer: fields of `distlab.parallel.Strategy`.
    """

    name: str
    sends: str | None
    updates: str
    after_backward: bool
    pads_buckets: bool
    has_buckets: bool
    frees_gradients: bool
    takes_mesh: bool
    is_peer: bool


def reductions_per_step(strategy: Form, micro_batches: int) -> int:
    """Return the number of times that a strategy reduces gradients, or reduce-scatters them.

    It is once per step if the earlier micro-batches add to full gradients, without communication.
    ZeRO-2 and hybrid sharding keep shards only, so they reduce-scatter in each micro-batch.

    Args:
        strategy: entry of the strategy.
        micro_batches: number of micro-batches of a step.
    """
    is_hybrid = strategy.sends == "units" and strategy.takes_mesh
    return micro_batches if strategy.frees_gradients or is_hybrid else 1
