"""Find tile shapes for the attention kernels.

    python experiments/tune_flash_attention.py --family bfloat16,64                   # one type and head dim
    python experiments/tune_flash_attention.py --all --table kernels/flash_attention/table.py --stamp full

A family is a type, an arithmetic and a head dim; it is tuned for one head of each length given, which are the row
classes of `configs.ROW_CLASSES`. Every candidate of the three kernels is compiled in parallel processes, those that
spill or do not fit are dropped, the rest are checked against a small tile on poisoned outputs and timed, length after
length, as long as they stay near the best. Forward and backward are tried split over chunks too, up to 4,096 rows. Then
the backward is timed as a whole, in every way of `Choice.passes`. The best of each are timed again in turns.

Everything measured goes to a file per family; --table rewrites `kernels/flash_attention/table.py` after each family,
and a stamp that exists is resumed, so that a cut-off run keeps what it has.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from statistics import median

import torch

from distlab.ending import how_to_continue
from distlab.measure.clock import replay_ms
from distlab.measure.rounds import interleave
from distlab.report import OutputFolder, Record, commit, environment, run_to_end, write_json
from distlab.report.options import real, whole
from kernels._triton import generation
from kernels.flash_attention import configs, table
from kernels.flash_attention.configs import Choice, Tile
from kernels.flash_attention.workbench import Bench, Case, compile_candidate, fields, table_source, usable

GRAPH_MS = 0.5  # of launches in one timed graph replay, so that starting it weighs little
FINALISTS = 4
PAIRS = 3
PRUNE = 4.0  # times the best at one length, beyond which a tile is not tried at the next
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}  # of RMS against the first guess
FAMILIES = [*(("float32", head_dim, "tf32x3") for head_dim in (64, 128, 32, 16)),
            *(("float32", head_dim, "bf16x6") for head_dim in (128, 64, 32, 16)),  # after those it is compared with
            *(("bfloat16", head_dim, "ieee") for head_dim in (128, 64, 32, 16))]
COMPILED = {"spilled_bytes": 0, "shared_bytes": 0}
CHUNKS = (64, 128, 256, 512, 1024)
TIMED = (*configs.KERNELS, "split")
Row = dict[str, object]


def device_ms(run: Callable[[], None], repetitions: int) -> float:
    """Median device time in ms of one launch, from replays of a CUDA graph of several."""
    return median(replay_ms(run, repetitions, graph_ms=GRAPH_MS, calls=(5, 20), tidy=False))


def candidates(kernel: str, dtype: str, head_dim: int, precision: str = "ieee") -> Iterator[Tile]:
    """Tiles of 16 to 64 rows of one's own, by the warps that can share them; larger ones lost at every length.

    None that is miscompiled. Those of a split pass, and the same of the forward once more, carry the
    smallest chunk. With "bf16x6" whole warpgroups multiply, 64 rows of one's own each, and nothing is split:
    it is for long calls.
    """
    bits = 32 if dtype == "float32" else 16
    if precision == "bf16x6":
        depths = (1, 2) if head_dim > 64 else (1, 2, 3)
        for own, other, stages in itertools.product((64, 128), (32, 64), depths if kernel != "split" else ()):
            m, n = (other, own) if kernel == "dkdv" else (own, other)
            yield Tile(m, n, own // 16, stages)
        return
    if kernel == "split":
        wide = dtype != "float32"
        for m, n, count in itertools.product((16, 32, 64), (32, 64, 128) if wide else (16, 32, 64), (4, 8)):
            tile = Tile(m, n, count, 2, chunk=CHUNKS[0])
            if not configs.miscompiled(bits, tile):
                yield tile
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
            if configs.miscompiled(bits, tile):
                continue
            yield tile
            if kernel == "forward" and other > others[0]:
                yield dataclasses.replace(tile, chunk=CHUNKS[0])


def from_table(kernel: str, case: Case, lengths: list[int]) -> list[Tile]:
    """The table's own tiles for these lengths, and all split ones: enough to see whether splitting pays."""
    rows = [configs.lookup(dataclasses.replace(case, length=length).key(generation())) for length in lengths]
    known = [] if kernel == "split" else [dataclasses.replace(getattr(row, kernel), chunk=0) for row in rows]
    split = (t for t in candidates(kernel, case.dtype, case.head_dim, case.precision) if t.chunk)
    return list(dict.fromkeys([*known, *split]))


