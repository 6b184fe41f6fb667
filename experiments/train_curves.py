"""Do all strategies train alike, does a killed run go on as if nothing had happened, and what do checkpoints cost?

PYTHONPATH=. torchrun --standalone --nproc-per-node 2 --max-restarts 1 experiments/train_curves.py

trains a model on bytes of text (by default this repository's own sources and pages) under every strategy, with one
data order and one seed. Then the last rank of another such run kills itself in the middle; torchrun restarts all
ranks, and the run resumes from its checkpoint. At last, blocks of steps with and without a checkpoint alternate.
What has a record in `--out` is not run again, so the command continues where it was cut off.

The runs are in `train_curves_pieces/bench.py` beside this file, their options in `config.py`, the limits that curves
and checkpoints must keep in `verdicts.py`.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distlab.comm import RankContext, RankEnvironment, collectives
from distlab.comm.context import LONGEST_TIMEOUT_S
from distlab.comm.rank_process import leave_process, progress_to_stderr, run_rank
from distlab.ending import USAGE_ERROR, how_to_continue
from distlab.report import (
    Column,
    OutputFolder,
    Record,
    View,
    add_from_option,
    json_line,
    redraw,
    write,
)
from distlab.report.charts import Panel, lines, overlaid
from distlab.report.noise import TIE
from distlab.report.options import real
from distlab.train.data import open_tokens
from experiments.train_curves_pieces.bench import Bench
from experiments.train_curves_pieces.config import KILLED, LAST, NAME, CurvesConfig, compared_on
from experiments.train_curves_pieces.verdicts import cost_is_noise, tolerance, verdicts, with_distances

COLUMNS = [
    Column("variant", "run"),
    Column("metrics.first_step", "from step", "d"),
    Column("metrics.final_loss", f"loss, last {LAST}", ".4f"),
    Column("metrics.mean_abs_loss_diff", "mean |Δloss|", ".4f"),
    Column("metrics.max_abs_loss_diff", "max |Δloss|", ".1e"),
    Column("metrics.step_p50_ms", "step p50 ms", ".1f"),
    Column("metrics.step_with_checkpoints_ms", "with checkpoints", ".1f"),
    Column("metrics.checkpoint_cost_pct", "cost %", ".2f", note=lambda r: TIE if cost_is_noise(r) else ""),
    Column("metrics.save_p50_ms", "save() ms", ".1f"),
    Column("metrics.wait_p50_ms", "wait ms", ".0f"),
    Column("metrics.checkpoint_bytes", "GB", ".2f", scale=1e-9),
    Column("metrics.host_bytes_per_rank", "host GiB/rank", ".2f", scale=2**-30),
    Column("metrics.added_device_bytes", "+ device MiB", ".1f", scale=2**-20),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    limit = tolerance(records)
    noise = "" if limit is None else f"; noise {limit:.3f} nats"
    return (
        f"{config['size']} ({config['num_parameters'] / 1e6:,.1f} M parameters), bytes, batch {config['batch']} "
        f"(checkpoints: {config['cost_batch']}), {config['steps']} steps, {config['dtype']}, {config['world_size']} × "
        f"{env['device_name']} ({config['backend']}), torch {env['torch']}{noise}"
    )


def draw(records: Sequence[Record], path: Path) -> None:
    """All loss curves on one picture, and where one run was killed."""
    series, events = {}, []
    for record in records:
        if "loss" in record.metrics:
            first = record.metrics["first_step"]
            losses = record.metrics["loss"]
            series[record.variant] = (range(first + 1, first + len(losses) + 1), losses)
        if record.variant == KILLED:
            events = [(record.config["kill_at"], "killed"), (record.metrics["first_step"], "resumed from")]
    if series:
        label = "training loss (nats per byte)"
        panel = Panel("", "step", label, overlaid(series), log_x=None, from_zero=False, events=events)
        lines(path, [panel], title=f"Loss of every strategy: {headline(records)}")


VIEW = View(
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"loss.png": draw},
    findings=lambda records: [f"WRONG: {problem}" for problem in verdicts(records)],
    reading="All runs have one data order and one seed, so their curves may differ only as rounding makes them differ; "
    "how much that is, the reference in two micro-batches shows. The killed run goes on from its checkpoint: its first "
    "step is the one after that. The cost of checkpoints is that of whole blocks of steps, with and without, in turn.",
    noise="Curves: the distance that the same mathematics in two micro-batches makes, in the headline.",
)
QUICK = {
    "size": "tiny", "context": None, "dtype": "fp32", "steps": 12, "kill_at": 6, "checkpoint_every": 3, "rounds": 1,
    "block": 2, "strategies": ("naive", "flat"),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    default = (
        CurvesConfig(size="medium", context=512, dtype="bf16", strategies=compared_on("cuda"))
        if on_gpu
        else CurvesConfig(steps=60, kill_at=35, checkpoint_every=15)
    )
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(CurvesConfig):
        value = getattr(default, field.name)
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            p.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
        elif isinstance(value, tuple):
            p.add_argument(
                option, type=lambda text: tuple(text.split(",")), default=value, help="comma-separated"
            )
        else:
            kind = int if field.name == "context" else type(value)
            p.add_argument(option, type=kind, default=value, help="[%(default)s]")
    p.add_argument("--text", help="a text file [this repository's sources and pages]")
    p.add_argument("--backend", choices=("nccl", "gloo"))
    seconds = real(above=0, most=LONGEST_TIMEOUT_S)
    p.add_argument("--timeout", type=seconds, default=60.0, help="seconds a collective may take [%(default)s]")
    p.add_argument(
        "--out", default="outputs/train_curves", help="folder of records; continued where it has some"
    )
    p.add_argument("--commit", help="recorded where git is missing")
    p.add_argument("--quick", action="store_true", help="three strategies, a few steps of the tiny preset")
    add_from_option(p)
    return p


def run(
    config: CurvesConfig, context: RankContext, folder: Path, tokens: np.ndarray, **options
) -> list[Record]:
    """Call it on every rank; see `Bench`."""
    return Bench(config, context, folder, tokens, **options).run()


FOLDERS = ("distlab", "kernels", "experiments", "launch", "tests", "docs")


def text_of_repository(root: Path) -> np.ndarray:
    """The bytes of this repository's Python files and pages, in the order of their names."""
    files = sorted(
        path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in (".py", ".md")
    )
    return np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)


