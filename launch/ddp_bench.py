"""Compare the data-parallel strategies on this machine.

python launch/ddp_bench.py                                      all GPUs, or two CPU ranks
python launch/ddp_bench.py --nproc 4
torchrun --standalone --nproc_per_node=2 launch/ddp_bench.py
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from distlab.comm import RankContext
from distlab.model.config import PRESETS
from distlab.parallel import STRATEGIES, strategies_on
from distlab.report import environment, read_json, say
from distlab.report.options import either, real, seed, whole
from experiments import ddp_bench
from experiments.bucket_sweep import best_bucket_size
from experiments.ddp_bench import DDPBenchConfig
from launch.common import add_rank_options, launch, leave_process, progress_to_stderr, shared_folder

QUICK = ("local", "naive", "bucketed", "torch-ddp")
AUTO = "auto"
SWEEPS = Path(__file__).parents[1] / "records" / "bucket_sweep"


def parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    gpu = DDPBenchConfig(size="medium", dtype="bf16", bucket_sizes_mb=(100.0,), warmup=3, steps=8, rounds=3)
    default = gpu if on_gpu else DDPBenchConfig()
    p = argparse.ArgumentParser(
        "ddp_bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--size", default=default.size, help=f"model preset: {', '.join(PRESETS)} [%(default)s]")
    p.add_argument("--batch", type=int, default=default.batch, help="sequences per rank [%(default)s]")
    p.add_argument("--context", type=whole(), help="tokens per sequence [the preset's]")
    p.add_argument(
        "--ops", default=default.ops, help="of the model: torch, or triton for our kernels [torch]"
    )
    p.add_argument("--dtype", default=default.dtype, help="fp32, or bf16/fp16 autocast [%(default)s]")
    p.add_argument("--strategies", default="all", help=f"comma-separated: {', '.join(STRATEGIES)} [all]")
    p.add_argument(
        "--bucket-size-mb",
        nargs="+",
        type=either({"none": None, AUTO: AUTO}, real()),
        default=default.bucket_sizes_mb,
        help="MiB per bucket, one or several; 'none' for unbounded, 'auto' for a sweep's best [%(default)s]",
    )
    p.add_argument(
        "--bucket-sweep", nargs="+", default=[], metavar="FILE",
        help="records of bucket_sweep for 'auto' [records/bucket_sweep/*.json]",
    )  # fmt: skip
    p.add_argument("--warmup", type=int, default=default.warmup, help="untimed steps per round [%(default)s]")
    p.add_argument("--steps", type=int, default=default.steps, help="timed steps per round [%(default)s]")
    p.add_argument("--rounds", type=int, default=default.rounds, help="interleaved rounds [%(default)s]")
    p.add_argument(
        "--in-turn", action="store_true", help="all variants attached at once, one step each in turn"
    )
    p.add_argument(
        "--check-steps", type=int, default=default.check_steps, help="steps beside one process [%(default)s]"
    )
    p.add_argument(
        "--profile-steps",
        type=int,
        default=default.profile_steps,
        help="steps per trace, 0 for none [%(default)s]",
    )
    p.add_argument("--seed", type=seed, default=0, help="of parameters and data [%(default)s]")
    add_rank_options(p)
    p.add_argument("--json", action="store_true", help="print the JSON line only")
    p.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} for a few steps")
    return p


def _with_swept_size(config: DDPBenchConfig, context: RankContext, files: list[str]) -> DDPBenchConfig:
    """The config with the bucket size that a bucket sweep found best for its model on this machine."""
    found = files or sorted(map(str, SWEEPS.glob("*.json")))
    records = [record for path in found for record in read_json(path)]
    best = best_bucket_size(
        records,
        device_name=environment(context.device)["device_name"],
        world_size=context.world_size,
        size=config.size,
        batch=config.batch,
    )
    return dataclasses.replace(config, bucket_sizes_mb=(best,))


def config_from(args: argparse.Namespace) -> DDPBenchConfig:
    everything = strategies_on("cuda" if torch.cuda.is_available() and args.backend != "gloo" else "cpu")
    names = everything if args.strategies == "all" else tuple(args.strategies.split(","))
    if AUTO in args.bucket_size_mb and len(args.bucket_size_mb) > 1:
        raise ValueError("--bucket-size-mb auto stands alone, or give sizes in MiB")
    if args.quick:
        names, args.rounds, args.steps, args.check_steps, args.profile_steps = QUICK, 2, 4, 2, 1
    return DDPBenchConfig(
        size=args.size,
        batch=args.batch,
        context=args.context,
        ops=args.ops,
        dtype=args.dtype,
        strategies=names,
        bucket_sizes_mb=(25.0,) if args.bucket_size_mb == [AUTO] else tuple(args.bucket_size_mb),
        warmup=args.warmup,
        steps=args.steps,
        rounds=args.rounds,
        in_turn=args.in_turn,
        check_steps=args.check_steps,
        profile_steps=args.profile_steps,
        seed=args.seed,
    )


def bench(context: RankContext, config: DDPBenchConfig, args: argparse.Namespace) -> int:
    progress = progress_to_stderr(context)
    if context.world_size == 1:
        progress("one rank: nothing is communicated. For more: python launch/ddp_bench.py --nproc 2")
    if args.bucket_size_mb == [AUTO]:
        config = _with_swept_size(config, context, args.bucket_sweep)
        progress(f"bucket size by the sweep: {config.bucket_sizes_mb[0] or 'unbounded'}")
    folder = shared_folder(context, args.out, ddp_bench.NAME)
    if context.is_main:
        settings = dataclasses.asdict(config) | {"world_size": context.world_size}
        folder.write_text("config.json", json.dumps(settings, indent=2) + "\n")
    records = ddp_bench.run(config, context, folder, default_commit=args.commit, progress=progress)
    if not context.is_main:
        return 0
    say(ddp_bench.VIEW, records, ddp_bench.write(records, folder, context), quiet=args.json)
    return 1 if ddp_bench.wrong_rows(records) else 0


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)

    def prepare() -> Callable[[RankContext], int]:
        config = config_from(args)
        return lambda context: bench(context, config, args)

    return launch(prepare, args, script=__file__, arguments=arguments, name="ddp_bench", view=ddp_bench.VIEW)


if __name__ == "__main__":
    leave_process(main())
