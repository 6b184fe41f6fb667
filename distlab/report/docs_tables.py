"""Tables, pictures and code of Markdown pages, made from committed records and from the source.

A page holds pairs of markers, and the text between them is generated. For a picture, the file that
it names is drawn:

    <!-- table records/ddp_bench/cpu-tiny.json -->
    …
    <!-- end table -->

    <!-- code distlab/parallel/naive.py NaiveDDP._synchronize -->
    …
    <!-- end code -->

    <!-- picture records/ddp_bench/cpu-tiny.json#local,naive step_time.png -->
    ![A step of each](docs/images/step_time_cpu.png)
"""

import ast
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from distlab.report.record import Record, read_json
from distlab.report.view import View
from distlab.text import for_markdown

# The file, variants, what was varied and its values, and columns.
SOURCE = re.compile(r"([^#?@]+)(?:#([^?@]*))?(?:\?([^@=]*)=([^@]*))?(?:@(.*))?")


def redraw_pages(
    pages: Sequence[Path], view_of: Callable[[str], View], root: Path, *, check: bool
) -> int:
    """Write the pages that are out of date. With `check` only name them and return 1 if any are.

    Args:
        view_of: function from an experiment's name to its view. It raises ValueError if there is
            none.
        root: folder from which paths in markers start.
    """
    stale = False
    for page in pages:
        old = page.read_text(encoding="utf-8")
        new = redrawn(old, view_of, root)
        if new != old:
            stale = True
            print(
                f"{page.relative_to(root)}: "
                f"{'out of date; run make tables' if check else 'redrawn'}"
            )
            if not check:
                page.write_text(new, encoding="utf-8")
        # Pictures cannot be compared bit by bit between versions of matplotlib, so no check draws
        # them.
        for source, name, target in [] if check else pictures_of(new):
            view, records = rows_of(source, view_of, root)
            view.pictures[name](records, page.parent / target)
    return int(check and stale)


def pictures_of(page: str) -> list[tuple[str, str, str]]:
    """Return (records, name in the view, path from the page) of each picture drawn from records."""
    return re.findall(r"<!-- picture (.+) (\S+) -->\n!\[[^\]]*\]\(([^)]+)\)", page)


def rows_of(source: str, view_of: Callable[[str], View], root: Path) -> tuple[View, list[Record]]:
    """Read the rows of a file of records, or those of some variants: `records/….json#naive,flat`.

    What the view derives from rows (ratios, noise) is derived anew, as `distlab show` does, and
    from all rows of the file: the chosen ones may lack what they are compared with. Variants with
    commas in their names are divided by semicolons: `#one by one;fused, ours`. Values of the varied
    options can be named after them: `#ours?size=64,4096`.

    Returns:
        The view of the experiment, and the rows.

    Raises:
        ValueError: records of uncommitted code, or a variant or a value that the file lacks. Also
            for an experiment without a view.
    """
    path, variants, key, values, _ = SOURCE.fullmatch(source).groups()
    records = read_json(root / path)
    view = view_of(records[0].experiment)
    records = view.derived(records)
    commits = dict.fromkeys(record.commit or "unknown" for record in records)
    dirty = [commit for commit in commits if commit.endswith("-dirty")]
    if dirty:
        raise ValueError(
            f"{path} is of code that was never committed ({', '.join(dirty)}), and a page shows "
            "records of a clean commit: commit, then measure it again with distlab records"
        )
    for chosen, what, of in (
        (variants, "variants", lambda record: record.variant),
        (values, f"values of {key}", lambda record: str(record.config.get(key))),
    ):
        if chosen:
            wanted = chosen.split(";" if ";" in chosen else ",")
            records = [record for record in records if of(record) in wanted]
            # A misspelt variant would otherwise vanish from the page silently.
            if {of(record) for record in records} != set(wanted):
                raise ValueError(f"{path}: not all of {chosen} are {what} there")
    return view, records


def table_of(source: str, view_of: Callable[[str], View], root: Path) -> str:
    """Return headline and table of a file of records, in Markdown.

    The rows are those of `rows_of`, with its errors. Columns may be named by the last part of their
    keys: `records/….json#naive,flat@comm_ms`.
    """
    path, *_, only = SOURCE.fullmatch(source).groups()
    view, records = rows_of(source, view_of, root)
    # Twelve digits name a commit uniquely, and fit into a line.
    commits = dict.fromkeys((record.commit or "unknown")[:12] for record in records)
    headline = for_markdown(view.headline_of(records))
    note = f"{headline} (commit{'s' * (len(commits) > 1)} {', '.join(commits)}, `{path}`)"
    return f"{note}\n\n{view.table(records, 'markdown', only.split(',') if only else ())}"


def code_of(source: str, root: Path) -> str:
    """Return the code of a name, such as `distlab/parallel/naive.py NaiveDDP._synchronize`.

    Raises:
        ValueError: the file does not define it.
    """
    path, name = source.split()
    return f"```python\n{definition(root / path, name)}\n```"


def embed(page: str, kind: str, made: Callable[[str], str]) -> str:
    """Return the page with `made(source)` between the markers of a kind, `table` or `code`.

    Raises:
        ValueError: a begin marker without its end.
    """
    marked = re.compile(rf"(<!-- {kind} (\S[^\n]*?) -->\n).*?(<!-- end {kind} -->)", re.DOTALL)
    # The number of begin markers shows one that the pattern did not match.
    if page.count(f"<!-- {kind} ") != len(marked.findall(page)):
        raise ValueError(f"a '<!-- {kind} … -->' marker has no '<!-- end {kind} -->' after it")
    return marked.sub(lambda match: f"{match[1]}\n{made(match[2])}\n\n{match[3]}", page)


def redrawn(page: str, view_of: Callable[[str], View], root: Path) -> str:
    """Redraw a page with its tables and code as records and source have them now."""
    page = embed(page, "table", partial(table_of, view_of=view_of, root=root))
    return embed(page, "code", partial(code_of, root=root))


def definition(path: Path, name: str) -> str:
    """Return the text of a function, method or class, without what it is indented by.

    Args:
        path: a Python file.
        name: such as `plan_buckets` or `NaiveDDP._synchronize`.

    Raises:
        ValueError: the file does not define it.
    """
    text = path.read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    # Each part of a dotted name is searched within the one before.
    for part in name.split("."):
        found = next((node for node in nodes if getattr(node, "name", None) == part), None)
        if found is None:
            raise ValueError(f"{path.name} defines no {name!r}")
        nodes = getattr(found, "body", [])
    # The decorators of a function are above its own first line.
    first = min(
        [found.lineno, *(decorator.lineno for decorator in getattr(found, "decorator_list", []))]
    )
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : found.end_lineno]))
