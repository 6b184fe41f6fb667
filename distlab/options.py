"""Options of a command as fields of a frozen dataclass: type, default, limits and help together.

    @dataclass(frozen=True)
    class LatencyConfig(Options):
        batch: int = option(4, "sequences per rank", minimum=1)
        dtype: str = option("fp32", "dtype of the computation", choices=("fp32", "bf16"))
        sizes_mb: tuple[float | None, ...] = option(
            (1.0, None), "MiB per bucket", above=0, words={"none": None}
        )

`add_options(parser, LatencyConfig)` makes `--batch`, `--dtype` and `--sizes-mb` of it for argparse,
and `config_from(LatencyConfig, args)` makes the dataclass of what was given. Limits are checked
when the dataclass is made, so they also hold for callers from Python.

It is not a command-line library: docs/decisions/options.md says why none of them replaces it. This
file imports no torch, so that commands which compute nothing start at once.
"""

import argparse
import difflib
import math
import re
import shutil
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

Values = Mapping[str, Any]  # field, word or limit → value
# Limit of whole numbers without a limit of their own. A larger number of steps, ranks or bytes is
# a typing error.
LARGEST = 10**12
SEED = {"minimum": 0, "maximum": 2**63 - 1}  # limits of a seed that every generator takes


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] | None = None,
    words: Values | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    positional: bool = False,
    kind: type | None = None,
    needs: str | None = None,
) -> Any:
    """Declare a field of `Options` that is an option of the command.

    Args:
        default: value of the field. Tuples become options that take several values, bools become
            `--x / --no-x`.
        help: text for `--help`, which adds the default.
        minimum, above, maximum: limits of a number, or of each number of a tuple. `above` itself is
            not allowed, and whole numbers end at `LARGEST`.
        choices: allowed values, for a tuple those of each entry. `all` then means all of them.
        words: text → value that it means, such as `{"none": None}`.
        flag: name of the option if it is not the field's, such as `--bucket-size-mb`.
        metavar: name of the value in `--help`.
        positional: True for an argument without a flag.
        kind: type to read the text as, if the field's type cannot say it.
        needs: field of the option without which this one has no effect. It is then refused.
    """
    declaration = Declaration(
        help=help,
        minimum=minimum,
        above=above,
        maximum=maximum,
        choices=choices,
        words=words or {},
        flag=flag,
        metavar=metavar,
        positional=positional,
        kind=kind,
        needs=needs,
    )
    # The declaration travels with the field, so a subclass inherits it.
    return field(default=default, metadata={"option": declaration})


@dataclass(frozen=True)
class Declaration:
    """Arguments of one call of `option`, except its default."""

    help: str
    minimum: float | None
    above: float | None
    maximum: float | None
    choices: Sequence[Any] | None
    words: Values
    flag: str | None
    metavar: str | None
    positional: bool
    kind: type | None
    needs: str | None


