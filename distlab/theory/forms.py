"""What the closed forms must know of a strategy, whichever it is."""

from typing import Protocol


class Form(Protocol):
    """How a strategy communicates and what it divides; the entries of `distlab.parallel.STRATEGIES` say so.

    Args:
        name: for messages.
        sends, updates, after_backward, pads_buckets, has_buckets, takes_mesh, is_peer: see
            `distlab.parallel.Strategy`.
    """

    name: str
    sends: str | None
    updates: str
    after_backward: bool
    pads_buckets: bool
    has_buckets: bool
    takes_mesh: bool
    is_peer: bool
