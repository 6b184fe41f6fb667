"""What an option's text may be: types for `argparse` that refuse what no experiment can use, where it is typed in."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""
    limits = f"a whole number of at least {least:,}" + (f" and at most {most:,}" if most is not None else "")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: give {limits}") from None
        if value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"{value}: give {limits}")
        return value

    return parse


def real(
    *, least: float | None = None, above: float | None = None, most: float | None = None
) -> Callable[[str], float]:
    """A finite number; `least` and `most` are allowed themselves, `above` is not."""
    bounds = [f" of at least {least:g}"] if least is not None else [f" above {above:g}"] if above is not None else []
    bounds += [f" at most {most:g}"] if most is not None else []
    limits = "a finite number" + " and".join(bounds)

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: give {limits}") from None
        low = (least is not None and value < least) or (above is not None and value <= above)
        if not math.isfinite(value) or low or (most is not None and value > most):
            raise ArgumentTypeError(f"{text}: give {limits}")
        return value

    return parse


def either(words: Mapping[str, Any], parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """One of some words, which stands for a value, or what `parse` takes."""

    def parse_or_word(text: str) -> Any:
        if text in words:
            return words[text]
        try:
            return parse(text)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{error}, or {', '.join(words)}") from None

    return parse_or_word


def seed(text: str) -> int:
    """A seed that every generator takes."""
    return whole(0, 2**63 - 1)(text)


def names(allowed: Sequence[str], *, everything: Sequence[str] | None = None) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between them, each once; `all` stands for `everything` where that is given."""

    def parse(text: str) -> tuple[str, ...]:
        if everything is not None and text == "all":
            return tuple(everything)
        given = tuple(name.strip() for name in text.split(","))
        unknown = [name for name in given if name not in allowed]
        if unknown:
            raise ArgumentTypeError(f"{', '.join(map(repr, unknown))} is unknown; allowed: {', '.join(allowed)}")
        return tuple(dict.fromkeys(given))

    return parse
