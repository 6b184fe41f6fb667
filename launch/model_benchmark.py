"""How long the parts of a training step take, how much memory, and where either goes.

python launch/model_benchmark.py --size small --batch 4 --context 128 --warmup 0 1 2 5
python launch/model_benchmark.py --size medium --dtype fp32 bf16 --attention naive sdpa flash --ops torch triton
python launch/model_benchmark.py --quick --profile --memory-snapshot --saved

Every option that takes several values is swept; the rows are all combinations.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from distlab.bench.subject import MODES
from distlab.comm import RankContext
from distlab.measure.nvtx import emitter, nsys_command
from distlab.model.config import ATTENTION_CHOICES, DTYPES, OPS_CHOICES, PRESETS
from distlab.model.config import COMPILE_CHOICES as COMPILE
from distlab.parallel import STRATEGIES
from distlab.report import say, write
from distlab.report.options import whole
from distlab.report.output import OutputFolder
from distlab.report.record import read_json
from distlab.report.view import View
from experiments import model_benchmark, model_profile
from experiments.model_benchmark import BenchmarkConfig
from experiments.model_profile import Inspection
from launch.ranks import add_rank_options, launch, leave_process, progress_to_stderr, shared_folder

QUICK_WARMUP = 1


def parser() -> argparse.ArgumentParser:
    default = BenchmarkConfig()
    p = argparse.ArgumentParser(
        "model_benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def swept(name: str, help: str, *, type: Callable[[str], object] = str, allowed: object = None) -> None:
        chosen = getattr(default, name.replace("-", "_"))
        shown = " ".join(map(str, chosen)) if None not in chosen else "the preset's"
        p.add_argument(
            f"--{name}", nargs="+", type=type, choices=allowed, default=chosen, help=f"{help} [{shown}]"
        )

    swept("size", "model presets", allowed=tuple(PRESETS))
    swept("batch", "sequences per rank", type=whole())
    swept("context", "tokens per sequence", type=whole())
    swept("dtype", "bf16 and fp16 by autocast over fp32 parameters", allowed=tuple(DTYPES))
    p.add_argument(
        "--compile",
        nargs="*",
        choices=COMPILE,
        default=("off",),
        help="torch.compile; no value: the model [off]",
    )
    swept("attention", "implementations", allowed=ATTENTION_CHOICES)
    swept("ops", "implementations of the other operations", allowed=OPS_CHOICES)
    swept("checkpointing", "none, block or every-K: what is recomputed in backward")
    swept("strategy", "with several ranks (--nproc)", allowed=tuple(STRATEGIES))
    p.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="[all]")
    p.add_argument("--warmup", nargs="+", type=whole(0), help="calls left out [5]")
    p.add_argument("--steps", type=whole(), default=default.repeats, help="timed calls [%(default)s]")
    p.add_argument("--quick", action="store_true", help="one warm-up call: within a minute on two CPU cores")
    p.add_argument("--profile", action="store_true", help="traces, and kernels and kinds of work by time")
    p.add_argument("--profile-ranks", nargs="+", type=whole(0), default=(0,), help="[0]")
    p.add_argument(
        "--profile-steps", nargs=2, type=whole(0), default=(3, 5), metavar=("FIRST", "LAST"), help="[3 5]"
    )
    p.add_argument("--memory-snapshot", action="store_true", help="memory over time; on a GPU the pickle too")
    p.add_argument(
        "--saved", action="store_true", help="what a block saves for backward: eager, compiled, ours"
    )
    p.add_argument(
        "--nvtx", action="store_true", help="NVTX ranges on parts and messages, for Nsight Systems"
    )
    add_rank_options(p)
    p.set_defaults(nproc=1)
    return p


def config_of(args: argparse.Namespace) -> BenchmarkConfig:
    """The options as a configuration; raises ValueError."""
    return BenchmarkConfig(
        size=tuple(args.size),
        batch=tuple(args.batch),
        context=tuple(args.context),
        dtype=tuple(args.dtype),
        compile=tuple(args.compile) or ("model",),
        attention=tuple(args.attention),
        ops=tuple(args.ops),
        checkpointing=tuple(args.checkpointing),
        strategy=tuple(args.strategy),
        modes=tuple(args.mode),
        warmups=tuple(args.warmup or ([QUICK_WARMUP] if args.quick else BenchmarkConfig.warmups)),
        repeats=args.steps,
    )


def measure(
    context: RankContext, config: BenchmarkConfig, wanted: Inspection, args: argparse.Namespace
) -> int:
    wanted.check_ranks(context.world_size)
    folder = shared_folder(context, args.out, model_benchmark.NAME)
    progress = progress_to_stderr(context)
    shared = {"default_commit": args.commit, "progress": progress}
    records = model_benchmark.run(config, context, nvtx=args.nvtx, **shared)
    trials = {config.label(trial): trial for trial in config.trials()}
    found = model_profile.run(trials, wanted, context, folder.path, **shared)
    if not context.is_main:
        return 0
    for name, rows in found.items():
        view = model_profile.VIEWS[name]
        page = write(view, rows, OutputFolder(folder.path, "parts", name).path)
        print(f"{view.question}\n{view.headline_of(rows)}\n\n{view.table(rows)}\n")
        print("\n".join([*view.findings(rows), f"report: {page}\n"]))
    say_nsys(folder.path, context.world_size, args)
    say(model_benchmark.VIEW, records, write(model_benchmark.VIEW, records, folder))
    return 0


def say_nsys(folder: Path, ranks: int, args: argparse.Namespace) -> None:
    """The command that records this run under Nsight Systems, where that is installed.

    A rank's own command line has no --nproc any more, so that `args` does not know how many there are.
    """
    arguments = [*sys.argv[1:], "--nvtx"]
    command = nsys_command("launch/model_benchmark.py", arguments, ranks, str(folder / "nsys"))
    if command is not None and not args.nvtx:
        print(f"under Nsight Systems: {command}\n")


def view_of(args: argparse.Namespace) -> View:
    """The benchmark's, or for `--from` that of the part whose records are given."""
    try:
        name = read_json(args.source[0])[0].experiment if args.source else model_benchmark.NAME
    except (OSError, ValueError, IndexError):  # redrawing says what is wrong with the file
        name = model_benchmark.NAME
    return model_profile.VIEWS.get(name, model_benchmark.VIEW)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)

    def prepare() -> Callable[[RankContext], int]:
        config = config_of(args)
        if args.nvtx:
            emitter("nvtx")  # refuses where there is no GPU, before any rank is started
        wanted = Inspection(
            profile=args.profile,
            profile_ranks=tuple(args.profile_ranks),
            profile_steps=tuple(args.profile_steps),
            memory=args.memory_snapshot,
            saved=args.saved,
        )
        return lambda context: measure(context, config, wanted, args)

    return launch(
        prepare, args, script=__file__, arguments=arguments, name="model_benchmark", view=view_of(args)
    )


if __name__ == "__main__":
    leave_process(main())
