"""Options of a command as fields of a frozen dataclass: type, default, limits and help together.

    @dataclass(frozen=True)
    class Config(Options):
            batch: int = option(4, "sequences per rank", least=1)
            dtype: str = option("fp32", "dtype of the computation", choices=("fp32", "bf16"))
            sizes_mb: tuple[float | None, ...] = option(
                (1.0, None), "MiB per bucket", above=0, words={"none": None}
            )

`add_options(parser, Config)` makes `--batch`, `--dtype` and `--sizes-mb` of it, and
`config_from(Config, args)` the config again. Limits are checked when a config is made, so that
they also hold for Python callers. Imports no torch.
"""

import argparse
import dataclasses
import difflib
import math
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from typing import Any

Values = Mapping[str, Any]  # by field, word or limit
# of whole numbers without a limit of their own; a larger one, of steps, ranks or bytes, is a slip
MOST = 10**12
SEED = {"least": 0, "most": 2**63 - 1}  # limits of a seed that every generator takes


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[Any] | None = None,
    words: Values | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    positional: bool = False,
    kind: type | None = None,
) -> Any:
    """Declare a field of `Options` that is an option of the command.

    Args:
        default: value of the field. Tuples become options that take several values, bools become
            `--x / --no-x`.
        help: text for `--help`, which adds the default.
        least, above, most: limits of a number, or of each number of a tuple. `above` itself is not
            allowed, and whole numbers end at `MOST`.
        choices: allowed values, for a tuple those of each entry. `all` then means all of them.
        words: text → value that it means, such as `{"none": None}`.
        flag: name of the option if it is not the field's, such as `--bucket-size-mb`.
        metavar: name of the value in `--help`.
        positional: True for an argument without a flag.
        kind: type to read the text as, if the field's type cannot say it.
    """
    return field(default=default, metadata=locals())


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of configurations: checks every field that is an `option` when one is made.

    Raises:
        ValueError: a value that is not allowed; the message names the field, says what is and what
            to give.
    """

    @classmethod
    def of(cls, known: Values) -> typing.Self:
        """Return the options that a record's configuration holds. Its lists become tuples."""
        given = {each.name: known[each.name] for each in fields(cls) if each.name in known}
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})

    @classmethod
    def check_given(cls, given: Values) -> None:
        """Raise ValueError for options that must not be given together.

        Defaults and presets do not count.
        """

    def __post_init__(self) -> None:
        for each, kind, several in _described(type(self)):
            value = getattr(self, each.name)
            name = f"{each.name}={value!r}"
            if several and not value and each.default:
                raise ValueError(f"{name}: give at least one")
            for entry in value if several else (value,):
                if problem := _problem(entry, each, kind):
                    raise ValueError(f"{name}: {problem}")


