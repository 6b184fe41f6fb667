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
