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
Table = tuple[str, list[Record], list[Column]]  # title, records and columns

# Files of a run's folder that its page links to: pattern → description.
FILES = {
    "records.json": "every number; `distlab show` and `distlab compare` read it",
    "records.csv": "the same as a table, for a spreadsheet or pandas",
    "metrics.jsonl": "the loss of every step",
    "trace_*": (
        "a timeline: open it at https://ui.perfetto.dev (Open trace file), or in chrome://tracing"
    ),
    "parts/*/report.html": "a part of this run",
}


def _as_they_are(records: Records) -> Records:
    """Return the records, with nothing derived from them."""
    return records


def _nothing_found(records: Records) -> Sequence[str]:
    """Return no findings."""
    return ()


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
    findings: Callable[[Records], Sequence[str]] = _nothing_found
    prediction: str = ""
    noise: str = ""
    parted_by: str | None = None
    terminal: Sequence[str] = ()
    result: Callable[[Records], str] | None = None
    name: str = ""
    question: str = ""

    def table(self, records: Records, style: str = "text", only: Sequence[str] = ()) -> str:
        """Render the table, or one table below the other if there are several.

        Args:
            records: rows.
            style: ``"text"`` or ``"markdown"``, as for `render`.
            only: ends of the keys of the columns to show, next to the name of the row. Of several
                tables, each shows those that it has. () for all columns.

        Raises:
            ValueError: no column has such a key.
        """
        tables = self.tables(records)
        if only:
            tables = _only(tables, only)
        texts = []
        for title, group, columns in tables:
            text = render(group, columns, style)
            if len(tables) > 1:
                text = _heading(title, style) + text
            texts.append(text)
        return "\n\n".join(texts)

    def tables(self, records: Records) -> list[Table]:
        """Return (title, records, columns) of each table.

        Records of several machines get a first column that names the machine.
        """
        columns = []
        for column in self.columns:
            # Optional columns appear with the first record that has a value.
            if not column.optional or not column.is_empty(records):
                columns.append(column)
        if len(by_machine(records)) > 1:
            columns.insert(0, text_column("environment.device_name", "machine"))
        if self.parted_by is None:
            return [("", list(records), columns)]
        part = Column(self.parted_by, "part")
        tables = []
        for title, group in grouped(records, part.text).items():
            # Columns without a value in this part would be empty.
            filled = [column for column in columns if not column.is_empty(group)]
            tables.append((title, group, filled))
        return tables

    def derived(self, records: Records) -> Records:
        """Return the records with their noise and what the view derives from several rows."""
        # Noise comes first, because ratios are derived from it.
        return self.derive(with_noise(records))

    def headline_of(self, records: Records) -> str:
        """Return the headlines of all machines, joined by semicolons."""
        # Each machine has its own headline, since a line about two machines would be wrong for
        # both.
        headlines = [self.headline(group) for group in by_machine(records).values()]
        return "; ".join(headlines)

    def findings_of(self, records: Records) -> list[str]:
        """Return the findings of all machines, one machine after the other."""
        found = []
        for group in by_machine(records).values():
            found += self.findings(group)
        return found


def _only(tables: Sequence[Table], names: Sequence[str]) -> list[Table]:
    """Return the tables with the columns of these names, and the one that names the row.

    Raises:
        ValueError: no column of any table has one of the names. The message lists those there are.
    """
    known = {}  # a dictionary, because it keeps the order of the columns for the message
    for _, _, columns in tables:
        for column in columns:
            known[column.name] = None
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no column {', '.join(unknown)}; there are {', '.join(known)}")
    found = []
    for title, group, columns in tables:
        shown = [column for column in columns if column.name in ("variant", *names)]
        found.append((title, group, shown))
    return found


def _heading(title: str, style: str) -> str:
    """Return the title of one of several tables, with what separates it from the table."""
    if style == "markdown":
        return f"**{for_markdown(title)}**\n\n"
    return f"{for_terminal(title)}:\n"


def headline_from(template: str, **more: Callable[[Records], Any]) -> Callable[[Records], str]:
    """Return a headline that fills `template` with the first record's environment and options.

    `more` adds values made from the records. `{num_parameters:M}` and `:B` are in millions and
    billions, `:N` in the unit that fits.

    Raises:
        ValueError: the headline names something that a record does not hold. The message says what
            it holds.
    """

    def headline(records: Records) -> str:
        # An option has precedence over a fact of the environment with the same name.
        known = {**records[0].environment, **records[0].config}
        for name, make in more.items():
            known[name] = make(records)
        try:
            return _Words().vformat(template, (), known)
        except KeyError as missing:
            raise ValueError(
                f"the headline of {records[0].experiment} names {missing}, which its records do "
                # The list helps to find the misspelt name in the template.
                f"not hold; they hold {', '.join(sorted(known))}"
            ) from None

    return headline


