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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distlab.comm import RankContext, RankEnvironment, collectives, rank_context
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
from distlab.report.curves import curves
from distlab.train.tokens import open_tokens
from experiments.train_curves_pieces.bench import Bench
from experiments.train_curves_pieces.config import KILLED, LAST, NAME, CurvesConfig
from experiments.train_curves_pieces.verdicts import tolerance, verdicts, with_distances

COLUMNS = [
    Column("variant", "run"),
    Column("metrics.first_step", "from step", "d"),
    Column("metrics.final_loss", f"loss, last {LAST}", ".4f"),
    Column("metrics.mean_abs_loss_diff", "mean |Δloss|", ".4f"),
    Column("metrics.max_abs_loss_diff", "max |Δloss|", ".1e"),
    Column("metrics.step_p50_ms", "step p50 ms", ".1f"),
    Column("metrics.step_with_checkpoints_ms", "with checkpoints", ".1f"),
    Column("metrics.checkpoint_cost_pct", "cost %", ".2f"),
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
    series, events = {}, {}
    for record in records:
        if "loss" in record.metrics:
            first = record.metrics["first_step"]
            losses = record.metrics["loss"]
            series[record.variant] = (range(first + 1, first + len(losses) + 1), losses)
        if record.variant == KILLED:
            events = {"killed": record.config["kill_at"], "resumed from": record.metrics["first_step"]}
    if series:
        title = f"Loss of every strategy: {headline(records)}"
        curves(
            path, series, title=title, x_label="step", y_label="training loss (nats per byte)", events=events
        )


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
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
        CurvesConfig(size="medium", context=512, dtype="bf16")
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
    p.add_argument("--timeout", type=float, default=60.0, help="seconds a collective may take [%(default)s]")
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


def check_restarts(parts: Sequence[str], variables: Mapping[str, str]) -> None:
    """Raise ValueError if a rank will kill itself and nobody will start it again."""
    if "kill" in parts and int(variables.get("TORCHELASTIC_MAX_RESTARTS", 0)) < 1:
        raise ValueError(
            "the part 'kill' ends a rank, which torchrun must start again: torchrun --standalone --nproc-per-node 2 "
            "--max-restarts 1 experiments/train_curves.py, or leave it out with --parts curves,cost"
        )


def main() -> int:
    args = parser().parse_args()
    names = [field.name for field in dataclasses.fields(CurvesConfig)]
    if args.source:
        return redraw(VIEW, args.source, args.out) if RankEnvironment.read().rank == 0 else 0
    config = CurvesConfig(**{name: getattr(args, name) for name in names} | (QUICK if args.quick else {}))
    attempt = RankEnvironment.read().restarts
    try:
        check_restarts(config.parts, os.environ)
    except ValueError as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # its backward adds in any order; the flash kernel's does not
        torch.utils.deterministic.fill_uninitialized_memory = False
    out = Path(args.out)
    folder = OutputFolder(out.parent, out.name, "records")
    begin = time.monotonic()
    with rank_context(backend=args.backend, timeout_s=args.timeout) as context:

        def progress(text: str) -> None:
            if context.is_main:
                print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

        tokens = None
        if context.is_main:  # one rank reads: somebody may be editing these files
            root = Path(__file__).resolve().parents[1]
            tokens = np.array(open_tokens(args.text)) if args.text else text_of_repository(root)
        tokens = collectives.gather_objects(tokens, context.group)[0]
        records = run(
            config,
            context,
            folder.path,
            tokens,
            attempt=attempt,
            default_commit=args.commit,
            progress=progress,
        )
        problems = verdicts(records)
        if context.is_main:
            records = with_distances(records)
            page = write(VIEW, records, folder)
            print(f"{headline(records)}\n\n{VIEW.table(records)}\n")
            for problem in problems:
                print(f"WRONG: {problem}")
            print(f"report: {page}")
            print(json_line(NAME, [_short(record) for record in records], folder.path), flush=True)
        dist.barrier(context.group)
    return 0  # a wrong row is printed as wrong; another exit code would make torchrun start all over


def _short(record: Record) -> Record:
    """Without the loss of every step."""
    metrics = {name: value for name, value in record.metrics.items() if not name.startswith("loss")}
    return dataclasses.replace(record, metrics=metrics)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort an interpreter that shuts down
