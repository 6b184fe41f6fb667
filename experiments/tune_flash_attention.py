"""Which tile shapes are the fastest for the attention kernels?

    distlab run tune_flash_attention --family bfloat16:64                   # one dtype and head dim
    distlab run tune_flash_attention --all --table kernels/flash_attention/table.py --name full
    distlab run tune_flash_attention --quick       # what the shipped configurations use of an H100; needs no GPU

A family is a dtype, an arithmetic and a head dim; it is tuned for one head of each length given, which are the row
classes of `configs.ROW_CLASSES`. Every candidate of the three kernels is compiled in parallel processes, those that
spill or do not fit are dropped, the rest are checked against a small tile on poisoned outputs and timed, length after
length, as long as they stay near the best. The best of each are timed again, interleaved.

Everything measured goes to a file per family; --table rewrites `kernels/flash_attention/table.py` after each length,
and a name that exists is resumed, so that a cut-off run keeps what it has.
"""

import dataclasses
import functools
import itertools
import multiprocessing
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import Pace, attempt, interleave, replay_ms
from distlab.report import write_json
from kernels._compile import compile_for
from kernels._triton import compile_only, generation
from kernels.flash_attention import backward, configs, forward, hopper, table
from kernels.flash_attention.configs import Choice, Key, Tile, key_of
from kernels.flash_attention.options import Problem

Row = dict[str, Any]  # of one candidate: kernel, length, how, ms (inf if it cannot be used), and why, or what it uses


@dataclass(frozen=True)
class Case:
    """One problem: causal attention of one head, q, k, v of (1, 1, length, head_dim)."""

    length: int
    head_dim: int
    dtype: str
    precision: str = "ieee"

    def problem(self) -> Problem:
        """What the kernels are asked to compute."""
        return Problem((None, 0), self.head_dim**-0.5, self.precision)

    def tensor(self, device: str) -> torch.Tensor:
        """A random tensor of the case's shape and dtype on `device`."""
        return torch.randn(1, 1, self.length, self.head_dim, device=device, dtype=getattr(torch, self.dtype))

    def key(self, gpu: str) -> Key:
        """Where the table of configurations looks this case up."""
        return key_of(self.tensor("meta"), self.problem(), gpu)

    def first_guess(self) -> Tile:
        """A tile that fits every head dim and dtype."""
        return Tile(32, 16, 4, 1) if self.dtype == "float32" else Tile(64, 32, 4, 2)


def miscompiled(bits: int, tile: Tile) -> bool:
    """Whether nobody may use this tile: of fp32, with 16 rows and eight warps.

    Triton 3.6 makes illegal memory accesses of such tiles on Hopper, seen at 64 × 16 forward and 16 × 64 backward.
    """
    return bits == 32 and tile.warps == 8 and min(tile.block_m, tile.block_n) == 16


def candidates(kernel: str, dtype: str, head_dim: int, precision: str = "ieee") -> Iterator[Tile]:
    """Tiles of 16 to 64 rows of one's own, by the warps that can share them; larger ones lost at every length.

    None that is miscompiled. With "bf16x6" whole warpgroups multiply, 64 rows of one's own each: it is for long calls.
    """
    bits = 32 if dtype == "float32" else 16
    if precision == "bf16x6":
        depths = (1, 2) if head_dim > 64 else (1, 2, 3)
        for own, other, stages in itertools.product((64, 128), (32, 64), depths):
            m, n = (other, own) if kernel == "dkdv" else (own, other)
            yield Tile(m, n, own // 16, stages)
        return
    if dtype == "float32":
        warps = {16: (2, 4), 32: (4, 8), 64: (4, 8)}
        others, stages, ways = (16, 32, 64), 2, (False,)
    else:
        warps = {16: (2, 4), 32: (2, 4), 64: (4,)} if head_dim <= 32 else {16: (4, 8), 32: (4, 8), 64: (4,)}
        others, stages, ways = (32, 64, 128), 3, (False, True)
    for own, other, tma in itertools.product(warps, others, ways):
        for count in warps[own]:
            m, n = (other, own) if kernel == "dkdv" else (own, other)
            tile = Tile(m, n, count, stages, tma=tma)
            if not miscompiled(bits, tile):
                yield tile


GRAPH_MS = 0.5  # of launches in one timed graph replay, so that starting it weighs little
FINALISTS = 4
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}  # of RMS against the first guess
LIMIT_SHARED_BYTES = 227 * 1024  # of one program on an H100
LIMIT_SPILLED_BYTES = {"float32": 1024, "float16": 256, "bfloat16": 256}  # per thread; fp32 tiles rarely fit whole