class _Words(string.Formatter):
    """Formatter of headlines, which also knows millions (`:M`), billions (`:B`) and either (`:N`).

    For example, `{:N}` of 1,500,000 is `1.5 M`.
    """

    def format_field(self, value: Any, spec: str) -> str:
        # A billion and more are shown in billions.
        if spec == "N":
            spec = "B" if value >= 1e9 else "M"
        if spec == "M":
            return f"{value / 1e6:,.1f} M"
        if spec == "B":
            return f"{value / 1e9:,.1f} B"
        return format(value, spec)


def write(view: View, records: Records, path: Path) -> Path:
    """Write everything that a run leaves into its folder. Call it on one rank.

    Args:
        view: view of the records.
        records: records as `View.derived` returns them.
        path: folder of the run, which exists.

    Returns:
        The path of `report.html`.

    Raises:
        ValueError: no records, or records of another experiment.
    """
    # Records of another experiment would be shown under the wrong columns.
    check_records(view, records)
    # The records are written first: a mistake in a picture must not lose a measurement.
    write_json(records, path / "records.json")
    write_csv(records, path / "records.csv")
    findings = view.findings_of(records)
    headline = for_markdown(view.headline_of(records))
    table = view.table(records, "markdown")
    below = "".join(f"\n{for_markdown(line)}\n" for line in findings)
    write_whole(path / "table.md", f"{headline}\n\n{table}\n{below}")
    pictures = _draw(view, records, path)  # before the links, which name only files that exist
    page = html.page(view, records, pictures, findings, _links(path))
    write_whole(path / "report.html", page)
    return path / "report.html"


def _links(path: Path) -> dict[str, list[str]]:
    """Return the links of a page: description → addresses of the files, relative to the page.

    Args:
        path: folder of the run. Files are in it and around it.
    """
    found: dict[str, list[Path]] = {}
    for pattern, description in FILES.items():
        found[description] = sorted(path.glob(pattern))
    # A fresh run of the same name has renamed the one before to NAME-old-1, NAME-old-2, …
    before = path.parent.glob(f"{glob.escape(path.name)}-old-*/report.html")
    # The time of change decides, because NAME-old-10 sorts before NAME-old-2 as text.
    newest = sorted(before, key=os.path.getmtime)[-1:]
    found["the run before this one, of the same name"] = newest
    # A part of a run is two folders deeper: OUT/EXPERIMENT/NAME/parts/PART.
    out = path.parents[3] if path.parent.name == "parts" else path.parents[1]
    found["all runs"] = [out / "index.html"]
    # A link without a file would lead nowhere.
    links = {}
    for description, files in found.items():
        if files:
            links[description] = [quote(os.path.relpath(file, path)) for file in files]
    return links


def check_records(view: View, records: Records) -> None:
    """Raise ValueError if there are no records, or some are not of the view's experiment."""
    if not records:
        raise ValueError(f"no records to show: {view.name} measured nothing")
    others = {record.experiment for record in records} - {view.name}
    if others:
        raise ValueError(
            f"records of {', '.join(sorted(others))} cannot be shown as {view.name}: give runs of "
            "one experiment"
        )


def _draw(view: View, records: Records, path: Path) -> dict[Path, str]:
    """Draw the view's pictures into a folder, once for each machine.

    Args:
        view: view of the records.
        records: rows.
        path: folder of the run.

    Returns:
        File → caption, of these pictures and then of others that are in the folder.
    """
    machines = by_machine(records)
    captions = {}
    for number, (machine, group) in enumerate(machines.items(), 1):
        for name, draw in view.pictures.items():
            stem, ending = Path(name).stem, Path(name).suffix
            caption = stem.replace("_", " ")
            target = path / name
            # The first machine's picture keeps the plain name, to which documents link.
            if number > 1:
                target = path / f"{stem}-{number}{ending}"
            if len(machines) > 1:
                caption = f"{caption}, {machine}"
            draw(group, target)
            if target.exists():  # a picture without data is not drawn
                captions[target] = caption
    # Other pictures in the folder were drawn by the run itself.
    for other in sorted(path.glob("*.png")):
        if other not in captions:
            captions[other] = other.stem.replace("_", " ")
    return captions
