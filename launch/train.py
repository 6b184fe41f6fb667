"""Train a language model under any strategy; given again, the same command continues the run.

python launch/train.py                                             synthetic tokens, all GPUs or two CPU ranks
python launch/train.py --data my.txt --size tiny --steps 300       bytes of a text; then: python launch/sample.py
python launch/train.py --name my-run --strategy zero1              a name of its own: any strategy continues it
torchrun --standalone --nproc-per-node 2 --max-restarts 3 launch/train.py --strategy fsdp
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distlab.checkpoint.lock import hold
from distlab.comm import RankContext, RankEnvironment, collectives
from distlab.options import add_options, config_from
from distlab.report import (
    Column,
    OutputFolder,
    Record,
    View,
    commit,
    environment,
    json_line,
    read_json,
    write,
)
from distlab.report.charts import Panel, overlaid
from distlab.report.options import whole
from distlab.train import run
from distlab.train.config import DataConfig, TrainConfig
from distlab.train.loop import Outcome
from launch.ranks import add_rank_options, launch, leave_process, progress_to_stderr

NAME = "train"
QUICK = {"size": "tiny", "steps": 10}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(p, TrainConfig)
    add_options(p, DataConfig)
    p.add_argument("--name", help="of the run [data, size and strategy]")
    p.add_argument("--fresh", action="store_true", help="put an older run of this name aside and begin anew")
    p.add_argument("--log-every", type=whole(), default=10, help="steps between progress lines [%(default)s]")
    p.add_argument("--quick", action="store_true", help="ten steps of the tiny preset")
    p.add_argument("--max-restarts", type=whole(0), default=0, help="start all ranks again so often [%(default)s]")
    add_rank_options(p)
    return p


def train(context: RankContext, config: TrainConfig, data: DataConfig, args: argparse.Namespace) -> int:
    progress = progress_to_stderr(context)
    name = run_name(args.name, data, config)
    folder = shared_run_folder(
        context, args.out, name, fresh=args.fresh and RankEnvironment.read().restarts == 0
    )

    def write_results(
        config: TrainConfig, outcome: Outcome, metrics: dict[str, Any], lines: list[dict[str, Any]]
    ) -> None:
        record = record_of(config, context, metrics, args.commit)
        series = {"training": ([line["step"] for line in lines], [line["loss"] for line in lines])}
        if outcome.validation:
            series["validation"] = tuple(zip(*outcome.validation, strict=True))
        title = f"{config.size}, {config.strategy}, {context.world_size} ranks"
        panel = Panel("", "step", "loss (nats per token)", overlaid(series), log_x=None, from_zero=False)
        lines(folder.path / "loss.png", [panel], title=title)
        write(VIEW, [record], folder)
        if outcome.stopped_by is None:
            for step, loss in outcome.validation:
                progress(f"validation loss after step {step}: {loss:.4f} nats per token")
            progress(f"done: {outcome.last_step} steps; checkpoints, metrics and loss.png in {folder.path}")
            print(json_line(NAME, [record], folder.path), flush=True)

    outcome = run.train(
        config, data, context, folder.path, write_results=write_results,
        has_results=lambda steps: has_record(folder.path, steps), log_every=args.log_every, progress=progress,
    )  # fmt: skip
    if outcome.stopped_by is None:
        return 0
    progress(
        f"stopped by signal {outcome.stopped_by} after step {outcome.last_step} of {config.steps}; a checkpoint is "
        f"written ({folder.path}). The same command continues the run"
    )
    return 128 + outcome.stopped_by


def record_of(
    config: TrainConfig, context: RankContext, metrics: dict[str, Any], default_commit: str | None
) -> Record:
    """The results with what they were measured on."""
    shared = asdict(config) | {"world_size": context.world_size, "backend": context.backend}
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    return Record(NAME, config.strategy, shared, metrics, **facts)


def has_record(folder: Path, steps: int) -> bool:
    """Whether the results of so many steps were written, to the last file."""
    records, page = folder / "records.json", folder / "report.html"
    try:
        same = read_json(records)[0].metrics["steps"] == steps
        return same and page.stat().st_mtime_ns >= records.stat().st_mtime_ns
    except (OSError, ValueError, LookupError):
        return False


COLUMNS = [
    Column("variant", "strategy"),
    Column("metrics.steps", "steps", ",d"),
    Column("metrics.final_loss", "loss", ".4f"),
    Column("metrics.validation_loss", "validation loss", ".4f"),
    Column("metrics.step_p50_ms", "step p50 ms", ".1f"),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f"),
    Column("metrics.mfu_pct", "MFU %", ".1f"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what was trained on what."""
    config, env = records[0].config, records[0].environment
    return (
        f"{config['size']}, {config['steps']} steps of {config['batch']} sequences, {config['dtype']}, "
        f"{config['world_size']} × {env['device_name']} ({config['backend']}), torch {env['torch']}"
    )


VIEW = View(
    NAME,
    "How does this model train?",
    COLUMNS,
    headline,
    reading="The loss of every step is in metrics.jsonl, decimal and in hex; two runs of the same command, one of them "
    "killed and resumed, have the same hex. Times are those of whole steps, data and logging included.",
    noise="A single run: the loss of one step varies with its batch. Compare curves, not last values.",
)


def run_name(given: str | None, data: DataConfig, config: TrainConfig) -> str:
    """The name of a run's folder; raises ValueError for one that would lead elsewhere."""
    name = given
    if name is None:
        name = f"{Path(data.data).stem if data.data else 'synthetic'}-{config.size}-{config.strategy}"
    if not name or name != Path(name).name or name == "..":
        raise ValueError(f"--name {name!r} cannot name a folder: use letters, digits, '-', '_' and '.'")
    return name


def shared_run_folder(context: RankContext, root: str, name: str, *, fresh: bool) -> OutputFolder:
    """The run's folder, made by rank 0 and joined by the others; every rank raises if it cannot be written.

    Args:
        fresh: put an older run of this name aside, unless it is still running.
    """
    path = Path(root) / NAME / name
    exists = collectives.gather_objects(fresh and path.is_dir(), context.group)[0]
    made: OutputFolder | Exception | None = None
    with hold(path, context, progress_to_stderr(context)) if exists else contextlib.nullcontext() as lock:
        if context.is_main:
            try:
                if lock is not None:
                    number = next(n for n in range(1, 10**6) if not path.with_name(f"{name}-old-{n}").exists())
                    lock.folder = path.rename(path.with_name(f"{name}-old-{number}"))
                made = OutputFolder(root, NAME, name)
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
        config = config_from(TrainConfig, args, QUICK if args.quick else {})
        data = config_from(DataConfig, args)
        run_name(args.name, data, config)  # refused before ranks are started
        return lambda context: train(context, config, data, args)

    return launch(prepare, args, script=__file__, arguments=arguments, name="train", view=VIEW)


if __name__ == "__main__":
    leave_process(main())
