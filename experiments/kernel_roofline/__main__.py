"""The command; see the package."""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from distlab.report import (
    Record,
    Work,
    add_output_options,
    commit,
    progress,
    run_command,
    run_to_end,
    write_json,
)
from distlab.report.options import whole

from . import __doc__ as DESCRIPTION
from .cases import VARIANTS, cases
from .comparison import beside_peers
from .rows import EXPERIMENT, QUICK, SMOKE, Config, run
from .tuning import dump_ptx, tune
from .view import VIEW


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(EXPERIMENT, description=DESCRIPTION, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK.only)}; on a CPU as --smoke")
    parser.add_argument("--smoke", action="store_true", help="small sizes, seconds on a CPU")
    parser.add_argument("--only", nargs="+", help="these operations")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--repeat-ms", type=whole(), help="device time per number")
    parser.add_argument("--tune", action="store_true", help="launch parameters of the operations of --only instead")
    parser.add_argument("--dump-ptx", metavar="KERNEL", help="print the PTX of one kernel and stop")
    add_output_options(parser, resumes=True)
    return parser.parse_args(argv)


def config_from(options: argparse.Namespace) -> Config:
    """The options over the defaults of the device.

    Raises:
        ValueError: an unknown operation, no GPU for what needs one, or nothing to tune.
    """
    quick = QUICK if torch.cuda.is_available() else SMOKE
    config = SMOKE if options.smoke else quick if options.quick else Config()
    chosen = {name: tuple(getattr(options, name)) for name in ("only", "variants") if getattr(options, name)}
    config = dataclasses.replace(config, **chosen, repeat_ms=options.repeat_ms or config.repeat_ms)
    names = {case.name for case in cases(True)} if config.only else set()
    if unknown := set(config.only) - names:
        raise ValueError(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(sorted(names))}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("the kernels are timed on a GPU and there is none (--smoke runs seconds on a CPU)")
    if options.tune and not (config.only and config.device == "cuda"):
        raise ValueError("--tune tries launch parameters on a GPU: name operations with --only, without --smoke")
    return config


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.dump_ptx:
        return run_to_end(EXPERIMENT, lambda: print(dump_ptx(options.dump_ptx)) or 0)
    if options.tune and not options.source:
        return run_to_end(EXPERIMENT, lambda: show_tuned(config_from(options)))

    def prepare() -> Work:
        config = config_from(options)

        def work(folder: Path) -> list[Record]:
            records = run(config, folder / "records.json", commit(options.commit), progress)
            write_json(beside_peers(records), folder / "comparison.json")
            return records

        return work

    return run_command(VIEW, options, prepare)


def show_tuned(config: Config) -> int:
    """Print the best launch parameters of each operation."""
    print("\n".join(line for kernel in config.only for line in tune(config, kernel, progress)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