class Bench:
    """Inputs of a case and a launcher per kernel, one of `configs.KERNELS`."""

    def __init__(self, case: Case, device: str = "cuda"):
        self.problem = case.problem()
        self.q, self.k, self.v, self.do, self.o = (case.tensor(device) for _ in range(5))
        self.lse = torch.empty(self.q.shape[:-1], device=device, dtype=torch.float32)
        self.grads = tuple(torch.empty_like(self.q) for _ in range(3))
        if device == "cuda":
            self.launch("forward", case.first_guess())
            self.saved = backward.launch_delta(self.q, self.k, self.v, self.o, self.lse, self.do)
        else:
            padded = torch.empty(*self.lse.shape[:2], -(-case.length // 128) * 128, device=device)
            self.saved = backward.Saved(self.q, self.k, self.v, self.do, padded, padded)

    def launch(self, kernel: str, tile: Tile) -> None:
        """Run one kernel with a tile, on this bench's tensors."""
        dq, dk, dv = self.grads
        if kernel == "forward":
            forward.launch_forward(self.q, self.k, self.v, self.o, self.lse, self.problem, tile)
        elif kernel == "dkdv":
            backward.launch_dkdv(self.saved, dk, dv, self.problem, tile)
        else:
            backward.launch_dq(self.saved, dq, self.problem, tile)

    def outputs(self, kernel: str, tile: Tile) -> tuple[torch.Tensor, ...]:
        """Copies of what a launch filled, poisoned before."""
        dq, dk, dv = self.grads
        filled = {"forward": (self.o,), "dkdv": (dk, dv), "dq": (dq,)}[kernel]
        for x in filled:
            x.fill_(float("nan"))
        self.launch(kernel, tile)
        return tuple(x.float() for x in filled)


def compile_candidate(job: tuple[Case, str, Tile]) -> dict[str, int] | str:
    """Compile without running; registers, spilled bytes and shared memory, or why it cannot be used.

    Without a GPU, for an H100.
    """
    case, kernel, how = job
    try:
        bench = Bench(case, "meta")
        with compile_only() if torch.cuda.is_available() else compile_for(90) as compiled:
            bench.launch(kernel, how)
        return resources(compiled[0])
    except Exception as error:
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0][:80] if reason else ''}"