@dataclass(frozen=True)
class DeclaredOption:
    """An option as its dataclass declares it.

    Attributes:
        name: name of the field.
        default: value of the field, or `MISSING`.
        kind: type of one value.
        takes_several: True if the field is a tuple.
        declaration: arguments of `option`.
    """

    name: str
    default: Any
    kind: type
    takes_several: bool
    declaration: Declaration

    @property
    def flag(self) -> str:
        """Name on the command line, such as `--bucket-size-mb`."""
        return self.declaration.flag or f"--{self.name.replace('_', '-')}"

    @property
    def maximum(self) -> float | None:
        """Largest number that is allowed, or None."""
        # Only whole numbers have this default limit: a float may be large on purpose, such as
        # tokens.
        if self.declaration.maximum is None and self.kind is int:
            return LARGEST
        return self.declaration.maximum

    def problem(self, value: Any) -> str | None:
        """Return why one value is not allowed and what to give, or None if it is allowed."""
        declared = self.declaration
        # A word stands for a value outside of the limits, such as None.
        if value is None or value in declared.words.values():
            return None
        if declared.choices is not None:
            return None if value in declared.choices else unknown(value, declared.choices)
        # bool is an int to Python, and has no limits.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        allowed = (
            math.isfinite(value)
            and (declared.minimum is None or value >= declared.minimum)
            and (declared.above is None or value > declared.above)
            and (self.maximum is None or value <= self.maximum)
        )
        return None if allowed else f"give {self.limits()}"

    def limits(self) -> str:
        """Return in words which numbers are allowed."""
        bounds = []
        if self.declaration.minimum is not None:
            bounds.append(f" of at least {self.declaration.minimum:,}")
        if self.declaration.above is not None:
            bounds.append(f" above {self.declaration.above:g}")
        if self.maximum is not None:
            bounds.append(f" at most {self.maximum:,}")
        number = "a whole number" if self.kind is int else "a finite number"
        words = "".join(f", or {word}" for word in self.declaration.words)
        return number + " and".join(bounds) + words

    def read(self, text: str) -> Any:
        """Return the value that a text on the command line means.

        Raises:
            argparse.ArgumentTypeError: a text that means no allowed value.
        """
        if text in self.declaration.words:
            return self.declaration.words[text]
        try:
            value = self.kind(text)
        except ValueError:
            # A type of its own raises an error with its own text, which argparse shows.
            if self.kind not in (int, float):
                raise
            raise argparse.ArgumentTypeError(f"{text!r}: give {self.limits()}") from None
        problem = self.problem(value)
        if problem is None:
            return value
        if self.declaration.choices is not None:
            raise argparse.ArgumentTypeError(problem)
        raise argparse.ArgumentTypeError(f"{text}: {problem}")

    def read_several(self, text: str) -> tuple[Any, ...]:
        """Return the values of a text in which commas may separate them. Raises as `read`."""
        # The word `all` needs a list of choices that it can stand for.
        if text == "all" and self.declaration.choices is not None:
            return tuple(self.declaration.choices)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        # An option that is left out means all values. An empty one must not mean that silently.
        if not parts:
            raise argparse.ArgumentTypeError(
                f"{text!r} has no value: give at least one, or leave the option out"
            )
        return tuple(self.read(part) for part in parts)

    def help(self, default: Any) -> str:
        """Return the help text with the default in brackets."""
        choices = self.declaration.choices
        # A default of None is described in the help text itself, in brackets.
        if default is None or default == () or default is MISSING or self.kind is bool:
            return self.declaration.help
        if choices is not None and default == tuple(choices):
            return f"{self.declaration.help} [all]"
        return f"{self.declaration.help} [{shown(default, self.declaration.words)}]"


def declared_options(config: type["Options"]) -> list[DeclaredOption]:
    """Return the options that a dataclass and its base classes declare, in their order."""
    types = typing.get_type_hints(config)
    found = []
    for each in fields(config):
        if "option" not in each.metadata:
            continue
        declaration: Declaration = each.metadata["option"]
        kind = types[each.name]
        # A tuple of one type is an option with several values.
        takes_several = typing.get_origin(kind) is tuple
        if takes_several:
            kind = typing.get_args(kind)[0]
        if typing.get_args(kind):  # int of `int | None`
            kind = next(one for one in typing.get_args(kind) if one is not type(None))
        found.append(
            DeclaredOption(
                each.name, each.default, declaration.kind or kind, takes_several, declaration
            )
        )
    return found


@dataclass(frozen=True)
class Options:
    """Base of configurations: checks every field that is an `option` when one is made.

    Raises:
        ValueError: a value that is not allowed. The message names the field, and says what is
            allowed and what to give.
    """

    @classmethod
    def of(cls, known: Values) -> typing.Self:
        """Return the options that a record's configuration holds. Its lists become tuples."""
        found = {}
        for each in fields(cls):
            if each.name in known:
                value = known[each.name]
                found[each.name] = tuple(value) if isinstance(value, list) else value
        return cls(**found)

    @classmethod
    def check_given(cls, given: Values) -> None:
        """Raise ValueError for options that must not be given together.

        Defaults and presets do not count.
        """

    def check_effect(self, given: Values) -> None:
        """Raise ValueError for a given option that has no effect beside the others.

        Those of a preset count here: `self` is the whole configuration.
        """
        options = {option.name: option for option in declared_options(type(self))}
        for name in given:
            option = options[name]
            if option.declaration.needs is None or getattr(self, option.declaration.needs):
                continue
            needed = options[option.declaration.needs]
            raise ValueError(
                f"{option.flag} has no effect without {needed.flag}: add that, or leave "
                f"{option.flag} out"
            )

    def __post_init__(self) -> None:
        for option in declared_options(type(self)):
            value = getattr(self, option.name)
            name = f"{option.name}={value!r}"
            if option.takes_several and not value and option.default:
                raise ValueError(f"{name}: give at least one")
            for entry in value if option.takes_several else (value,):
                problem = option.problem(entry)
                if problem is not None:
                    raise ValueError(f"{name}: {problem}")


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    config: type[Options],
    defaults: Values | None = None,
    names: Iterable[str] | None = None,
) -> None:
    """Add an argument for each option of `config`.

    An option that is not given on the command line is absent from the namespace.

    Args:
        defaults: field → value that takes the default's place, for the help.
        names: fields to add, all by default.
    """
    for option in declared_options(config):
        if names is None or option.name in names:
            default = (defaults or {}).get(option.name, option.default)
            _add_argument(parser, option, default)


