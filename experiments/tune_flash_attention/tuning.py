"""Families one after the other: compile, time, keep what was measured, and put the winners into a table."""

import dataclasses
import functools
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from distlab.experiment import Options, RankContext, Record, Run, option
from distlab.measure.pace import Pace
from distlab.report import write_json
from kernels._triton import generation
from kernels.flash_attention import configs, table
from kernels.flash_attention.configs import Choice, Tile

from .candidates import TIMED, Case, Row, candidates, chunked, from_table, pairs, shape_of
from .workbench import Bench, compile_candidate, device_ms, time_candidates

PRUNE = 4.0  # times the best at one length, beyond which a tile is not tried at the next
FAMILIES = (*(f"float32:{head_dim}:tf32x3" for head_dim in (64, 128, 32, 16)),
            *(f"float32:{head_dim}:bf16x6" for head_dim in (128, 64, 32, 16)),  # after those it is compared with
            *(f"bfloat16:{head_dim}" for head_dim in (128, 64, 32, 16)))  # fmt: skip
COMPILED = {"spilled_bytes": 0, "shared_bytes": 0}


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """What to tune: families × lengths, or, with `shipped`, nothing."""

    families: tuple[str, ...] = option((), "dtype:head_dim[:precision], one or several", flag="--family")
    all_families: bool = option(False, "every family of the sweep", flag="--all")
    lengths: tuple[int, ...] = option(configs.ROW_CLASSES[:-2], "of one head; longer ones take minutes each", least=1)
    near_table: bool = option(False, "try only the table's tiles and split ones")
    workers: int = option(14, "processes that compile", least=1)
    table: str | None = option(None, "write a table.py with the winners", metavar="FILE")
    seconds: float | None = option(None, "start no family after this time", above=0)
    shipped: int = option(0, "only compile this many rows of the shipped table, for an H100; needs no GPU", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for family in self.families:
            dtype, _, rest = family.partition(":")
            if dtype not in ("bfloat16", "float16", "float32") or not rest.partition(":")[0].isdigit():
                raise ValueError(f"--family {family}: give dtype:head_dim[:precision], such as bfloat16:64")
        if not (self.families or self.all_families or self.shipped):
            raise ValueError("name families with --family dtype:head_dim[:precision], or give --all")


def case_of(family: str, length: int) -> Case:
    """The problem of a family such as `bfloat16:64` or `float32:64:tf32x3` at one length."""
    dtype, head_dim, *precision = family.split(":")
    return Case(length, int(head_dim), dtype, *precision)


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per family, length and kernel: the winner. All that was measured goes to a file per family."""
    if config.shipped:
        shipped(dict(list(configs.TABLE.items())[: config.shipped]), run)
        return
    families = [*config.families, *(FAMILIES if config.all_families else ())]
    missing = [f for f in families if not run.done("backward", family=f, length=config.lengths[-1])]
    rows, begin = table.ROWS, time.monotonic()
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        prepared = {family: Family(family, config.lengths, config.near_table, pool) for family in missing}
        for family, candidate in prepared.items():
            if config.seconds is not None and time.monotonic() - begin > config.seconds:
                break
            found = tune(candidate, pool)
            run.progress(f"{family}, {time.monotonic() - begin:.0f} s")
            write_json(to_records(family, found, run), run.path / f"{family.replace(':', '_')}.json")
            for case in candidate.cases:
                add_winners(run, family, case, found)
                if config.table:
                    rows = with_winners(rows, case, found, run)
                    Path(config.table).write_text(table_source(rows), encoding="utf-8")


def shipped(rows: dict[configs.Key, Choice], run: Run) -> None:
    """A row per kernel of the table: registers, spilled bytes and shared memory, or why it does not compile.

    A backward whose passes run jointly is one kernel, "backward"; one that is split has a kernel "split", and the two
    others for calls with a window.
    """
    compiled = functools.cache(compile_candidate)
    pace = Pace(len(rows), "configurations", run.progress)
    for key, choice in rows.items():
        case = Case(4096, key.head_dim, "float32" if key.bits == 32 else "bfloat16", key.precision)
        kernels = {kernel: getattr(choice, kernel) for kernel in configs.KERNELS}
        if choice.passes == "joint":
            kernels = {"forward": choice.forward, "backward": choice}
        elif choice.passes == "split":
            kernels["split"] = choice.dkdv
        for kernel, how in kernels.items():
            found = compiled((case, kernel, how))
            metrics = found if isinstance(found, dict) else {"status": found}
            run.add(kernel, metrics, family=f"{case.dtype}:{case.head_dim}:{case.precision}", length=key.rows,
                    tiles=describe(how))  # fmt: skip
        pace()


class Family:
    """The candidates of one dtype, head dim and arithmetic, which begin to compile in `pool` at once."""

    def __init__(self, family: str, lengths: tuple[int, ...], near_table: bool, pool: ProcessPoolExecutor):
        self.cases = [case_of(family, length) for length in lengths]
        of = self.cases[0]
        every = lambda kernel, *_: list(candidates(kernel, of.dtype, of.head_dim, of.precision))  # noqa: E731
        pick = from_table if near_table else every
        short = min(lengths) <= configs.LONGEST_SPLIT
        self.jobs = {k: [t for t in pick(k, self.cases[0], lengths) if short or not t.chunk] for k in TIMED}
        self.asked = [(kernel, tile) for kernel in TIMED for tile in self.jobs[kernel]]
        self.compiled = pool.map(compile_candidate, [(self.cases[0], *job) for job in self.asked], chunksize=2)


def tune(family: Family, pool: ProcessPoolExecutor) -> list[Row]:
    """All rows of one family."""
    cases, jobs = family.cases, family.jobs
    uses = dict(zip(family.asked, family.compiled, strict=True))
    rows, wholes = [], {}
    for case in cases:
        bench, guess = Bench(case), case.first_guess()
        guesses = dict.fromkeys(configs.KERNELS, guess) | {"split": Choice(guess, guess, guess)}
        found = {k: time_candidates(bench, case, k, chunked(jobs[k], case.length), uses, guesses[k]) for k in TIMED}
        for kernel, mine in found.items():
            rows += mine
            near = [row["how"] for row in mine if row["ms"] <= PRUNE * mine[0]["ms"] < float("inf")]
            jobs[kernel] = list(dict.fromkeys(map(shape_of, near))) if mine else jobs[kernel]
        wholes[case] = pairs(found)
    hows = dict.fromkeys(how for wholes_of in wholes.values() for how in wholes_of)
    uses = {("backward", how): COMPILED for how in hows}  # apart from the joint ones, their kernels have been
    asked = [("backward", how) for how in hows if how.passes == "joint"]
    compiled = pool.map(compile_candidate, [(cases[0], *job) for job in asked], chunksize=2)
    uses |= dict(zip(asked, compiled, strict=True))
    for case, hows in wholes.items():
        rows += time_candidates(Bench(case), case, "backward", hows, uses, hows[0])
    return rows


def best_of(rows: list[Row], kernel: str, length: int) -> Row:
    """The fastest row of a kernel at one length, among those that were timed again."""
    mine = [r for r in rows if (r["kernel"], r["length"]) == (kernel, length) and "sustained_ms" in r]
    return min(mine, key=lambda r: r["sustained_ms"])


def add_winners(run: Run, family: str, case: Case, found: Sequence[Row]) -> None:
    """A row for the best of each kernel at one length; of the backward with the best time of each way to run it."""
    for kernel in (*TIMED, "backward"):
        mine = [r for r in found if (r["kernel"], r["length"]) == (kernel, case.length)]
        if any("sustained_ms" in row for row in mine):
            best = best_of(mine, kernel, case.length)
            metrics = {name: best[name] for name in best.keys() - {"kernel", "length", "how", "why"}}
            if kernel == "backward":
                ways = {way: [r["ms"] for r in mine if r["how"].passes == way] for way in configs.PASSES}
                metrics |= {f"{way.replace(' ', '_')}_ms": min(ms) for way, ms in ways.items() if ms}
            run.add(kernel, metrics, family=family, length=case.length, tiles=describe(best["how"]))


def describe(how: Tile | Choice) -> str:
    """Tiles as queries × keys, warps, stages."""
    if isinstance(how, Choice):
        return f"{how.passes}: {describe(how.dkdv)} | {describe(how.dq)}"
    extras = " tma" * how.tma + f" c{how.chunk}" * bool(how.chunk)
    return f"{how.block_m}x{how.block_n} w{how.warps} s{how.stages}{extras}"


def beats_tf32(case: Case, found: list[Row], run: Run) -> bool:
    """Whether the winners of a bf16x6 case are faster than the table's row for tf32x3, timed now on the same shape."""
    other = dataclasses.replace(case, precision="tf32x3")
    bench, row = Bench(other), configs.lookup(other.key(generation()))
    theirs = sum(device_ms(lambda k=kernel, h=how: bench.launch(k, h), 5)
                 for kernel, how in (("forward", row.forward), ("backward", row)))
    ours = sum(best_of(found, kernel, case.length)["sustained_ms"] for kernel in ("forward", "backward"))
    run.progress(f"{case.length:6d} bf16x6 {1e3 * ours:8.1f} us, tf32x3 {1e3 * theirs:8.1f} us")
    return ours < theirs


def with_winners(rows: tuple, case: Case, found: list[Row], run: Run) -> tuple:
    """ROWS with the winners of one case; without a row for bf16x6 where tf32x3 is faster."""
    if case.precision == "bf16x6" and not beats_tf32(case, found, run):
        return tuple(row for row in rows if row[0] != dataclasses.astuple(case.key(generation())))
    return merge(rows, case, found, generation())


def merge(rows: tuple, case: Case, found: list[Row], gpu: str) -> tuple:
    """ROWS with the winners of one case in the place of their key."""
    forward, whole = (best_of(found, kernel, case.length) for kernel in ("forward", "backward"))
    origin = f"1x1x{case.length}x{case.head_dim}: {forward['sustained_ms']:.4f} + {whole['sustained_ms']:.4f} ms"
    tiles = (forward["how"], whole["how"].dkdv, whole["how"].dq)
    key = dataclasses.astuple(case.key(gpu))
    new = (key, origin, *map(fields, tiles), whole["how"].passes)
    return tuple(sorted((*(row for row in rows if row[0] != key), new), key=lambda row: row[0]))


def fields(tile: Tile) -> tuple:
    """A tile as in table.py: without the chunk if it is 0."""
    return dataclasses.astuple(tile) if tile.chunk else dataclasses.astuple(tile)[:-1]


def table_source(rows: tuple) -> str:
    """The text of table.py for these rows; its docstring is kept."""
    lines = [f'"""{table.__doc__}"""', "", "ROWS = ("]
    for key, origin, *tiles, passes in rows:
        lines.append(f'    ({key!r}, "{origin}",'.replace("'", '"'))
        line, end = "     " + ", ".join(repr(tile) for tile in tiles), f'"{passes}"),'
        lines += [f"{line}, {end}"] if len(line) + len(end) < 119 else [f"{line},", f"     {end}"]
    return "\n".join([*lines, ")", ""])


def to_records(family: str, found: list[Row], run: Run) -> list[Record]:
    """Everything measured for one family; a tile that could not be used has the reason in `status`."""
    records, header = [], run.header
    for row in found:
        metrics = {name: row[name] for name in row.keys() - {"kernel", "length", "how", "why"}}
        if row["ms"] == float("inf"):
            metrics = {"status": str(row["why"])}
        config = {"family": family, "length": row["length"]} | dataclasses.asdict(row["how"])
        records.append(
            Record(header.experiment, row["kernel"], config, metrics, dict(header.environment), header.commit)
        )
    return records
