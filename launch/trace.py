"""Where does the time of a step go, and why? Explains traces of torch.profiler, of any program.

    distlab trace rank0.json.gz rank1.json.gz            one file per rank
    distlab trace traces/                                all files of a folder
    distlab trace trace.json --window 1200 1450          one step, in ms
    distlab trace new/*.json.gz --against old/*.json.gz  what changed

Steps are found by `ProfilerStep#` ranges, else where the sequence of kernels begins again. Ranks
are compared by matching collectives, so their clocks may differ. What the causes mean:
docs/learn/your_trace.md.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.options import Options, config_from, option, parser_of
from distlab.report import write
from distlab.report.terminal import highlighted, short_table
from distlab.runs import new_folder
from distlab.trace import Explanation, explain_traces
from distlab.trace.page import against, changed, changed_causes, page_view, records_of
from launch.kernel import Progress
from launch.runs import refresh_index

OF_A_RUN = ("records.json", "run.json")  # what else is JSON in the folder of a run
RANK = r"rank[-_ ]?\d+"  # part of a file's name


@dataclass(frozen=True)
class TraceOptions(Options):
    """Traces to explain."""

    files: tuple[str, ...] = option(
        (),
        "trace of one rank, .json or .json.gz, or a folder of them",
        positional=True,
        metavar="FILE",
    )
    against: tuple[str, ...] = option((), "traces of the run before, one per rank", metavar="FILE")
    window: tuple[float, ...] = option(
        (), "begin and end of the only step, in ms after the first event", metavar="MS"
    )
    communication: str = option(
        "", "regular expression for further kernels that communicate", metavar="PATTERN"
    )
    out: str = option("outputs", "folder of all results")
    json: bool = option(False, "print only JSON, and write no page")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `distlab trace`."""
    return parser_of("distlab trace", __doc__, TraceOptions)


def main(arguments: Sequence[str]) -> int:
    """Run `distlab trace`. Return the exit code."""
    options = config_from(TraceOptions, parser().parse_args(arguments))
    if not options.files:
        raise ValueError("give the trace of each rank, a file that torch.profiler wrote")
    if options.window and (len(options.window) != 2 or options.window[0] >= options.window[1]):
        raise ValueError("--window: give its begin and its end in ms, such as --window 1200 1450")
    progress = Progress(is_quiet=options.json)

    # Both are looked up before the first is read, which takes minutes for large traces.
    new_files, old_files = files_of(options.files), files_of(options.against)

    def explained(files: Sequence[str]) -> Explanation:
        return explain_traces(
            files,
            window=options.window or None,
            communication=[options.communication] if options.communication else [],
            progress=progress,
        )

    try:
        new = explained(new_files)
        old = explained(old_files) if old_files else None
    # An error must not be appended to a line of progress.
    finally:
        progress.close()
    if options.json:
        print(json.dumps(to_dict(new, old)))
        return 0
    print(f"{new}\n")
    if old is not None:
        rows, view = against(old, new)
        # The account above has means, which one long step raises.
        print("What changed in the median step (above: means over the steps):\n")
        print(f"{short_table(view, rows)}\n")
        for line in changed(old, new):
            print(highlighted(line))
    records = records_of(new, old)
    with new_folder(options.out, "trace") as folder:
        page = write(page_view(new, old), records, folder)
    refresh_index(options.out)
    print(f"report: {page}")
    return 0


def files_of(paths: Sequence[str]) -> list[str]:
    """Return the traces that are named: files, and for a folder all traces in it by name.

    Raises:
        ValueError: a folder has no trace, or those of several runs, or there is no such file.
    """
    found = []
    for path in paths:
        if not Path(path).exists():
            raise ValueError(f"{path}: no such file")
        if not Path(path).is_dir():
            found.append(path)
            continue
        inside = [str(file) for file in sorted(Path(path).iterdir()) if is_trace(file)]
        if not inside:
            raise ValueError(f"{path} has no .json or .json.gz file: give a folder of traces")
        # A benchmark puts the traces of all its strategies into one folder.
        ranks = [
            match[0] for match in (re.search(RANK, Path(file).name) for file in inside) if match
        ]
        if len(set(ranks)) < len(ranks):
            runs = dict.fromkeys(re.sub(RANK, "rank*", file) for file in inside)
            raise ValueError(
                f"{path} has the traces of several runs: give the files of one, {' or '.join(runs)}"
            )
        found += inside
    return found


def is_trace(file: Path) -> bool:
    """Return whether a file has the name of a trace. A run's folder has other files as well."""
    return file.name.endswith((".json", ".json.gz")) and file.name not in OF_A_RUN


def to_dict(new: Explanation, old: Explanation | None) -> dict:
    """Return everything as plain values, with what changed if there is an older run."""
    found = new.to_dict()
    if old is not None:
        rows, _ = against(old, new)
        parts = {row.variant: dict(row.metrics) for row in rows}
        found["against"] = {"parts": parts, "causes": changed_causes(old, new)}
    return found
