"""``Record``: the result of one variant of one experiment.

Every table, plot and README row is drawn from records.

A metric's name carries its unit (``step_p50_ms``, ``peak_alloc_bytes``, ``algbw_gb_per_s``). A
metric that was not measured is None, never a default; a metric that came out as NaN stays NaN,
because that is a result. Text such as ``"OOM"`` is allowed where a number could not be had for a
reason worth showing.
"""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from distlab.files import digest_of, write_whole

FORMAT = "distlab-run-3"
# Neither has a checksum. The first repeats environment and commit in every row.
OLD_FORMATS = ("distlab-records-1", "distlab-run-2")
MEASURE_AGAIN = "measure again (--fresh, or another --name)"
# Fields that are usually the same in all rows of a file. Each set of their values is written once.
SHARED = ("experiment", "environment", "commit")

# "Exposed" was once what a step takes longer than without communication. Metric of then → of now,
# in this order.
RENAMED = (
    (re.compile(r"^uncovered_comm_ms$"), "exposed_ms"),
    (re.compile(r"^exposed_uncovered_ms$"), "overhead_exposed_ms"),
    (re.compile(r"exposed_comm_ms$"), "overhead_ms"),
    (re.compile(r"^peak_bytes$"), "peak_alloc_bytes"),
    (
        re.compile(r"^exposed_(?=slowdown|copies|optimizer|idle|unexplained|closes|vs_)"),
        "overhead_",
    ),
)

# Experiment of then → of now.
MERGED = {"allreduce_sweep": "collectives"}

# JSON has no NaN and no infinity; strings keep the file valid for every reader and come back as
# floats here.
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# The errors that odd values of a record cause where they are used: absent ones, words for numbers,
# zeros, huge numbers.
ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

Metrics = dict[str, Any]  # name with unit → number, None (not measured) or text (`"OOM"`)


@dataclass(frozen=True)
class Record:
    """The result of one variant.

    Attributes:
        experiment: name of the experiment, such as ``"ddp_bench"``.
        variant: name of the row, such as ``"bucketed"``.
        config: name → value of everything needed to run it again.
        metrics: name → measured value, see `Metrics`.
        environment: packages and devices, see `environment`.
        commit: commit of the code, see `commit`.
    """

    experiment: str
    variant: str
    config: dict[str, Any]
    metrics: Metrics
    environment: dict[str, Any]
    commit: str | None

    def with_metrics(self, metrics: Metrics) -> "Record":
        """Return a record with these metrics in addition to, or in place of, its own."""
        return dataclasses.replace(self, metrics={**self.metrics, **metrics})


Records = Sequence[Record]


def from_fields(cls: type, data: Any, source: Any = "file") -> Any:
    """Make a dataclass of plain fields.

    Raises ValueError if fields are missing, unknown or of the wrong kind.
    """
    kinds = typing.get_type_hints(cls)
    if not isinstance(data, Mapping) or set(data) != set(kinds):
        raise ValueError(
            f"{source}: a {cls.__name__.lower()} has the fields {sorted(kinds)}, got "
            f"{str(data)[:80]}"
        )
    for name, kind in kinds.items():
        # isinstance takes a union as it is, and of `dict[str, Any]` only `dict`.
        if not isinstance(
            data[name], kind if isinstance(kind, UnionType) else typing.get_origin(kind) or kind
        ):
            raise ValueError(
                f"{source}: field {name!r} must be {kind}, got {type(data[name]).__name__}"
            )
    return cls(**data)


def write_json(records: Iterable[Record], path: Path) -> None:
    """Write records to ``path`` atomically: a file that exists is whole."""
    headers = []  # what rows share
    rows = []
    for record in records:
        row = plain(record, "record")
        # Environment and commit are long and mostly equal, so rows refer to them by number.
        header = {name: row.pop(name) for name in SHARED}
        if header not in headers:
            headers.append(header)
        rows.append({"header": headers.index(header)} | row)
    write_checked(path, {"format": FORMAT, "headers": headers, "records": rows})


def write_checked(path: Path, body: dict[str, Any]) -> None:
    """Write a JSON object, with its checksum, whole or not at all."""
    # NaN is written as a string, so the checksum is of what the file holds.
    body = _leaves(body, _encoded)
    write_whole(
        path, json.dumps(body | {"digest": digest_of(body)}, indent=1, allow_nan=False) + "\n"
    )


def read_checked(path: str | Path) -> dict[str, Any]:
    """Read what `write_checked` wrote, or an object of one of the formats that had no checksum.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated, altered or another program's; the message names the path.
    """
    # Reading would wait for a pipe, and would never end with /dev/zero.
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is not a regular file: give a file of records")
    try:
        text = Path(path).read_text(encoding="utf-8")
        body = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair, which no file of results can hold
            json.dumps(body, ensure_ascii=False).encode()
        body = body if isinstance(body, dict) else {}
        # Old formats have no checksum, so the file's own digest is accepted.
        accepted = digest_of(body) if body.get("format") in OLD_FORMATS else None
        digest = digest_of(body)
        plain_values = _leaves(body, lambda leaf: _SPECIAL.get(leaf, leaf))
    except (ValueError, RecursionError) as error:
        # Broken JSON, broken UTF-8 and deep nesting raise these.
        raise ValueError(f"{path} is truncated or not JSON ({error}): {MEASURE_AGAIN}") from None
    # The digest is removed from the values before the comparison, because it is not a part of them.
    if plain_values.pop("digest", accepted) != digest:
        raise ValueError(
            f"{path} was altered, or written by another version or program: {MEASURE_AGAIN}"
        )
    return plain_values


