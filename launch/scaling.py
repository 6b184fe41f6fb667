"""Measure weak and strong scaling on 1, 2, 4, … of this host's ranks, beside the predictions.

python launch/scaling.py                                                all GPUs, or two CPU ranks
torchrun --standalone --nproc_per_node=8 launch/scaling.py --minutes 8
torchrun --standalone --nproc_per_node=8 launch/scaling.py --resume outputs/scaling_measured/20250101-120000
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from distlab.comm import RankContext
from distlab.ending import how_to_continue
from distlab.report import say, write
from distlab.report.options import real, whole
from distlab.report.record import OutputFolder
from experiments import scaling_measured
from experiments.scaling_measured import STRATEGIES, MeasureConfig, Regime
from launch.ranks import add_rank_options, launch, leave_process, progress_to_stderr, shared_folder

NAME = scaling_measured.NAME
ON_CPU = MeasureConfig(
    regimes=(Regime("weak", "tiny", 2), Regime("strong", "tiny", 4)),
    context=32,
    dtype="fp32",
    bucket_size_mb=4.0,
    sweep_bytes=tuple(4096 * 8**k for k in range(4)),
)


def parser() -> argparse.ArgumentParser:
    default = MeasureConfig() if torch.cuda.is_available() else ON_CPU
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.set_defaults(default=default)
    regimes = " ".join(map(str, default.regimes))
    p.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # of `experiments.scaling`
    p.add_argument("--regimes", nargs="+", metavar="KIND:MODEL:BATCH", help=f"[{regimes}]")
    p.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated [%(default)s]")
    p.add_argument("--ranks", type=whole(), nargs="+", default=[], help="numbers of ranks [1, 2, 4, … all]")
    p.add_argument("--context", type=whole(), default=default.context, help="tokens per sequence [the preset's]")
    p.add_argument("--dtype", default=default.dtype, help="fp32, or bf16 [%(default)s]")
    p.add_argument("--bucket-size-mb", type=real(above=0), default=default.bucket_size_mb, help="MiB [%(default)s]")
    p.add_argument("--warmup", type=whole(), default=default.warmup)
    p.add_argument("--steps", type=whole(), default=default.steps)
    p.add_argument("--rounds", type=whole(), default=default.rounds)
    p.add_argument("--minutes", type=real(above=0), default=default.minutes, help="begin nothing later [%(default)s]")
    p.add_argument("--device", help="predict for this one, such as h200 [the one here]")
    p.add_argument("--resume", metavar="FOLDER", help="go on with the records of a run that was cut off")
    p.add_argument("--quick", action="store_true", help="two strategies of the tiny preset, few steps")
    add_rank_options(p)
    return p


def config_from(args: argparse.Namespace) -> MeasureConfig:
    if args.quick:
        strategies = ("bucketed", "torch-ddp")
        return replace(
            ON_CPU, strategies=strategies, warmup=1, steps=3, ranks=tuple(args.ranks), device=args.device
        )
    return replace(
        args.default,
        regimes=tuple(map(Regime.parse, args.regimes)) if args.regimes else args.default.regimes,
        strategies=tuple(args.strategies.split(",")),
        ranks=tuple(args.ranks),
        context=args.context,
        dtype=args.dtype,
        bucket_size_mb=args.bucket_size_mb,
        warmup=args.warmup,
        steps=args.steps,
        rounds=args.rounds,
        minutes=args.minutes,
        device=args.device,
    )


def measure(context: RankContext, config: MeasureConfig, args: argparse.Namespace) -> int:
    if args.resume:
        path = Path(args.resume).resolve()
        if not any((path / name).is_file() for name in ("records.json", scaling_measured.PREDICTIONS)):
            raise ValueError(f"--resume {args.resume}: that is no folder of a run that was cut off")
        folder = OutputFolder(path.parents[1], path.parent.name, path.name)
    else:
        folder = shared_folder(context, args.out, NAME)
    how_to_continue(f"--resume {folder.path} continues")
    records = scaling_measured.run(
        config, context, folder, default_commit=args.commit, progress=progress_to_stderr(context)
    )
    if not context.is_main:
        return 0
    say(scaling_measured.VIEW, records, write(scaling_measured.VIEW, records, folder))
    return 1 if scaling_measured.wrong_rows(records) else 0


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)

    def prepare() -> Callable[[RankContext], int]:
        config = config_from(args)
        return lambda context: measure(context, config, args)

    view = scaling_measured.VIEW
    return launch(prepare, args, script=__file__, arguments=arguments, name=NAME, view=view)


if __name__ == "__main__":
    leave_process(main())
