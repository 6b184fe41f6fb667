"""Train a language model under any strategy; given again, the same command continues the run.

python launch/train.py                                             synthetic tokens, all GPUs or two CPU ranks
python launch/train.py --data my.txt --size tiny --steps 300       bytes of a text; then: python launch/sample.py
python launch/train.py --name my-run --strategy zero1              a name of its own: any strategy continues it
torchrun --standalone --nproc-per-node 2 --max-restarts 3 launch/train.py --strategy fsdp
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from distlab.checkpoint.lock import hold
from distlab.comm import RankContext, RankEnvironment, collectives
from distlab.model.config import OPS_CHOICES
from distlab.report import OutputFolder, json_line
from distlab.report.options import whole
from distlab.train.config import DTYPES, TRAINABLE, TrainConfig
from experiments import training
from experiments.training import DataConfig, Training
from launch.ranks import add_rank_options, launch, leave_process, progress_to_stderr

HELP = {
    "size": "model preset",
    "context": "tokens per sequence (default: the preset's)",
    "vocab": "entries of the vocabulary (default: the preset's; 256 for text)",
    "strategy": f"one of {', '.join(TRAINABLE)}",
    "batch": "sequences per step over all ranks",
    "accumulate": "micro-batches per step; gradients are synchronised once",
    "ops": f"one of {', '.join(OPS_CHOICES)}; triton: this lab's kernels, AdamW too",
    "lr_floor": "last learning rate as a fraction of --lr",
    "clip": "largest gradient norm, 0 for none",
    "dtype": f"one of {', '.join(DTYPES)}",
    "compile_blocks": "torch.compile each block",
    "checkpoint_blocks": "recompute activations in backward",
    "validate_every": "steps between validations, 0 for one at the end",
    "checkpoint_every": "steps between checkpoints, 0 for one at the end",
    "keep": "complete checkpoints that stay",
    "synchronous_checkpoints": "write checkpoints within the step, not behind it",
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(TrainConfig):
        option, text = f"--{field.name.replace('_', '-')}", HELP.get(field.name, field.name.replace("_", " "))
        if isinstance(field.default, bool):
            p.add_argument(option, action="store_true", help=text)
        else:
            kind = int if field.default is None else type(field.default)
            p.add_argument(option, type=kind, default=field.default, help=f"{text} [%(default)s]")
    p.add_argument("--data", help=".bin or .npy tokens, or a text file (its bytes) [synthetic tokens]")
    p.add_argument("--val-data", help="validation file [the last twentieth of --data]")
    p.add_argument("--token-dtype", help="of a .bin: uint16 or uint32 [uint16]")
    p.add_argument("--name", help="of the run [data, size and strategy]")
    p.add_argument("--fresh", action="store_true", help="put an older run of this name aside and begin anew")
    p.add_argument("--log-every", type=whole(), default=10, help="steps between progress lines [%(default)s]")
    p.add_argument("--quick", action="store_true", help="ten steps of the tiny preset")
    p.add_argument("--max-restarts", type=whole(0), default=0, help="start all ranks again so often [%(default)s]")
    add_rank_options(p)
    return p


def config_from(args: argparse.Namespace) -> TrainConfig:
    """The options as a configuration; raises ValueError."""
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**options | ({"size": "tiny", "steps": 10} if args.quick else {}))


def train(context: RankContext, config: TrainConfig, data: DataConfig, args: argparse.Namespace) -> int:
    progress = progress_to_stderr(context)
    name = run_name(args.name, data, config)
    folder = shared_run_folder(
        context, args.out, name, fresh=args.fresh and RankEnvironment.read().restarts == 0
    )
    run = Training(
        config, data, context, folder, default_commit=args.commit, log_every=args.log_every, progress=progress
    )
    outcome, record = run.run()
    if outcome.stopped_by is not None:
        progress(
            f"stopped by signal {outcome.stopped_by} after step {outcome.last_step} of {config.steps}; a checkpoint is "
            f"written ({folder.path}). The same command continues the run"
        )
        return 128 + outcome.stopped_by
    if record is not None:
        for step, loss in outcome.validation:
            progress(f"validation loss after step {step}: {loss:.4f} nats per token")
        progress(f"done: {outcome.last_step} steps; checkpoints, metrics and loss.png in {folder.path}")
        print(json_line(training.NAME, [record], folder.path), flush=True)
    return 0


def run_name(given: str | None, data: DataConfig, config: TrainConfig) -> str:
    """The name of a run's folder; raises ValueError for one that would lead elsewhere."""
    name = given
    if name is None:
        name = f"{Path(data.path).stem if data.path else 'synthetic'}-{config.size}-{config.strategy}"
    if not name or name != Path(name).name or name == "..":
        raise ValueError(f"--name {name!r} cannot name a folder: use letters, digits, '-', '_' and '.'")
    return name


def shared_run_folder(context: RankContext, root: str, name: str, *, fresh: bool) -> OutputFolder:
    """The run's folder, made by rank 0 and joined by the others; every rank raises if it cannot be written.

    Args:
        fresh: put an older run of this name aside, unless it is still running.
    """
    path = Path(root) / training.NAME / name
    exists = collectives.gather_objects(fresh and path.is_dir(), context.group)[0]
    lock = hold(path, context, progress_to_stderr(context)) if exists else None
    made: OutputFolder | Exception | None = None
    if context.is_main:
        try:
            if lock is not None:
                number = next(n for n in range(1, 10**6) if not path.with_name(f"{name}-old-{n}").exists())
                lock.folder = path.rename(path.with_name(f"{name}-old-{number}"))
                lock.release()
            made = OutputFolder(root, training.NAME, name)
        except (OSError, ValueError) as error:
            made = error
    made = collectives.gather_objects(made, context.group)[0]
    if isinstance(made, Exception):
        raise made
    return made


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)

    def prepare() -> Callable[[RankContext], int]:
        config, data = config_from(args), DataConfig(args.data, args.val_data, args.token_dtype)
        run_name(args.name, data, config)  # refused before ranks are started
        return lambda context: train(context, config, data, args)

    return launch(prepare, args, script=__file__, arguments=arguments, name="train", view=training.VIEW)


if __name__ == "__main__":
    leave_process(main())