def chunked(tiles: list[Tile], length: int) -> list[Tile]:
    """Each tile that carries a chunk with every chunk that splits this length."""
    chunks = [c for c in CHUNKS if c < length <= configs.LONGEST_SPLIT and length // c <= 32]
    return [dataclasses.replace(t, chunk=c) for t in tiles for c in (chunks if t.chunk else (0,))
            if c == 0 or c >= max(t.block_m, t.block_n)]


def shape_of(how: Tile | Choice) -> Tile | Choice:
    """What is compiled: the same for all chunks."""
    return dataclasses.replace(how, chunk=min(how.chunk, CHUNKS[0])) if isinstance(how, Tile) else how


def measure(bench: Bench, case: Case, kernel: str, jobs: list, uses: dict, guess: Tile | Choice) -> list[Row]:
    """One row per job: time, resources and error, or why there is none; fastest first."""
    reference = jobs and bench.outputs("backward" if kernel == "split" else kernel, guess)
    rows = []
    for how in jobs:
        use = uses[kernel, shape_of(how)]
        row: Row = {"kernel": kernel, "length": case.length, "how": how, "ms": float("inf")}
        rows.append(row)
        if not usable(use, case):
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


def pairs(found: dict[str, list[Row]]) -> list[Choice]:
    """Backwards worth timing as a whole: the best tiles in turn, good ones at once on two streams and in one launch."""
    for kernel in configs.KERNELS:
        if not any(row["ms"] < float("inf") for row in found[kernel]):
            raise ValueError(f"no tile of {kernel} can be used: {[row.get('why') for row in found[kernel]]}")
    forward, dkdv, dq = (found[kernel][0]["how"] for kernel in configs.KERNELS)
    usable = {kernel: [row for row in found[kernel] if row["ms"] < float("inf")] for kernel in ("dkdv", "dq")}
    joint = []
    for a, b in itertools.product(usable["dkdv"], usable["dq"]):
        if a["how"].launch_options() == b["how"].launch_options():
            joint.append((max(a["ms"], b["ms"]) + 0.3 * min(a["ms"], b["ms"]), a["how"], b["how"]))
    joint.sort(key=lambda pair: pair[0])
    best = itertools.product(usable["dkdv"][:3], usable["dq"][:2])
    split = [row["how"] for row in found["split"][:2] if row["ms"] < float("inf")]
    return [
        Choice(forward, dkdv, dq),
        *(Choice(forward, tile, dq, "split") for tile in split),
        *(Choice(forward, a["how"], b["how"], "side by side") for a, b in best),
        *(Choice(forward, a, b, "joint") for _, a, b in joint[:PAIRS]),
    ]


class Family:
    """The candidates of one type, head dim and arithmetic, which begin to compile in `pool` at once."""

    def __init__(self, dtype: str, head_dim: int, precision: str, lengths: list[int], near_table: bool,
                 pool: ProcessPoolExecutor):
        self.cases = [Case(1, 1, length, head_dim, dtype, True, precision) for length in lengths]
        pick = from_table if near_table else lambda kernel, *_: list(candidates(kernel, dtype, head_dim, precision))
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
        found = {k: measure(bench, case, k, chunked(jobs[k], case.length), uses, guesses[k]) for k in TIMED}
        for kernel, mine in found.items():
            rows += mine
            near = [row["how"] for row in mine if row["ms"] <= PRUNE * mine[0]["ms"] < float("inf")]
            jobs[kernel] = list(dict.fromkeys(map(shape_of, near))) if mine else jobs[kernel]
        wholes[case] = pairs(found)
    hows = dict.fromkeys(how for hows in wholes.values() for how in hows)
    uses = {("backward", how): COMPILED for how in hows}  # apart from the joint ones, their kernels have been
    asked = [("backward", how) for how in hows if how.passes == "joint"]
    compiled = pool.map(compile_candidate, [(cases[0], *job) for job in asked], chunksize=2)
    uses |= dict(zip(asked, compiled, strict=True))
    for case, hows in wholes.items():
        rows += measure(Bench(case), case, "backward", hows, uses, hows[0])
    return rows


def best_of(rows: list[Row], kernel: str, length: int) -> Row:
    mine = [r for r in rows if (r["kernel"], r["length"]) == (kernel, length) and "sustained_ms" in r]
    return min(mine, key=lambda r: r["sustained_ms"])


def show(rows: list[Row], lengths: list[int]) -> None:
    """The best of each kernel and length, and of each way to run the backward."""
    for length in lengths:
        for kernel in (*TIMED, "backward"):
            mine = [r for r in rows if (r["kernel"], r["length"]) == (kernel, length)]
            for row in mine[:1]:
                print(f"  {length:6d} {kernel:8s} {1e3 * row.get('sustained_ms', 0):8.1f} us  {short(row['how'])}")
            if kernel == "backward":
                by_way = {w: min((r["ms"] for r in mine if r["how"].passes == w), default=0) for w in configs.PASSES}
                print(" " * 16, ", ".join(f"{way} {1e3 * ms:.1f} us" for way, ms in by_way.items()))


def short(how: Tile | Choice) -> str:
    if isinstance(how, Choice):
        return f"{how.passes}, dkdv {short(how.dkdv)}, dq {short(how.dq)}"
    extras = (" tma" if how.tma else "") + (f" c{how.chunk}" if how.chunk else "")
    return f"{how.block_m}x{how.block_n} w{how.warps} s{how.stages}{extras}"


def beats_tf32(case: Case, found: list[Row]) -> bool:
    """Whether the winners of a bf16x6 case are faster than the table's row for tf32x3, timed now on the same shape."""
    bench = Bench(dataclasses.replace(case, precision="tf32x3"))
    row = configs.lookup(dataclasses.replace(case, precision="tf32x3").key(generation()))
    theirs = sum(device_ms(lambda k=kernel, h=how: bench.launch(k, h), 5)
                 for kernel, how in (("forward", row.forward), ("backward", row)))
    ours = sum(best_of(found, kernel, case.length)["sustained_ms"] for kernel in ("forward", "backward"))
    print(f"  {case.length:6d} bf16x6 {1e3 * ours:8.1f} us, tf32x3 {1e3 * theirs:8.1f} us")
    return ours < theirs


def merge(rows: tuple, case: Case, found: list[Row], gpu: str) -> tuple:
    """ROWS with the winners of one case in the place of their key."""
    forward, whole = (best_of(found, kernel, case.length) for kernel in ("forward", "backward"))
    shape = "x".join(map(str, (case.batch, case.heads, case.length, case.head_dim)))
    origin = f"{shape}: {forward['sustained_ms']:.4f} + {whole['sustained_ms']:.4f} ms"
    tiles = (forward["how"], whole["how"].dkdv, whole["how"].dq)
    key = dataclasses.astuple(case.key(gpu))
    new = (key, origin, *map(fields, tiles), whole["how"].passes)
    return tuple(sorted((*(row for row in rows if row[0] != key), new), key=lambda row: row[0]))


def to_records(family: tuple, found: list[Row], commit_id: str | None) -> list[Record]:
    """Everything measured for one family; a tile that could not be used has the reason in `status`."""
    where, code = environment("cuda"), commit(commit_id)
    records = []
    for row in found:
        metrics = {name: row[name] for name in row.keys() - {"kernel", "length", "how", "why"}}
        if row["ms"] == float("inf"):
            metrics = {"status": str(row["why"])}
        config = dict(zip(("dtype", "head_dim", "precision"), family, strict=True)) | {"length": row["length"]}
        records.append(Record("tune_flash_attention", row["kernel"], config | dataclasses.asdict(row["how"]), metrics,
                              where, code))
    return records


def family_of(text: str) -> tuple[str, int, str]:
    """(dtype, head_dim, precision) of an option such as `bfloat16,64` or `float32,64,tf32x3`."""
    dtype, _, rest = text.partition(",")
    head_dim, _, precision = rest.partition(",")
    if dtype not in ("bfloat16", "float16", "float32") or not head_dim.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give dtype,head_dim[,precision], such as bfloat16,64")
    return dtype, int(head_dim), precision or "ieee"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tune_flash_attention", description=__doc__, formatter_class=raw)
    parser.add_argument("--family", type=family_of, action="append", default=[],
                        help="dtype,head_dim[,precision]; may be repeated")
    parser.add_argument("--all", action="store_true", help="every family of the sweep")
    parser.add_argument("--lengths", type=whole(), nargs="+", default=list(configs.ROW_CLASSES[:-2]),
                        help="of one head [1024 … 16384; the table's two longer classes take minutes each]")
    parser.add_argument("--near-table", action="store_true", help="try only the table's tiles and split ones")
    parser.add_argument("--workers", type=whole(), default=14, help="processes that compile")
    parser.add_argument("--table", type=pathlib.Path, help="write a table.py with the winners")
    parser.add_argument("--seconds", type=real(above=0), default=float("inf"), help="start no family after this time")
    parser.add_argument("--commit", help="recorded where the tree has no git")
    parser.add_argument("--out", default="outputs")
    parser.add_argument("--stamp", help="name of this run; families it has are not tuned again")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return run_to_end("tune_flash_attention", lambda: tune_all(options))


def tune_all(options: argparse.Namespace) -> int:
    """Tune every family that was asked for and has no file yet.

    Raises:
        ValueError: no GPU, or no family.
    """
    families = [*options.family, *(FAMILIES if options.all else [])]
    if not families:
        raise ValueError("name families with --family dtype,head_dim[,precision], or give --all")
    if not torch.cuda.is_available():
        raise ValueError("tuning needs a GPU, and this machine has none")
    folder = OutputFolder(options.out, "tune_flash_attention", options.stamp).path
    how_to_continue(f"the same command with --stamp {folder.name} continues")
    rows, begin = table.ROWS, time.monotonic()
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        paths = {family: folder / "{}_{}_{}.json".format(*family) for family in families}
        missing = {family: Family(*family, options.lengths, options.near_table, pool)
                   for family in families if not paths[family].exists()}
        for family, prepared in missing.items():
            dtype, head_dim, precision = family
            if time.monotonic() - begin > options.seconds:
                break
            found = tune(prepared, pool)
            print(f"{family}, {time.monotonic() - begin:.0f} s")
            show(found, options.lengths)
            write_json(to_records(family, found, options.commit), paths[family])
            for length in options.lengths if options.table else ():
                case = Case(1, 1, length, head_dim, dtype, True, precision)
                if precision == "bf16x6" and not beats_tf32(case, found):
                    rows = tuple(row for row in rows if row[0] != dataclasses.astuple(case.key(generation())))
                else:
                    rows = merge(rows, case, found, generation())
                options.table.write_text(table_source(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
