"""Ranks and what they say to each other: the rank context and the collectives."""

from typing import Any

# Editors read the same names from `__init__.pyi`.
__all__ = ["RankContext", "RankEnvironment", "rank_context"]


def __getattr__(name: str) -> Any:
    """Import the rank context when it is asked for: a strategy needs only the collectives."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from distlab.comm import context

    return getattr(context, name)