def config_from(args: argparse.Namespace) -> CurvesConfig:
    """The options as a configuration; raises ValueError."""
    names = [field.name for field in dataclasses.fields(CurvesConfig)]
    return CurvesConfig(**{name: getattr(args, name) for name in names} | (QUICK if args.quick else {}))


def check_restarts(parts: Sequence[str], variables: Mapping[str, str]) -> None:
    """Raise ValueError if a rank will kill itself and nobody will start it again."""
    if "kill" in parts and int(variables.get("TORCHELASTIC_MAX_RESTARTS", 0)) < 1:
        raise ValueError(
            "the part 'kill' ends a rank, which torchrun must start again: torchrun --standalone --nproc-per-node 2 "
            "--max-restarts 1 experiments/train_curves.py, or leave it out with --parts curves,cost"
        )


def main(argv: list[str] | None = None) -> int:
    """Run on this rank, print the table, write the report."""
    args = parser().parse_args(argv)
    try:
        rank = RankEnvironment.read().rank
        if args.source:
            return redraw(VIEW, args.source, args.out) if rank == 0 else 0
        config = config_from(args)
        check_restarts(config.parts, os.environ)
    except ValueError as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # its backward adds in any order; the flash kernel's does not
        torch.utils.deterministic.fill_uninitialized_memory = False

    def work(context: RankContext) -> int:
        return compare(config, context, args)

    return run_rank(work, backend=args.backend, timeout_s=args.timeout, name=NAME)


def compare(config: CurvesConfig, context: RankContext, args: argparse.Namespace) -> int:
    """All parts, and what they leave; call it on every rank.

    Raises:
        OSError, ValueError: on every rank, for a text or a folder that cannot be used.
        MemoryError: a strategy with this model and batch does not fit.
    """
    opened: tuple[np.ndarray, OutputFolder] | Exception | None = None
    if context.is_main:  # one rank reads: somebody may be editing these files
        try:
            root = Path(__file__).resolve().parents[1]
            tokens = np.array(open_tokens(args.text)) if args.text else text_of_repository(root)
            out = Path(args.out)
            opened = tokens, OutputFolder(out.parent, out.name, "records")
        except (OSError, ValueError) as error:
            opened = error
    opened = collectives.gather_objects(opened, context.group)[0]
    if isinstance(opened, Exception):
        raise opened
    tokens, folder = opened
    how_to_continue("the same command continues")
    progress = progress_to_stderr(context)
    attempt = RankEnvironment.read().restarts
    options = {"attempt": attempt, "default_commit": args.commit, "progress": progress}
    records = run(config, context, folder.path, tokens, **options)
    if context.is_main:
        records = with_distances(records)
        page = write(VIEW, records, folder)
        print(f"{headline(records)}\n\n{VIEW.table(records)}\n")
        for problem in VIEW.findings(records):
            print(problem)
        print(f"report: {page}")
        print(json_line(NAME, [_short(record) for record in records], folder.path), flush=True)
    dist.barrier(context.group)
    return 0  # a wrong row is printed as wrong; another exit code would make torchrun start all over


def _short(record: Record) -> Record:
    """Without the loss of every step."""
    metrics = {name: value for name, value in record.metrics.items() if not name.startswith("loss")}
    return dataclasses.replace(record, metrics=metrics)


if __name__ == "__main__":
    leave_process(main())