def resources(compiled: triton.compiler.CompiledKernel) -> dict[str, int]:
    """Registers and bytes of stack (spilled registers) per thread, and shared memory, as `cuobjdump` reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout + text.stderr)
    return {"registers": int(found[1]), "spilled_bytes": int(found[2]), "shared_bytes": compiled.metadata.shared}


def device_ms(run: Callable[[], None], repetitions: int) -> float:
    """Median device time in ms of one launch, from replays of a CUDA graph of several."""
    return median(replay_ms(run, repetitions, graph_ms=GRAPH_MS, calls=(5, 20), tidy=False))


def time_candidates(bench: Bench, case: Case, kernel: str, jobs: list, uses: dict, guess: Tile) -> list[Row]:
    """One row per job: time, resources and error, or why there is none; fastest first."""
    reference = jobs and bench.outputs(kernel, guess)
    rows = []
    for how in jobs:
        use = uses[kernel, how]
        row: Row = {"kernel": kernel, "length": case.length, "how": how, "ms": float("inf")}
        rows.append(row)
        lacks = isinstance(use, str) or use["shared_bytes"] > LIMIT_SHARED_BYTES
        if lacks or use["spilled_bytes"] > LIMIT_SPILLED_BYTES[case.dtype]:
            row["why"] = use if isinstance(use, str) else f"spills or does not fit: {use}"
            continue
        try:
            outputs = bench.outputs(kernel, how)
            error = max(((x - r).norm() / r.norm()).item() for x, r in zip(outputs, reference, strict=True))
            if not error <= TOLERANCE[case.dtype]:
                row["why"] = f"wrong: relative RMS error {error:.1e}"
                continue
            row |= use | {"rms_error": error, "ms": device_ms(lambda h=how: bench.launch(kernel, h), 3)}
        except Exception as problem:
            row["why"] = str(problem)[:120]
            if "CUDA" in row["why"]:  # the context is lost, and with it every later candidate
                raise RuntimeError(f"{case}, {kernel}: {how}") from problem
            continue
    return duel(bench, kernel, sorted(rows, key=lambda r: r["ms"]))


def duel(bench: Bench, kernel: str, rows: list[Row]) -> list[Row]:
    """Time the leaders again in interleaved rounds; adds `sustained_ms` and sorts by it."""
    leaders = [row for row in rows[:FINALISTS] if row["ms"] < float("inf")]
    calls = {row["how"]: lambda r=row: device_ms(lambda: bench.launch(kernel, r["how"]), 3) for row in leaders}
    times = interleave(calls, 3)
    for row in leaders:
        row["sustained_ms"] = median(times[row["how"]])
    return sorted(leaders, key=lambda r: r["sustained_ms"]) + rows[len(leaders):]


PRUNE = 4.0  # times the best at one length, beyond which a tile is not tried at the next
FAMILIES = (*(f"float32:{head_dim}:tf32x3" for head_dim in (64, 128, 32, 16)),
            *(f"float32:{head_dim}:bf16x6" for head_dim in (128, 64, 32, 16)),  # after those it is compared with
            *(f"bfloat16:{head_dim}" for head_dim in (128, 64, 32, 16)))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """What to tune: families × lengths, or, with `shipped`, nothing."""

    families: tuple[str, ...] = option((), "dtype:head_dim[:precision], one or several", flag="--family")
    all_families: bool = option(False, "every family of the sweep", flag="--all")
    lengths: tuple[int, ...] = option(configs.ROW_CLASSES[:-2], "of one head; longer ones take minutes each", least=1)
    workers: int = option(14, "processes that compile", least=1)
    table: str | None = option(None, "write a table.py with the winners", metavar="FILE")
    shipped: int = option(0, "only compile this many rows of the shipped table, for an H100; needs no GPU", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for family in self.families:
            dtype, _, rest = family.partition(":")
            if dtype not in ("bfloat16", "float16", "float32") or not rest.partition(":")[0].isdigit():
                raise ValueError(f"--family {family}: give dtype:head_dim[:precision], such as bfloat16:64")
        if not (self.families or self.all_families or self.shipped):
            raise ValueError("name families with --family dtype:head_dim[:precision], or give --all")


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per family, length and kernel: the winner. All that was measured goes to a file per family."""
    if config.shipped:
        shipped(dict(list(configs.TABLE.items())[: config.shipped]), run)
        return
    families = [*config.families, *(FAMILIES if config.all_families else ())]
    missing = [f for f in families if not run.done("dq", family=f, length=config.lengths[-1])]
    rows, begin = table.ROWS, time.monotonic()
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        prepared = {family: begun(family, config.lengths, pool) for family in missing}
        for family, (cases, jobs, compiled) in prepared.items():
            found = tune(cases, jobs, dict(compiled))
            run.progress(f"{family}, {time.monotonic() - begin:.0f} s")
            write_json(to_records(family, found, run), run.path / f"{family.replace(':', '_')}.json")
            for case in cases:
                add_winners(run, family, case, found)
                if config.table:
                    wins = case.precision != "bf16x6" or beats_tf32(case, found, run)
                    rows = merge(rows, case, found if wins else [], generation())
                    Path(config.table).write_text(table_source(rows), encoding="utf-8")


