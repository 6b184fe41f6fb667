"""The command."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distlab.model.config import PRESETS
from distlab.report import (
    OutputFolder,
    View,
    add_from_option,
    progress,
    read_json,
    reading,
    redraw,
    run_to_end,
    say,
    write,
    write_json,
)
from distlab.report.options import whole

from . import __doc__ as QUESTION
from .comparison import COMPARISON, COMPARISON_VIEW, compare
from .prediction import NAME, ROOT, ROWS, VIEW, PredictConfig, run

QUICK = str(ROOT / "records" / "ddp_bench" / "h200x2_xl_batch8.json")


def _case(text: str) -> tuple[str, int]:
    size, _, batch = text.partition(":")
    if not batch.isdigit() or size not in PRESETS or int(batch) < 1:
        known = ", ".join(PRESETS)
        raise argparse.ArgumentTypeError(f"{text!r}: give PRESET:BATCH, such as xl:8, with a preset of {known}")
    return size, int(batch)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=NAME, description=QUESTION.splitlines()[0])
    parser.add_argument("--calibrate", help="a record of ddp_bench on the machine")
    parser.add_argument("--memory", help="a record with local of a model that does less arithmetic per byte")
    parser.add_argument(
        "--collectives", nargs="+", default=[], help="records of allreduce_sweep on the machine"
    )
    parser.add_argument("--cases", type=_case, nargs="+", metavar="PRESET:BATCH")
    parser.add_argument("--ranks", type=whole(2), nargs="+", default=[2, 4])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--compare", nargs="+", metavar="FILE", help="records of ddp_bench to compare with")
    parser.add_argument("--predictions", help="what was predicted, for --compare")
    parser.add_argument(
        "--quick", action="store_true", help="calibrate on the committed record, predict medium:8"
    )
    parser.add_argument("--out", type=Path, help="file for the records, or a folder for the whole report")
    add_from_option(parser)
    options = parser.parse_args(arguments)
    view = COMPARISON_VIEW if options.compare else VIEW
    if options.source:
        return redraw(_view_of(options.source[0]), options.source, options.out or "outputs")
    if options.quick:
        options.calibrate, options.cases, options.ranks = QUICK, [("medium", 8)], [2]
        options.rows = ["local", "flat", "bucketed-100", "fsdp"]
    if not (options.compare and options.predictions) and not (options.calibrate and options.cases):
        parser.error("give --calibrate and --cases, or --compare and --predictions")

    def predict() -> int:
        if options.compare:
            measured = [record for path in options.compare for record in read_json(path)]
            with reading([options.predictions, *options.compare]):
                records = compare(read_json(options.predictions), measured)
        else:
            cases, ranks, rows = tuple(options.cases), tuple(options.ranks), tuple(options.rows)
            collectives = tuple(options.collectives)
            config = PredictConfig(options.calibrate, cases, ranks, rows, collectives, options.memory)
            records = run(config, progress)
        page = write(view, records, OutputFolder(_folder_of(options.out), view.name))
        if options.out is not None and options.out.suffix == ".json":
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(records, options.out)
        say(view, records, page)
        return 0

    return run_to_end(NAME, predict)


def _folder_of(out: Path | None) -> Path:
    """Where the report goes: `--out`, unless that names a file for the records alone."""
    return Path("outputs") if out is None or out.suffix == ".json" else out


def _view_of(source: str) -> View:
    try:
        return COMPARISON_VIEW if read_json(source)[0].experiment == COMPARISON else VIEW
    except (ValueError, OSError, IndexError):
        return VIEW  # redrawing says what is wrong with the file


if __name__ == "__main__":
    sys.exit(main())