def _add_argument(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    option: DeclaredOption,
    default: Any,
) -> None:
    keywords: dict[str, Any] = {
        # argparse formats help texts, so a percent sign must be doubled.
        "help": option.help(default).replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    if option.kind is bool:
        # --no-x exists only where x is the default, or where None lets the command decide.
        has_no = default is None or default
        keywords["action"] = argparse.BooleanOptionalAction if has_no else "store_true"
    else:
        keywords["type"] = option.read_several if option.takes_several else option.read
        name = option.name if option.declaration.positional else option.flag.lstrip("-")
        keywords["metavar"] = option.declaration.metavar or name.replace("-", "_").upper()
    if not option.declaration.positional:
        if option.takes_several and option.kind is not bool:
            keywords["nargs"] = "+"
            # `--wrap a --wrap b` means both, as `--wrap a b` does.
            keywords["action"] = "extend"
        parser.add_argument(option.flag, dest=option.name, **keywords)
        return
    is_required = option.default is MISSING
    if option.takes_several:
        keywords["nargs"] = "+" if is_required else "*"
    else:
        keywords["nargs"] = None if is_required else "?"
    parser.add_argument(option.name, **keywords)


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, with a suggestion for a misspelt word."""

    def error(self, message: str) -> typing.NoReturn:
        """End the command with the line, and without the usage: `--help` says more."""
        known = list(self._option_string_actions)
        for action in self._actions:
            known += action.choices or ()
        # argparse puts the wrong word into its message, in one of two forms.
        typed = re.search(r"(?:choice: '|arguments: )([^\s'=]+)", message)
        hint = did_you_mean(typed[1], known) if typed else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")


def did_you_mean(word: Any, known: Iterable[Any]) -> str:
    """Return ` (did you mean …?)` with the name that resembles a word most, or nothing."""
    close = difflib.get_close_matches(str(word), map(str, known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown(word: Any, known: Iterable[Any]) -> str:
    """Say that a name is unknown, what it may have meant, and what is allowed."""
    return f"{word!r} is unknown{did_you_mean(word, known)}; allowed: {', '.join(map(str, known))}"


def parser_of(
    name: str, doc: str | None, *configs: type[Options], add_help: bool = True
) -> argparse.ArgumentParser:
    """Return the parser of a command. Its help is the module's docstring and the options."""
    width = min(120, shutil.get_terminal_size().columns)
    prose = r"(?m)(^[^\s-].*\n?)+"  # paragraphs; indented lines and lists stay as they are
    text = re.sub(prose, lambda found: textwrap.fill(found[0], width) + "\n", doc or "")
    parser = Parser(
        name,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=add_help,
    )
    for config in configs:
        add_options(parser, config)
    return parser


def given(config: type[Options], args: argparse.Namespace) -> dict[str, Any]:
    """Return field → value of the options that were given on the command line."""
    found = {}
    for option in declared_options(config):
        if not hasattr(args, option.name):
            continue
        value = getattr(args, option.name)
        if option.takes_several:  # a tuple for each word, because words may hold commas
            value = tuple(entry for part in value for entry in part)
        found[option.name] = value
    return found


def config_from(
    config: type[Options], args: argparse.Namespace, preset: Values | None = None
) -> Any:
    """Return the configuration: given options, over a preset, over the fields' defaults.

    Raises:
        ValueError: as in `Options`, and for an option that has no effect, see `check_effect`.
    """
    asked = given(config, args)
    made = config(**{**(preset or {}), **asked})
    made.check_effect(asked)
    return made


def shown(value: Any, words: Values | None = None) -> str:
    """Return a value as it is written on the command line. The first of `words` means None."""
    if isinstance(value, tuple):
        return " ".join(shown(entry, words) for entry in value)
    if value is None:
        return next(iter(words or ["none"]))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