def read_json(path: str | Path) -> list[Record]:
    """Read what `write_json` wrote.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated, or was not written by distlab; the message names the path.
    """
    body = read_checked(path)
    if body.get("format") not in (FORMAT, *OLD_FORMATS) or not isinstance(
        body.get("records"), list
    ):
        raise ValueError(
            f"{path} does not hold distlab records: expected an object with format {FORMAT!r}"
        )
    try:
        rows = body["records"]
        # The oldest format repeats the header in every row.
        if body["format"] != OLD_FORMATS[0]:
            rows = [body["headers"][row.pop("header")] | row for row in rows]
        return [_as_now(from_fields(Record, row)) for row in rows]
    except ODD as error:
        raise ValueError(
            f"{path} holds a record that cannot be read: {type(error).__name__}: {error}"
        ) from None


def _as_now(record: Record) -> Record:
    """Return a record with the present names of experiments and metrics."""
    experiment = record.experiment
    metrics = {_present_name(name): value for name, value in record.metrics.items()}
    return dataclasses.replace(
        record, experiment=MERGED.get(experiment, experiment), metrics=metrics
    )


def _present_name(name: str) -> str:
    """Return the present name of a metric, by the first entry of `RENAMED` that fits."""
    for old, new in RENAMED:
        if old.search(name):
            return old.sub(new, name)
    return name


@contextlib.contextmanager
def reading(sources: Sequence[str | Path]) -> Iterator[None]:
    """Report an error in the block, which uses records of these files, as an error of the files.

    Raises:
        ValueError: one of `ODD` was raised. The message names the files.
    """
    try:
        yield
    except ODD as error:
        names = [str(source) for source in sources]
        if isinstance(error, ValueError):
            # An error that names a file already is clear enough.
            if any(name in str(error) for name in names):
                raise
            raise ValueError(f"{', '.join(names)}: {error}") from error
        raise ValueError(
            f"{', '.join(names)}: a record lacks what is needed of it ({type(error).__name__}: "
            f"{error}); it was written by another version, or changed by hand"
        ) from error


def write_csv(records: Records, path: Path) -> None:
    """Write one row per record, atomically.

    The columns are experiment, variant, commit, then ``config.*`` and ``metrics.*``.

    Columns are the union over all records in order of first appearance; None and absent values are
    empty, NaN is ``nan``. Nested dictionaries become dotted columns, lists become JSON.
    """
    rows = []
    for record in records:
        fields = plain(record, "record")
        del fields["environment"]
        rows.append(
            dict(entry for name, value in fields.items() for entry in _flattened(name, value))
        )
    columns = dict.fromkeys(name for row in rows for name in row)
    # A stable sort by block: a config entry that only the second record has still stands before all
    # metrics.
    columns = sorted(
        columns, key=lambda name: {"config": 1, "metrics": 2}.get(name.split(".")[0], 0)
    )
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def json_line(
    experiment: str,
    records: Iterable[Record],
    out: str | Path,
    findings: Iterable[str] = (),
) -> str:
    """Return the compact last line of a measuring command.

    It is valid JSON whatever was measured (NaN, inf → null).

    ``{"experiment": …, "records": [{"variant": …, "metrics": {…}}, …], "findings": [sentence, …],
    "out": …}``; ``out`` is the results' folder. Curves (lists) are in its `records.json` only.
    """
    rows = [
        {
            "variant": record.variant,
            "metrics": {k: v for k, v in plain(record.metrics).items() if not isinstance(v, list)},
        }
        for record in records
    ]
    body = {
        "experiment": experiment,
        "records": rows,
        "findings": list(findings),
        "out": str(out),
    }
    return json.dumps(
        _leaves(body, lambda leaf: None if _is_special(leaf) else leaf), separators=(",", ":")
    )


def plain(value: Any, where: str = "value") -> Any:
    """Convert ``value`` to JSON's types, except that NaN and infinities stay floats."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        # Subclasses, such as numpy's floats, become Python's own types.
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device | os.PathLike):
        return str(value)
    # Fields are read one by one, because `asdict` would copy tensors.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy scalars, 0-d tensors
        return plain(value.item(), where)
    # A value that JSON cannot hold must fail when it is written, and not when it is read.
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a record cannot hold: store numbers or text"
    )


def _leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Dictionaries and lists as they are, with every other value changed."""
    if isinstance(value, dict):
        return {key: _leaves(item, change) for key, item in value.items()}
    return [_leaves(item, change) for item in value] if isinstance(value, list) else change(value)


def _is_special(leaf: Any) -> bool:
    return isinstance(leaf, float) and not math.isfinite(leaf)


def _encoded(leaf: Any) -> Any:
    # Python's writer calls them as `_SPECIAL` does
    return json.dumps(leaf) if _is_special(leaf) else leaf


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every entry."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flattened(f"{name}.{key}", item)
    else:
        # A cell of CSV holds one text, so a list is written as JSON.
        yield name, json.dumps(_leaves(value, _encoded)) if isinstance(value, list) else value
