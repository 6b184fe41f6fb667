"""Time the collectives of this machine and fit them.

python launch/allreduce_sweep.py                                        all GPUs, or two CPU ranks
python launch/allreduce_sweep.py --nproc 4 --group-sizes 2 4
torchrun --standalone --nproc_per_node=2 launch/allreduce_sweep.py
"""

import argparse
import sys
from collections.abc import Callable

import torch

from distlab.comm import RankContext
from distlab.measure.bandwidth import OPERATIONS
from distlab.report import say, write
from distlab.report.options import real, whole
from experiments import allreduce_sweep
from experiments.allreduce_sweep import CPU_SIZES, GPU_SIZES, KIB, MIB, SweepConfig
from launch.ranks import add_rank_options, launch, leave_process, progress_to_stderr, shared_folder

NAME = allreduce_sweep.NAME


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = SweepConfig()
    p.add_argument("--operations", default="all", help=f"comma-separated: {', '.join(OPERATIONS)} [all]")
    p.add_argument("--sizes", type=whole(), nargs="+", help="payload bytes [4 KiB … 2 GiB; on a CPU … 16 MiB]")
    p.add_argument("--group-sizes", type=whole(2), nargs="+", default=[], help="numbers of ranks [2, 4, … all]")
    p.add_argument("--warmup", type=whole(0), default=default.warmup)
    p.add_argument("--repeats", type=whole(3), default=default.repeats, help="timed calls, at most [%(default)s]")
    p.add_argument("--budget", type=real(above=0), default=default.budget_s, help="seconds per row [%(default)s]")
    p.add_argument(
        "--contention-mb", type=real(least=0), help="MiB of the all-reduces beside computation, 0 for none"
    )
    p.add_argument("--quick", action="store_true", help="four sizes, few repetitions")
    add_rank_options(p)
    return p


def config_from(args: argparse.Namespace) -> SweepConfig:
    on_gpu = torch.cuda.is_available() and args.backend != "gloo"
    sizes = tuple(args.sizes or (GPU_SIZES if on_gpu else CPU_SIZES))
    contention = (256 if on_gpu else 4) if args.contention_mb is None else args.contention_mb
    quick = {}
    if args.quick:
        quick = {"sizes": tuple(4 * KIB * 8**k for k in range(4)), "repeats": 5, "budget_s": 0.1}
    options = {
        "operations": OPERATIONS if args.operations == "all" else tuple(args.operations.split(",")),
        "sizes": sizes,
        "group_sizes": tuple(args.group_sizes),
        "warmup": args.warmup,
        "repeats": args.repeats,
        "budget_s": args.budget,
        "contention_bytes": int(contention * MIB),
    }
    return SweepConfig(**options | quick)


def sweep(context: RankContext, config: SweepConfig, args: argparse.Namespace) -> int:
    config.groups(context.world_size)
    folder = shared_folder(context, args.out, NAME)
    records = allreduce_sweep.run(
        config, context, default_commit=args.commit, progress=progress_to_stderr(context)
    )
    if not context.is_main:
        return 0
    say(allreduce_sweep.VIEW, records, write(allreduce_sweep.VIEW, records, folder))
    return 1 if allreduce_sweep.wrong_rows(records) else 0


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)

    def prepare() -> Callable[[RankContext], int]:
        config = config_from(args)
        return lambda context: sweep(context, config, args)

    view = allreduce_sweep.VIEW
    return launch(prepare, args, script=__file__, arguments=arguments, name=NAME, view=view)


if __name__ == "__main__":
    leave_process(main())
