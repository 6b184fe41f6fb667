"""Checks of arguments that several formulas share."""


def at_least_one(**sizes: float) -> None:
    """Raises ValueError, naming the argument, for a size below one."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
