"""Sweep the bucket size: predicted, then measured.

python launch/bucket_sweep.py                                           all GPUs, or two CPU ranks
torchrun --standalone --nproc_per_node=2 launch/bucket_sweep.py --size xl --batch 2
"""

import argparse
import sys
from collections.abc import Callable

import torch

from distlab.comm import RankContext
from distlab.model.config import PRESETS
from distlab.report import environment, read_json, say, write
from distlab.report.options import either, real, seed, whole
from distlab.simulate.calibrate import measured_links
from experiments import bucket_sweep
from experiments.bucket_sweep import BucketSweepConfig
from launch.ranks import add_rank_options, launch, leave_process, progress_to_stderr, shared_folder

NAME = bucket_sweep.NAME


def parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    cpu = BucketSweepConfig(bucket_sizes_mb=(0.25, 1.0, 2.0, 4.0, 10.0, None))
    gpu = BucketSweepConfig(size="medium", batch=8, dtype="bf16", warmup=3, steps=8)
    default = gpu if on_gpu else cpu
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--size", default=default.size, help=f"model preset: {', '.join(PRESETS)} [%(default)s]")
    p.add_argument("--batch", type=whole(), default=default.batch, help="sequences per rank [%(default)s]")
    p.add_argument("--context", type=whole(), help="tokens per sequence [the preset's]")
    p.add_argument("--dtype", default=default.dtype, help="fp32, or bf16/fp16 autocast [%(default)s]")
    p.add_argument(
        "--bucket-size-mb",
        nargs="+",
        type=either({"none": None}, real()),
        default=default.bucket_sizes_mb,
        help="MiB per bucket; 'none' for unbounded [%(default)s]",
    )
    p.add_argument("--no-peer", action="store_true", help="leave torch DDP's sweep out")
    p.add_argument(
        "--fit", nargs="+", metavar="FILE", help="records of allreduce_sweep on this kind of machine"
    )
    p.add_argument("--warmup", type=whole(), default=default.warmup)
    p.add_argument("--steps", type=whole(), default=default.steps)
    p.add_argument("--rounds", type=whole(), default=default.rounds)
    p.add_argument("--seed", type=seed, default=0)
    p.add_argument("--quick", action="store_true", help="three sizes of the tiny preset, few steps")
    add_rank_options(p)
    return p


def config_from(args: argparse.Namespace) -> BucketSweepConfig:
    config = BucketSweepConfig(
        size=args.size,
        batch=args.batch,
        context=args.context,
        dtype=args.dtype,
        bucket_sizes_mb=tuple(args.bucket_size_mb),
        peer=not args.no_peer,
        warmup=args.warmup,
        steps=args.steps,
        rounds=args.rounds,
        seed=args.seed,
    )
    quick = BucketSweepConfig(
        batch=2, context=32, bucket_sizes_mb=(1.0, 4.0, None), warmup=1, steps=4, rounds=1
    )
    return quick if args.quick else config


def sweep(context: RankContext, config: BucketSweepConfig, args: argparse.Namespace) -> int:
    links = None
    if args.fit:
        known = [record for path in args.fit for record in read_json(path)]
        links = measured_links(known, environment(context.device)["device_name"], context.backend)
    folder = shared_folder(context, args.out, NAME)
    records = bucket_sweep.run(
        config, context, links=links, default_commit=args.commit, progress=progress_to_stderr(context)
    )
    if context.is_main:
        say(bucket_sweep.VIEW, records, write(bucket_sweep.VIEW, records, folder))
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)

    def prepare() -> Callable[[RankContext], int]:
        config = config_from(args)
        return lambda context: sweep(context, config, args)

    return launch(prepare, args, script=__file__, arguments=arguments, name=NAME, view=bucket_sweep.VIEW)


if __name__ == "__main__":
    leave_process(main())
