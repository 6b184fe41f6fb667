"""Checks of arguments that several formulas share."""

from collections.abc import Iterable


def at_least_one(**sizes: float) -> None:
    """Raises ValueError, naming the argument, for a size below one."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raises ValueError, naming the argument and what is allowed, for another value."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(allowed)}")
