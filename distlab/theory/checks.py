"""Checks of arguments that several formulas share."""

from collections.abc import Iterable


def at_least_one(**sizes: float) -> None:
    """Check that every size is at least one.

    Args:
        sizes: each size by the name of the caller's argument.

    Raises:
        ValueError: a smaller size. The message names the argument.
    """
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Check that a value is one of those allowed.

    Args:
        name: name of the caller's argument.
        value: value that the caller was given for it.
        allowed: all values that it may have.

    Raises:
        ValueError: another value. The message names the argument and the values allowed.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(allowed)}")
