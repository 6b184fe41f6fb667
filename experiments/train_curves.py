"""Do all strategies train alike, does a killed run go on as if nothing had happened, and what do checkpoints cost?

PYTHONPATH=. torchrun --standalone --nproc-per-node 2 --max-restarts 1 experiments/train_curves.py

trains a model on bytes of text (by default this repository's own sources and pages) under every strategy, with one
data order and one seed. Then the last rank of another such run kills itself in the middle; torchrun restarts all
ranks, and the run resumes from its checkpoint. At last, blocks of steps with and without a checkpoint alternate.
What has a record in `--out` is not run again, so the command continues where it was cut off.
"""

import argparse
import dataclasses
import gc
import hashlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distlab.comm import RankContext, RankEnvironment, collectives, rank_context
from distlab.measure.memory import peak_memory
from distlab.report import (
    Column,
    OutputFolder,
    Record,
    View,
    add_from_option,
    commit,
    environment,
    json_line,
    read_json,
    redraw,
    write,
    write_json,
)
from distlab.report.curves import curves
from distlab.train.config import TRAINABLE, TrainConfig
from distlab.train.loop import StepReport, Trainer
from distlab.train.tokens import TokenWindows, open_tokens

NAME = "train_curves"
REFERENCE = "bucketed"
ROUNDING, KILLED, COST = "bucketed, 2 micro-batches", "bucketed, killed", "checkpoints"
FOLDERS = ("distlab", "kernels", "experiments", "launch", "tests", "docs")
LAST = 20  # steps whose mean loss is compared


@dataclass(frozen=True)
class CurvesConfig:
    """What to run.

    Args:
        size, context, dtype, steps, batch, lr, seed: as in `TrainConfig`; the batch counts all ranks' sequences.
        strategies: to train with; the reference is added where it is missing.
        parts: of `curves`, `kill` and `cost`.
        kill_at: step after which the last rank kills itself.
        checkpoint_every: steps between the checkpoints of that run.
        cost_batch, block, rounds: of the cost: sequences over all ranks, steps per block, pairs of blocks.
        deterministic: ask torch for deterministic kernels, so that two runs are equal bit for bit.

    Raises:
        ValueError: a value that is not allowed.
    """

    size: str = "tiny"
    context: int | None = None
    dtype: str = "fp32"
    steps: int = 200
    batch: int = 16
    lr: float = 3e-4
    seed: int = 0
    strategies: tuple[str, ...] = tuple(name for name in TRAINABLE if name != "torch-ddp-tuned")
    parts: tuple[str, ...] = ("curves", "kill", "cost")
    kill_at: int = 110
    checkpoint_every: int = 50
    cost_batch: int = 64
    block: int = 50
    rounds: int = 3
    deterministic: bool = True

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in ("curves", "kill", "cost")]
        if unknown or not self.parts:
            raise ValueError(f"parts {self.parts}: choose among curves, kill, cost")
        if not 1 < self.kill_at < self.steps or self.block < 2 or self.rounds < 1:
            raise ValueError(
                f"kill_at={self.kill_at}, steps={self.steps}, block={self.block}, rounds={self.rounds}: "
                "1 < kill_at < steps, a block of at least 2 steps, and at least one round"
            )
        for strategy in self.strategies:
            self.training(strategy)

    def training(self, strategy: str, **changes: object) -> TrainConfig:
        base = TrainConfig(
            size=self.size, context=self.context, vocab=256, strategy=strategy, batch=self.batch, steps=self.steps,
            lr=self.lr, warmup=max(1, self.steps // 10), dtype=self.dtype, seed=self.seed, checkpoint_every=0,
        )  # fmt: skip
        return dataclasses.replace(base, **changes)


def text_of_repository(root: Path) -> np.ndarray:
    """The bytes of this repository's Python files and pages, in the order of their names."""
    files = sorted(
        path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in (".py", ".md")
    )
    return np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)