def add_options(
    parser: argparse.ArgumentParser, config: type[Options], defaults: Values | None = None
) -> None:
    """Add an option for each field of `config`.

    An option that is not given on the command line is absent from the namespace.

    Args:
        defaults: field → value that takes the default's place, for the help.
    """
    for each, kind, several in _described(config):
        meta = each.metadata
        default = (defaults or {}).get(each.name, each.default)
        bare = default is None or default == () or default is MISSING or kind is bool
        every = meta["choices"] is not None and default == tuple(meta["choices"])
        text = meta["help"] + (
            "" if bare else f" [{'all' if every else shown(default, meta['words'])}]"
        )
        keywords: dict[str, Any] = {"help": text.replace("%", "%%")}
        if meta["positional"]:
            names = [each.name]
            needed = each.default is MISSING
            keywords["nargs"] = ("+" if needed else "*") if several else None if needed else "?"
        else:
            names = [meta["flag"] or f"--{each.name.replace('_', '-')}"]
            keywords["dest"] = each.name
            if kind is not bool and several:
                keywords["nargs"] = "+"
        keywords["default"] = argparse.SUPPRESS
        if kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            keywords["type"] = _reader(each, kind, several)
            keywords["metavar"] = meta["metavar"] or each.name.upper()
        parser.add_argument(*names, **keywords)


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, with a suggestion for a misspelt word."""

    def error(self, message: str) -> typing.NoReturn:
        """End the command with the line, and without the usage: `--help` says more."""
        choices = [choice for action in self._actions for choice in action.choices or ()]
        typed = re.search(r"(?:choice: '|arguments: )([^\s'=]+)", message)
        hint = did_you_mean(typed[1], [*self._option_string_actions, *choices]) if typed else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")


def did_you_mean(word: Any, known: Iterable[Any]) -> str:
    """Return ` (did you mean …?)` with the name that resembles a word most, or nothing."""
    close = difflib.get_close_matches(str(word), map(str, known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown(word: Any, known: Iterable[Any]) -> str:
    """Say that a name is unknown, what it may have meant, and what is allowed."""
    return f"{word!r} is unknown{did_you_mean(word, known)}; allowed: {', '.join(map(str, known))}"


def parser_of(name: str, doc: str | None, *configs: type[Options]) -> argparse.ArgumentParser:
    """Return the parser of a command. Its help is the module's docstring and the options."""
    width = min(120, shutil.get_terminal_size().columns)
    prose = r"(?m)(^[^\s-].*\n?)+"  # what is indented, and lists, stay as they are
    text = re.sub(prose, lambda found: textwrap.fill(found[0], width) + "\n", doc or "")
    parser = Parser(name, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for config in configs:
        add_options(parser, config)
    return parser


def given(config: type[Options], args: argparse.Namespace) -> dict[str, Any]:
    """Field → value of the options that were given on the command line."""
    found = {}
    for each, _, several in _described(config):
        if hasattr(args, each.name):
            value = getattr(args, each.name)
            found[each.name] = (
                tuple(entry for part in value for entry in part) if several else value
            )
    return found


def config_from(
    config: type[Options], args: argparse.Namespace, preset: Values | None = None
) -> Any:
    """Return the configuration: given options, over a preset, over the fields' defaults.

    Raises:
        ValueError: as in `Options`.
    """
    return config(**{**(preset or {}), **given(config, args)})


def _described(config: type[Options]) -> list[tuple[dataclasses.Field, Any, bool]]:
    """Yield (field, type of one value, True if it takes several) of every `option` field."""
    hints = typing.get_type_hints(config)
    found = []
    for each in fields(config):
        if "help" in each.metadata:
            kind = hints[each.name]
            several = typing.get_origin(kind) is tuple
            kind = typing.get_args(kind)[0] if several else kind
            # `int` of `int | None`
            known = [one for one in typing.get_args(kind) or [kind] if one is not type(None)]
            found.append((each, each.metadata["kind"] or known[0], several))
    return found


def _problem(value: Any, each: dataclasses.Field, kind: Any) -> str | None:
    """Return why a value is not allowed and what to give, or None if it is allowed."""
    meta = each.metadata
    if value is None or value in (meta["words"] or {}).values():
        return None
    if meta["choices"] is not None:
        if value in meta["choices"]:
            return None
        return unknown(value, meta["choices"])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    most = _most(each, kind)
    outside = (
        (meta["least"] is not None and value < meta["least"])
        or (meta["above"] is not None and value <= meta["above"])
        or (most is not None and value > most)
    )
    return f"give {_limits(each, kind)}" if outside or not math.isfinite(value) else None


def _most(each: dataclasses.Field, kind: Any) -> float | None:
    most = each.metadata["most"]
    return MOST if most is None and kind is int else most


def _limits(each: dataclasses.Field, kind: Any) -> str:
    meta, most = each.metadata, _most(each, kind)
    bounds = [f" of at least {meta['least']:,}"] if meta["least"] is not None else []
    bounds += [f" above {meta['above']:g}"] if meta["above"] is not None else []
    bounds += [f" at most {most:,}"] if most is not None else []
    words = "".join(f", or {word}" for word in meta["words"] or {})
    return ("a whole number" if kind is int else "a finite number") + " and".join(bounds) + words


def _reader(each: dataclasses.Field, kind: Any, several: bool) -> Callable[[str], Any]:
    """Return a function from text to a value.

    For an option with several values, which spaces or commas separate, it returns a tuple.
    """
    meta = each.metadata

    def one(text: str) -> Any:
        if text in (meta["words"] or {}):
            return meta["words"][text]
        if kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{text!r}: give {_limits(each, kind)}") from None
        else:
            value = kind(text)
        if problem := _problem(value, each, kind):
            raise argparse.ArgumentTypeError(
                problem if meta["choices"] is not None else f"{text}: {problem}"
            )
        return value

    def many(text: str) -> tuple[Any, ...]:
        if text == "all" and meta["choices"] is not None:
            return tuple(meta["choices"])
        parts = [part.strip() for part in text.split(",") if part.strip()]
        # to leave an option out means all of them, so that an empty one would, without a word
        if not parts:
            raise argparse.ArgumentTypeError(
                f"{text!r} has no value: give at least one, or leave the option out"
            )
        return tuple(one(part) for part in parts)

    return many if several else one


def shown(value: Any, words: Values | None = None) -> str:
    """Return a value as it is written on the command line. The first of `words` means None."""
    if isinstance(value, tuple):
        return " ".join(shown(entry, words) for entry in value)
    if value is None:
        return next(iter(words or ["none"]))
    return f"{value:g}" if isinstance(value, float) else str(value)
