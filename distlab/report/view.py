"""The view of an experiment's records: everything that a run writes, declared in one place.

An experiment declares its `View` once; `write` makes of records and view the whole folder of a run:

    records.json  records.csv  table.md  report.html  and the pictures
"""

import glob
import os
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distlab.files import write_whole
from distlab.report import page as html
from distlab.report.derived import with_noise
from distlab.report.record import Record, Records, write_csv, write_json
from distlab.report.table import Column, by_machine, grouped, render, text_column
from distlab.text import for_markdown, for_terminal

Draw = Callable[[Records, Path], None]


def _as_they_are(records: Records) -> Records:
    """Derive nothing."""
    return records


@dataclass(frozen=True)
class View:
    """Description of an experiment's results for a reader.

    Args:
        columns: columns of the table.
        derive: function from records to the same records with metrics that need several rows, such
            as ratios.
        headline: function from records to a line about what they were measured on.
        result: function from records to a result of a few words, for the list of runs. None for the
            best row.
        reading: text about reading table and pictures. An empty line separates paragraphs.
        pictures: file name → function that draws it from records to a path. One without data to
            draw writes no file. Pictures that only the run itself can draw are already in the
            folder, and are also shown.
        findings: function from records to at most five sentences that follow from them. One that
            begins with `WRONG:` is red on a terminal, one in parentheses grey.
        prediction: text about how predictions are made, or why there are none.
        noise: text about the noise, in addition to what the records say of it.
        parted_by: key of a column, such as `config.part`, for a table of each of its values,
            without the columns in which that part has nothing. None for one table.
        terminal: columns of the short table in a terminal, by the last part of their keys. () for
            all that fit.
        name: name in the records. An `Experiment` fills in its own.
        question: question to answer. An `Experiment` fills in the first line of its module's
            docstring.
    """

    columns: Sequence[Column]
    headline: Callable[[Records], str]
    reading: str
    derive: Callable[[Records], Records] = _as_they_are
    pictures: Mapping[str, Draw] = field(default_factory=dict)
    findings: Callable[[Records], Sequence[str]] = lambda records: ()
    prediction: str = ""
    noise: str = ""
    parted_by: str | None = None
    terminal: Sequence[str] = ()
    result: Callable[[Records], str] | None = None
    name: str = ""
    question: str = ""

    def table(self, records: Records, style: str = "text", only: Sequence[str] = ()) -> str:
        """Render the table, or tables, in one of `render`'s styles.

        `only` names columns by the end of their keys. Several tables show those that they have.

        Raises:
            ValueError: no column has such a key.
        """
        tables = self.tables(records)
        if only:
            known = dict.fromkeys(column.name for _, _, columns in tables for column in columns)
            unknown = [name for name in only if name not in known]
            if unknown:
                raise ValueError(f"no column {', '.join(unknown)}; there are {', '.join(known)}")
            tables = [
                (part, group, [c for c in columns if c.name in ("variant", *only)])
                for part, group, columns in tables
            ]
        titles = {
            part: f"**{for_markdown(part)}**\n\n"
            if style == "markdown"
            else f"{for_terminal(part)}:\n"
            for part, _, _ in tables
        }
        return "\n\n".join(
            (titles[part] if len(tables) > 1 else "") + render(group, columns, style)
            for part, group, columns in tables
        )

    def tables(self, records: Records) -> list[tuple[str, list[Record], list[Column]]]:
        """Return (title, records, columns) of each table.

        A column tells several machines apart.
        """
        columns = [c for c in self.columns if not c.optional or not c.is_empty(records)]
        if len(by_machine(records)) > 1:
            columns.insert(0, text_column("environment.device_name", "machine"))
        if self.parted_by is None:
            return [("", list(records), columns)]
        part = Column(self.parted_by, "part")
        return [
            (name, group, [c for c in columns if not c.is_empty(group)])
            for name, group in grouped(records, part.text).items()
        ]

    def derived(self, records: Records) -> Records:
        """Return the records with their noise and what the view derives from several rows."""
        return self.derive(with_noise(records))

    def headline_of(self, records: Records) -> str:
        """Return the headline of each machine's records."""
        return "; ".join(self.headline(group) for group in by_machine(records).values())

    def findings_of(self, records: Records) -> list[str]:
        """Return what was found on each machine."""
        return [line for group in by_machine(records).values() for line in self.findings(group)]