class Bench:
    """Runs the parts, one record each.

    Args:
        config: what to run.
        context: this rank.
        folder: of records; all ranks see it.
        tokens: bytes.
        attempt: 0, or how often torchrun has restarted the ranks.
    """

    def __init__(
        self,
        config: CurvesConfig,
        context: RankContext,
        folder: Path,
        tokens: np.ndarray,
        *,
        attempt: int = 0,
        default_commit: str | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ):
        self.config, self.context, self.folder, self.attempt = config, context, folder, attempt
        self.progress = progress
        model = config.training(REFERENCE).model()
        self.data = TokenWindows(tokens, 256, model.context_length)
        self.text = {"bytes": len(tokens), "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}
        facts = dataclasses.asdict(config) | {"world_size": context.world_size, "backend": context.backend}
        self.shared = facts | {"text": self.text, "num_parameters": model.num_parameters}
        self.facts = {"environment": environment(context.device), "commit": commit(default_commit)}

    # -- records -------------------------------------------------------------------------------------------

    def path_of(self, variant: str) -> Path:
        return self.folder / f"{variant.replace(', ', '-').replace(' ', '-')}.json"

    def done(self, variant: str) -> Record | None:
        """The record of a part that was run before, with the same configuration."""
        path = self.path_of(variant)
        found = read_json(path)[0] if path.exists() else None
        same = (
            found is not None
            and found.config == Record(NAME, "", self.shared, {}, {}, None).to_dict()["config"]
        )
        return found if same else None

    def once(self, variant: str, run: Callable[[], dict[str, object]]) -> None:
        # Rank 0 decides for all: another host's view of the folder may lag.
        done = self.context.is_main and self.done(variant) is not None
        if collectives.gather_objects(done, self.context.group)[0]:
            self.progress(f"{variant}: has its record")
            return
        self.progress(variant)
        metrics = run()
        if self.context.is_main:
            write_json([Record(NAME, variant, self.shared, metrics, **self.facts)], self.path_of(variant))
        dist.barrier(self.context.group)

    def records(self) -> list[Record]:
        names = [*self.config.strategies, ROUNDING, KILLED, COST]
        return [record for record in map(self.done, dict.fromkeys([REFERENCE, *names])) if record is not None]

    # -- parts ---------------------------------------------------------------------------------------------

    def run(self) -> list[Record]:
        """Everything that has no record yet; call it on every rank."""
        parts = self.config.parts
        if "curves" in parts:
            for strategy in dict.fromkeys([REFERENCE, *self.config.strategies]):
                self.once(strategy, lambda strategy=strategy: self.curve(self.config.training(strategy)))
            micro = self.config.training(REFERENCE, accumulate=2)
            self.once(ROUNDING, lambda: self.curve(micro))
        if "kill" in parts:
            self.once(KILLED, self.killed_curve)
        if "cost" in parts:
            self.once(COST, self.cost)
        return self.records()

    def curve(
        self,
        config: TrainConfig,
        folder: Path | None = None,
        after: Callable[[StepReport], None] | None = None,
    ) -> dict[str, object]:
        """Train; the loss of every step, as it is and in hex."""
        reports: list[StepReport] = []

        def report(step: StepReport) -> None:
            reports.append(step)
            if after is not None:
                after(step)

        with peak_memory(self.context.device) as memory:
            trainer = self.trainer(config, folder, report)
            if folder is not None:
                trainer.resume()
            first = trainer.step
            begin = time.perf_counter()
            trainer.run()
            spent = time.perf_counter() - begin
            trainer.close()
        del trainer
        gc.collect()  # wrappers and hooks form cycles; the next strategy needs the memory
        steady = [r.step_ms for r in reports[len(reports) // 4 :]]
        losses = [r.loss for r in reports]
        return {
            "first_step": first,
            "loss": losses,
            "loss_hex": [loss.hex() for loss in losses],
            "final_loss": statistics.mean(losses[-LAST:]),
            "step_p50_ms": statistics.median(steady),
            "train_s": spent,
            "peak_alloc_bytes": memory.peak_alloc_bytes,
        }

    def trainer(
        self, config: TrainConfig, folder: Path | None, report: Callable[[StepReport], None]
    ) -> Trainer:
        return Trainer(
            config, self.context, train=self.data, data_identity=self.text, folder=folder, report=report,
            progress=self.progress,
        )  # fmt: skip

    def killed_curve(self) -> dict[str, object]:
        """The reference once more. In the first attempt the last rank dies by SIGKILL; the next one resumes."""
        config = self.config.training(REFERENCE, checkpoint_every=self.config.checkpoint_every)
        victim = self.context.rank == self.context.world_size - 1 and self.attempt == 0

        def die(report: StepReport) -> None:
            if victim and report.step == self.config.kill_at:
                print(f"rank {self.context.rank} kills itself", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        metrics = self.curve(config, self.folder / "killed" / "checkpoints", die)
        reference = self.done(REFERENCE)
        if reference is not None:
            twin = reference.metrics["loss"][metrics["first_step"] :]
            differences = [abs(a - b) for a, b in zip(metrics["loss"], twin, strict=True)]
            metrics["max_abs_loss_diff"] = max(differences)
            metrics["equal_steps_pct"] = 100 * sum(d == 0 for d in differences) / len(differences)
        return metrics

    def cost(self) -> dict[str, object]:
        """Blocks of steps with a checkpoint and without, in turn, on one trainer.

        A block with a checkpoint begins with `save()` and ends when that checkpoint is complete: what a checkpoint
        that is still being written would make the next one wait is counted.
        """
        config = self.config.training(REFERENCE, batch=self.config.cost_batch, keep=1)
        trainer = self.trainer(config, self.folder / "cost" / "checkpoints", lambda report: None)
        metrics: dict[str, list[float]] = {"with": [], "without": [], "save": [], "wait": []}
        with peak_memory(self.context.device) as before:
            self._block(trainer, 5, None)
        with peak_memory(self.context.device) as memory:
            self._block(trainer, 5, {"save": [], "wait": []})  # takes the pinned memory, once per run
            for number in range(2 * self.config.rounds):
                saves = number % 2 == number // 2 % 2  # with, without, without, with, …
                timed = self._block(trainer, self.config.block, metrics if saves else None)
                metrics["with" if saves else "without"].append(timed)
        ratio = statistics.median(metrics["with"]) / statistics.median(metrics["without"])
        written = collectives.gather_objects(trainer.checkpoints.host_bytes, self.context.group)
        trainer.close()
        added = None
        if before.peak_alloc_bytes is not None:
            added = max(0, memory.peak_alloc_bytes - before.peak_alloc_bytes)
        return {
            "block_steps": self.config.block,
            "block_with_ms": metrics["with"],
            "block_without_ms": metrics["without"],
            "step_p50_ms": statistics.median(metrics["without"]) / self.config.block,
            "step_with_checkpoints_ms": statistics.median(metrics["with"]) / self.config.block,
            "checkpoint_cost_pct": 100 * (ratio - 1),
            "noise_floor_pct": 100 * (max(metrics["without"]) / min(metrics["without"]) - 1),
            "save_p50_ms": statistics.median(metrics["save"]),
            "wait_p50_ms": statistics.median(metrics["wait"]),
            "checkpoint_bytes": sum(written),
            "host_bytes_per_rank": max(written),
            "added_device_bytes": added,
        }

    def _block(self, trainer: Trainer, steps: int, metrics: dict[str, list[float]] | None) -> float:
        """Time a block of steps, ms, that of the slowest rank."""
        self._finish_everything()
        begin = time.perf_counter()
        if metrics is not None:
            trainer.save()
            metrics["save"].append(1e3 * (time.perf_counter() - begin))
        for _ in range(steps):
            trainer.heartbeat.note(trainer.step + 1, trainer.one_step(), trainer.train_step.grad_norm)
        trainer.heartbeat.settle()
        self._finish_everything()
        if metrics is not None:
            waiting = time.perf_counter()
            trainer.checkpoints.wait()
            metrics["wait"].append(1e3 * (time.perf_counter() - waiting))
        return max(collectives.gather_objects(1e3 * (time.perf_counter() - begin), self.context.group))

    def _finish_everything(self) -> None:
        dist.barrier(self.context.group)
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()


def verdicts(records: Sequence[Record]) -> list[str]:
    """What is not as it should be; empty if all is well."""
    records = with_distances(records)
    by_name = {record.variant: record.metrics for record in records}
    problems = []
    limit = tolerance(records)
    for name, metrics in by_name.items():
        apart = metrics.get("mean_abs_loss_diff")
        if limit and apart is not None and not apart <= limit:
            problems.append(f"{name}: {apart:.4f} nats from {REFERENCE}'s curve, noise is {limit:.4f}")
        if "loss" in metrics and not metrics["loss"][-1] < metrics["loss"][0] and metrics["first_step"] == 0:
            problems.append(
                f"{name}: the loss did not fall ({metrics['loss'][0]:.3f} → {metrics['loss'][-1]:.3f})"
            )
    killed = by_name.get(KILLED)
    if killed and killed["first_step"] == 0:
        problems.append(f"{KILLED}: was not resumed from a checkpoint")
    cost = by_name.get(COST)
    if cost and cost["checkpoint_cost_pct"] > 5:
        problems.append(f"checkpoints cost {cost['checkpoint_cost_pct']:.1f} % of step time, more than 5 %")
    return problems


def distance(record: Record, reference: Record) -> float | None:
    """Mean |Δloss| over the steps that both ran: a few steps' mean would say more of their luck."""
    mine, theirs = record.metrics.get("loss"), reference.metrics.get("loss")
    if not mine or not theirs or record is reference:
        return None
    late = theirs[record.metrics["first_step"] :]
    return statistics.fmean(abs(a - b) for a, b in zip(mine, late, strict=True))


def with_distances(records: Sequence[Record]) -> list[Record]:
    """The records with `mean_abs_loss_diff`, the distance to the reference's curve."""
    reference = next((record for record in records if record.variant == REFERENCE), None)
    return [
        dataclasses.replace(
            record, metrics=record.metrics | {"mean_abs_loss_diff": distance(record, reference)}
        )
        if reference and "loss" in record.metrics
        else record
        for record in records
    ]


def tolerance(records: Sequence[Record]) -> float | None:
    """How far curves may lie apart: twice what rounding alone does (the same mathematics in two micro-batches), and
    at least 0.01 nats."""
    by_name = {record.variant: record for record in records}
    if REFERENCE not in by_name or ROUNDING not in by_name:
        return None
    return max(0.01, 2 * distance(by_name[ROUNDING], by_name[REFERENCE]))


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
