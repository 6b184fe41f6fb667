"""The command; see the package."""

import argparse
import dataclasses
import sys

import torch

from distlab.report import OutputFolder, add_output_options, commit, progress, redraw, say, write, write_json

from . import __doc__ as DESCRIPTION
from .cases import VARIANTS, cases
from .comparison import beside_peers
from .rows import EXPERIMENT, QUICK, SMOKE, Config, run
from .tuning import dump_ptx, tune
from .view import VIEW


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK.only)}; on a CPU as --smoke")
    parser.add_argument("--smoke", action="store_true", help="small sizes, seconds on a CPU")
    parser.add_argument("--only", nargs="+", help="these operations")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--repeat-ms", type=int, help="device time per number")
    parser.add_argument("--tune", action="store_true", help="launch parameters of the operations of --only instead")
    parser.add_argument("--dump-ptx", metavar="KERNEL", help="print the PTX of one kernel and stop")
    add_output_options(parser, resumes=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.source:
        return redraw(VIEW, options.source, options.out)
    quick = QUICK if torch.cuda.is_available() else SMOKE
    config = SMOKE if options.smoke else quick if options.quick else Config()
    chosen = {name: tuple(getattr(options, name)) for name in ("only", "variants") if getattr(options, name)}
    config = dataclasses.replace(config, **chosen, repeat_ms=options.repeat_ms or config.repeat_ms)
    names = {case.name for case in cases(True)} if config.only else set()
    try:
        if options.dump_ptx:
            print(dump_ptx(options.dump_ptx))
            return 0
        if unknown := set(config.only) - names:
            raise ValueError(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(sorted(names))}")
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("the kernels are timed on a GPU and there is none (--smoke runs seconds on a CPU)")
        folder = OutputFolder(options.out, EXPERIMENT, options.stamp)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{EXPERIMENT}: error: {error}", file=sys.stderr)
        return 2
    if options.tune:
        print("\n".join(line for kernel in config.only for line in tune(config, kernel, progress)))
        return 0
    records = run(config, folder.path / "records.json", commit(options.commit), progress)
    write_json(beside_peers(records), folder.path / "comparison.json")
    say(VIEW, records, write(VIEW, records, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