def headline_from(template: str, **more: Callable[[Records], Any]) -> Callable[[Records], str]:
    """Return a headline that fills `template` with the first record's environment and options.

    `more` adds values made from the records. `{num_parameters:M}` and `:B` are in millions and
    billions, `:N` in the unit that fits.

    Raises:
        ValueError: the headline names something that a record does not hold. The message says what
            it holds.
    """

    def headline(records: Records) -> str:
        known = {**records[0].environment, **records[0].config}
        for name, make in more.items():
            known[name] = make(records)
        try:
            return _Words().vformat(template, (), known)
        except KeyError as missing:
            raise ValueError(
                f"the headline of {records[0].experiment} names {missing}, which its records do "
                f"not hold; they hold {', '.join(sorted(known))}"
            ) from None

    return headline


class _Words(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        spec = ("B" if value >= 1e9 else "M") if spec == "N" else spec
        unit = {"M": 1e6, "B": 1e9}.get(spec)
        return format(value, spec) if unit is None else f"{value / unit:,.1f} {spec}"


def write(view: View, records: Records, path: Path) -> Path:
    """Write everything that a run leaves into its folder. Call it on one rank.

    Args:
        records: records as `View.derived` returns them.

    Returns:
        The path of `report.html`.

    Raises:
        ValueError: no records, or records of another experiment.
    """
    check_records(view, records)
    write_json(records, path / "records.json")
    write_csv(records, path / "records.csv")
    findings = view.findings_of(records)
    below = "".join(f"\n{for_markdown(line)}\n" for line in findings)
    headline = for_markdown(view.headline_of(records))
    write_whole(path / "table.md", f"{headline}\n\n{view.table(records, 'markdown')}\n{below}")
    page = html.page(view, records, _draw(view, records, path), findings, _links(path))
    write_whole(path / "report.html", page)
    return path / "report.html"


FILES = {
    "records.json": "every number; `distlab show` and `distlab compare` read it",
    "records.csv": "the same as a table, for a spreadsheet or pandas",
    "metrics.jsonl": "the loss of every step",
    "trace_*": (
        "a timeline: open it at https://ui.perfetto.dev (Open trace file), or in chrome://tracing"
    ),
    "parts/*/report.html": "a part of this run",
}


def _links(path: Path) -> dict[str, list[str]]:
    """Return description → addresses from its page of files in and around a run's folder."""
    found = {text: sorted(path.glob(pattern)) for pattern, text in FILES.items()}
    before = path.parent.glob(f"{glob.escape(path.name)}-old-*/report.html")
    found["the run before this one, of the same name"] = sorted(before, key=os.path.getmtime)[-1:]
    found["all runs"] = [path.parents[3 if path.parent.name == "parts" else 1] / "index.html"]
    return {
        text: [quote(os.path.relpath(file, path)) for file in files]
        for text, files in found.items()
        if files
    }


def check_records(view: View, records: Records) -> None:
    """Raise ValueError if these are not records of the view's experiment, or none at all."""
    if not records:
        raise ValueError(f"no records to show: {view.name} measured nothing")
    others = {record.experiment for record in records} - {view.name}
    if others:
        raise ValueError(
            f"records of {', '.join(sorted(others))} cannot be shown as {view.name}: give runs of "
            "one experiment"
        )


def _draw(view: View, records: Records, path: Path) -> dict[Path, str]:
    """Draw the view's pictures, once for each machine.

    Returns file → caption of these and of other pictures in the folder.
    """
    machines = by_machine(records)
    captions = {}
    for number, (machine, group) in enumerate(machines.items(), 1):
        for name, draw in view.pictures.items():
            target = path / (
                name if number == 1 else f"{Path(name).stem}-{number}{Path(name).suffix}"
            )
            draw(group, target)
            if target.exists():
                of_machine = f", {machine}" if len(machines) > 1 else ""
                captions[target] = Path(name).stem.replace("_", " ") + of_machine
    for other in sorted(path.glob("*.png")):
        captions.setdefault(other, other.stem.replace("_", " "))
    return captions
