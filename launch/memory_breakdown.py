"""Where a rank's memory goes under each strategy, measured beside predicted.

python launch/memory_breakdown.py                                      all GPUs, or two CPU ranks
torchrun --standalone --nproc_per_node=2 launch/memory_breakdown.py --size xl --batch 2 --context 512 --dtype bf16
"""

import argparse
import sys
from collections.abc import Callable

from distlab.comm import RankContext
from distlab.model.config import PRESETS
from distlab.parallel import STRATEGIES
from distlab.report import say, write
from distlab.report.options import real, whole
from experiments import memory_breakdown
from experiments.memory_breakdown import MemoryConfig
from launch.ranks import add_rank_options, launch, leave_process, progress_to_stderr, shared_folder

QUICK = ("local", "bucketed", "zero1", "fsdp")


def parser() -> argparse.ArgumentParser:
    default = MemoryConfig()
    p = argparse.ArgumentParser(
        "memory_breakdown", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--size", default=default.size, help=f"model preset: {', '.join(PRESETS)} [%(default)s]")
    p.add_argument("--batch", type=whole(), default=default.batch, help="sequences per rank [%(default)s]")
    p.add_argument("--context", type=whole(), help="tokens per sequence [the preset's]")
    p.add_argument("--dtype", default=default.dtype, help="fp32, or bf16 over fp32 parameters [%(default)s]")
    chosen = ",".join(default.strategies)
    p.add_argument("--strategies", default=chosen, help=f"of {', '.join(STRATEGIES)} [%(default)s]")
    p.add_argument("--bucket-size-mb", type=real(above=0), default=default.bucket_size_mb, help="MiB [%(default)s]")
    p.add_argument("--steps", type=whole(), default=default.steps, help="measured steps [%(default)s]")
    p.add_argument("--quick", action="store_true", help=f"three steps of {', '.join(QUICK)}")
    add_rank_options(p)
    return p


def config_from(args: argparse.Namespace) -> MemoryConfig:
    """The options as a configuration; raises ValueError."""
    return MemoryConfig(
        size=args.size,
        batch=args.batch,
        context=args.context,
        dtype=args.dtype,
        strategies=QUICK if args.quick else tuple(args.strategies.split(",")),
        bucket_size_mb=args.bucket_size_mb,
        steps=3 if args.quick else args.steps,
    )


def measure(context: RankContext, config: MemoryConfig, args: argparse.Namespace) -> int:
    folder = shared_folder(context, args.out, memory_breakdown.NAME)
    progress = progress_to_stderr(context)
    records = memory_breakdown.run(config, context, default_commit=args.commit, progress=progress)
    if context.is_main:
        say(memory_breakdown.VIEW, records, write(memory_breakdown.VIEW, records, folder))
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)

    def prepare() -> Callable[[RankContext], int]:
        config = config_from(args)
        return lambda context: measure(context, config, args)

    return launch(prepare, args, script=__file__, arguments=arguments, name="memory_breakdown",
                  view=memory_breakdown.VIEW)  # fmt: skip


if __name__ == "__main__":
    leave_process(main())
