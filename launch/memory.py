"""What holds your GPU's memory, why is more reserved than used, and what grows?

    distlab memory snapshot.pickle
    distlab memory snapshot.pickle --against before.pickle      # what changed
    distlab memory snapshot.pickle --json

The file is one of torch.cuda.memory._dump_snapshot, of any program. To record it, call
torch.cuda.memory._record_memory_history(stacks="python") before the steps, and
_dump_snapshot("snapshot.pickle") after them. The file is read without running anything that it may
contain.

Tables and a picture are in a page. docs/learn/your_memory.md explains them.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distlab.options import Options, config_from, option, parser_of
from distlab.report import write
from distlab.runs import new_folder
from distlab.snapshot import explain, read_snapshot
from distlab.snapshot.page import NAME, page_view, records_of
from distlab.snapshot.report import changes, difference
from distlab.text import for_terminal
from launch.runs import refresh_index


@dataclass(frozen=True)
class MemoryOptions(Options):
    """Snapshot to explain."""

    snapshot: str = option("", "file of torch.cuda.memory._dump_snapshot", positional=True)
    against: str | None = option(None, "an earlier snapshot, to see what changed")
    out: str = option("outputs", "folder of all results")
    json: bool = option(False, "print only the line of JSON, and write no page")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `distlab memory`."""
    return parser_of("distlab memory", __doc__, MemoryOptions)


def main(arguments: Sequence[str]) -> int:
    """Run `distlab memory`. Return the exit code."""
    options = config_from(MemoryOptions, parser().parse_args(arguments))
    if not options.snapshot:
        raise ValueError("give a file of torch.cuda.memory._dump_snapshot")
    # Large files are read for minutes, so both must be there before the first is read.
    for path in filter(None, (options.snapshot, options.against)):
        if not Path(path).exists():
            raise ValueError(f"{path}: no such file")
    found = explain(read_snapshot(options.snapshot))
    earlier = None
    if options.against is not None:
        earlier = explain(read_snapshot(options.against))
    if options.json:
        answer = found.to_dict()
        if earlier is not None:
            answer["changes"] = [asdict(change) for change in changes(earlier, found)]
        print(json.dumps(answer))
        return 0
    print(f"{found}\n")
    if earlier is not None:
        # Names in a snapshot are anyone's, and may hold what a terminal would obey.
        print(f"{for_terminal(difference(earlier, found))}\n")
    records = records_of(found, for_terminal(Path(options.snapshot).name), earlier)
    with new_folder(options.out, NAME) as folder:
        page = write(page_view(found), records, folder)
    refresh_index(options.out)
    print(f"report: {page}")
    return 0