def shipped(rows: dict[configs.Key, Choice], run: Run) -> None:
    """A row per kernel of the table: registers, spilled bytes and shared memory, or why it does not compile."""
    compiled = functools.cache(compile_candidate)
    pace = Pace(len(rows), "configurations", run.progress)
    for key, choice in rows.items():
        case = Case(4096, key.head_dim, "float32" if key.bits == 32 else "bfloat16", key.precision)
        for kernel, how in choice._asdict().items():
            found = compiled((case, kernel, how))
            metrics = found if isinstance(found, dict) else {"status": found}
            run.add(kernel, metrics, family=f"{case.dtype}:{case.head_dim}:{case.precision}", length=key.rows,
                    tiles=describe(how))  # fmt: skip
        pace()
    for way, head_dims in hopper.HEAD_DIMS.items() if len(rows) == len(configs.TABLE) else ():
        for head_dim in head_dims:
            run.add(f"Hopper's {way}", attempt(partial(hoppers, way, head_dim)), family=f"bfloat16:{head_dim}")


def hoppers(way: str, head_dim: int) -> dict[str, int]:
    """Of a kernel in Gluon, for an H100: registers, spilled bytes and shared memory; fp16's are alike."""
    bench = Bench(Case(16384, head_dim, "bfloat16"), "meta")
    with compile_for(90) as compiled:
        if way == "forward":
            hopper.launch_forward(bench.q, bench.k, bench.v, bench.o, bench.lse, bench.problem)
        else:
            hopper.launch_backward(bench.q, bench.k, bench.v, bench.o, bench.lse, bench.do, *bench.grads, bench.problem)
    return resources(next(c for c in compiled if c.metadata.name.startswith("hopper")))


def begun(
    family: str, lengths: tuple[int, ...], pool: ProcessPoolExecutor
) -> tuple[list[Case], dict[str, list[Tile]], Iterator[tuple[tuple[str, Tile], Any]]]:
    """The cases of a family such as `bfloat16:64` or `float32:64:tf32x3`, the tiles to try for each kernel, and what
    each of these uses, which begins to compile in `pool` at once.
    """
    dtype, head_dim, *precision = family.split(":")
    cases = [Case(length, int(head_dim), dtype, *precision) for length in lengths]
    jobs = {kernel: list(candidates(kernel, dtype, int(head_dim), cases[0].precision)) for kernel in configs.KERNELS}
    asked = [(kernel, tile) for kernel, tiles in jobs.items() for tile in tiles]
    uses = pool.map(compile_candidate, [(cases[0], *job) for job in asked], chunksize=2)
    return cases, jobs, zip(asked, uses, strict=True)


def tune(cases: list[Case], jobs: dict[str, list[Tile]], uses: dict[tuple[str, Tile], Any]) -> list[Row]:
    """All rows of one family."""
    rows = []
    for case in cases:
        bench = Bench(case)
        for kernel in configs.KERNELS:
            mine = time_candidates(bench, case, kernel, jobs[kernel], uses, case.first_guess())
            rows += mine
            near = [row["how"] for row in mine if row["ms"] <= PRUNE * mine[0]["ms"] < float("inf")]
            jobs[kernel] = near if mine else jobs[kernel]
    return rows


def best_of(rows: Sequence[Row], kernel: str, length: int) -> Row:
    """The fastest row of a kernel at one length, among those that were timed again."""
    mine = [r for r in rows if (r["kernel"], r["length"]) == (kernel, length)]
    if not any("sustained_ms" in row for row in mine):
        raise ValueError(f"no tile of {kernel} can be used: {[row.get('why') for row in mine]}")
    return min((r for r in mine if "sustained_ms" in r), key=lambda r: r["sustained_ms"])


def add_winners(run: Run, family: str, case: Case, found: Sequence[Row]) -> None:
    """A row for the best of each kernel at one length."""
    for kernel in configs.KERNELS:
        best = best_of(found, kernel, case.length)
        run.add(kernel, measured_of(best), family=family, length=case.length, tiles=describe(best["how"]))


def describe(tile: Tile) -> str:
    """A tile as queries × keys, warps, stages."""
    return f"{tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages}" + " tma" * tile.tma


def beats_tf32(case: Case, found: list[Row], run: Run) -> bool:
    """Whether the winners of a bf16x6 case are faster than the table's row for tf32x3, timed now on the same shape."""
    other = dataclasses.replace(case, precision="tf32x3")
    bench, row = Bench(other), configs.lookup(other.key(generation()))
    theirs = sum(device_ms(lambda k=kernel, t=tile: bench.launch(k, t), 5) for kernel, tile in row._asdict().items())
    ours = sum(best_of(found, kernel, case.length)["sustained_ms"] for kernel in configs.KERNELS)
    run.progress(f"{case.length:6d} bf16x6 {1e3 * ours:8.1f} us, tf32x3 {1e3 * theirs:8.1f} us")
    return ours < theirs


def merge(rows: tuple, case: Case, found: list[Row], gpu: str) -> tuple:
    """ROWS with the winners of one case in the place of their key; without that row if nothing was found."""
    key = dataclasses.astuple(case.key(gpu))
    others = [row for row in rows if row[0] != key]
    if not found:
        return tuple(others)
    best = [best_of(found, kernel, case.length) for kernel in configs.KERNELS]
    times = " ".join(f"{row['sustained_ms']:.4f}" for row in best)
    row = (key, f"1x1x{case.length}x{case.head_dim}: {times} ms", *(dataclasses.astuple(row["how"]) for row in best))
    return tuple(sorted([*others, row], key=lambda row: row[0]))


def table_source(rows: tuple) -> str:
    """The text of table.py for these rows; its docstring is kept."""
    lines = [f'"""{table.__doc__}"""', "", "ROWS = ("]
    for key, origin, *tiles in rows:
        lines.append(f'    ({key!r}, "{origin}",'.replace("'", '"'))
        lines.append("     " + ", ".join(repr(tile) for tile in tiles) + "),")
    return "\n".join([*lines, ")", ""])


def to_records(family: str, found: list[Row], run: Run) -> list[Record]:
    """Everything measured for one family; a tile that could not be used has the reason in `status`."""
    header, records = run.header, []
    for row in found:
        metrics = measured_of(row) if row["ms"] < float("inf") else {"status": str(row["why"])}
        config = {"family": family, "length": row["length"]} | dataclasses.asdict(row["how"])
        where = dict(header.environment), header.commit
        records.append(Record(header.experiment, row["kernel"], config, metrics, *where))
    return records


def measured_of(row: Row) -> dict[str, Any]:
    """Of a candidate's row the metrics."""
    return {name: row[name] for name in row.keys() - {"kernel", "length", "how", "why"}}


VIEW = View(
    columns=[
        Column("config.family", "family", align="left"), Column("config.length", "length"), Column("variant", "kernel"),
        Column("config.tiles", "tiles", align="left"), Column("metrics.sustained_ms", "µs", ",.1f", scale=1000),
        Column("metrics.registers", "registers"), Column("metrics.spilled_bytes", "spilled B"),
        Column("metrics.shared_bytes", "shared B", ",d"), Column("metrics.status", "status"),
    ],
    headline=headline_from(
        "{where}; torch {torch}, triton {triton}",
        where=lambda records: "Device time, " + records[0].environment["device_name"]
        if any("sustained_ms" in r.metrics for r in records) else "Compiled for an H100 (sm_90), nothing ran",
    ),
    terminal=("family", "length", "variant", "tiles", "sustained_ms", "registers", "spilled_bytes", "status"),
    reading="Tiles are queries × keys, warps (w), pipeline stages (s); times are those of the winner. "
    "A block of w warps takes 32·w times the table's registers, of 65,536 per SM; spilled bytes go through local "
    "memory "
    "and should be few. Shared memory and registers together decide how many blocks an SM holds.",
    noise="Times are medians of three interleaved rounds; the compiler's figures do not vary.",
)
EXPERIMENT = Experiment(
    Config, measure, VIEW,
    presets={"quick": {"shipped": len(configs.TABLE)}, "smoke": {"shipped": 1}},
    gpus=1,
)
