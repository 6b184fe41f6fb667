"""Find tile shapes for the attention kernels, or report what the shipped ones use.

    python experiments/tune_flash_attention.py --shape 1,16,16384,64         # search for one shape on this GPU
    python experiments/tune_flash_attention.py --standard half --narrow --table table.py
    python experiments/tune_flash_attention.py --report                      # registers, spills, shared memory

The search takes the three kernels one by one: it compiles every candidate in parallel, drops those that spill or do
not fit, times the rest and checks each against a small tile on poisoned outputs. A second round varies the head
grouping and the register limit around the leaders, and the best six are timed again in turns, for longer, because a
chip that gets hot slows all kernels. Everything measured is written to --out; --table writes a new
`kernels/flash_attention/table.py` in which the winners have replaced their rows. Nothing else changes.

The report compiles every row of the table for an H100 and needs no GPU; its figures depend on the Triton version.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import median

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from distlab.report import (
    Column,
    OutputFolder,
    Record,
    commit,
    environment,
    json_line,
    render,
    write_csv,
    write_json,
)
from kernels._triton import compile_only, generation
from kernels.flash_attention import backward_launch as backward
from kernels.flash_attention import configs, forward, table
from kernels.flash_attention.configs import Tile
from kernels.flash_attention.options import Problem

SHARED_MEMORY_LIMIT = 227 * 1024
SPILL_LIMIT = {"float32": 1024, "float16": 128, "bfloat16": 128}  # bytes per thread; fp32 tiles rarely fit whole
LEADERS = 4
DUELLISTS = 6
LAUNCHES = 5  # per timed graph replay


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape to tune for: q, k, v of (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    causal: bool
    precision: str = "ieee"

    def problem(self) -> Problem:
        return Problem((None, 0 if self.causal else None), self.head_dim**-0.5, self.precision)

    def tensor(self, device: str) -> torch.Tensor:
        shape = (self.batch, self.heads, self.length, self.head_dim)
        return torch.randn(shape, device=device, dtype=getattr(torch, self.dtype))


class Bench:
    """Inputs of one case and a launcher per kernel, which fills `outputs[kernel]`."""

    def __init__(self, case: Case, device: str = "cuda"):
        self.problem = case.problem()
        self.q, self.k, self.v, self.do, self.o = (case.tensor(device) for _ in range(5))
        self.lse = torch.empty(self.q.shape[:-1], device=device, dtype=torch.float32)
        self.first, self.second = (torch.empty_like(self.q) for _ in range(2))
        if device == "cuda":
            self.launch("forward", first_guess(case))
            self.o.copy_(self.first)
            self.saved = backward.launch_delta(self.q, self.k, self.v, self.o, self.lse, self.do)
        else:
            padded = torch.empty(*self.lse.shape[:2], -(-case.length // 128) * 128, device=device)
            self.saved = backward.Saved(self.q, self.k, self.v, self.do, padded, padded)

    def launch(self, kernel: str, tile: Tile) -> None:
        if kernel == "forward":
            forward.launch_forward(self.q, self.k, self.v, self.first, self.lse, self.problem, tile)
        elif kernel == "dkdv":
            backward.launch_dkdv(self.saved, self.first, self.second, self.problem, tile)
        else:
            backward.launch_dq(self.saved, self.first, self.problem, tile)

    def outputs(self, kernel: str, tile: Tile) -> tuple[torch.Tensor, ...]:
        self.first.fill_(float("nan"))
        self.second.fill_(float("nan"))
        self.launch(kernel, tile)
        return tuple(x.float() for x in ((self.first, self.second) if kernel == "dkdv" else (self.first,)))


class Hopper:
    """What Triton has to know of a GPU to compile for an H100 where there is none."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_candidate(job: tuple[Case, str, Tile]) -> dict[str, int] | str:
    """Compile without running; registers, spilled bytes and shared memory, or why it cannot be used."""
    case, kernel, tile = job
    try:
        bench = Bench(case, "meta")
        with compile_only() as compiled:
            bench.launch(kernel, tile)
        return resources(compiled[-1])
    except Exception as error:
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0][:80] if reason else ''}"


def resources(compiled: CompiledKernel) -> dict[str, int]:
    """Registers and bytes of stack (spilled registers) per thread, and shared memory, as `cuobjdump` reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout + text.stderr)
    return {"registers": int(found[1]), "spilled_bytes": int(found[2]), "shared_bytes": compiled.metadata.shared}


def usable(use: dict[str, int], case: Case) -> bool:
    return use["shared_bytes"] <= SHARED_MEMORY_LIMIT and use["spilled_bytes"] <= SPILL_LIMIT[case.dtype]


def device_ms(run: Callable[[], None], repetitions: int) -> float:
    """Median device time in ms of `repetitions` replays of a CUDA graph of several launches, without host time.

    The L2 is left as it is: long cases are larger than it, and short ones find their inputs there in use too.
    """
    run()  # loading the kernel is not allowed while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in times) / LAUNCHES


def duel(bench: Bench, kernel: str, rows: list[dict]) -> None:
    """Time the leaders again, in turns and for longer, so that a hot chip slows them alike; adds `sustained_ms`."""
    times: dict[int, list[float]] = {i: [] for i in range(len(rows))}
    for _ in range(5):
        for i, row in enumerate(rows):
            tile = Tile(**row["tile"])
            times[i].append(device_ms(lambda t=tile: bench.launch(kernel, t), 4))
    for i, row in enumerate(rows):
        row["sustained_ms"] = median(times[i])


def first_guess(case: Case) -> Tile:
    """A tile that fits every head dim and type, to compare the others with."""
    return Tile(32, 16, 4, 1) if case.dtype == "float32" else Tile(64, 32, 4, 2)


def shapes(kernel: str, case: Case, narrow: bool) -> list[Tile]:
    """First round: every tile shape and pipeline depth that could fit, or only the likely ones (`narrow`)."""
    few = case.batch * case.heads * case.length <= configs.FEW_ROWS
    if case.dtype == "float32":
        owns, others, depths, ways = (32, 64), (32, 64), (2, 3), (False,)
        owns = (16, *owns) if few else owns
        if not narrow:
            owns, others, ways = (16, 32, 64, 128), (16, 32, 64, 128), (False, True)
    else:
        owns, others, depths, ways = (64, 128), (64, 128) if case.head_dim <= 128 else (32, 64), (2, 3), (True,)
        ways = (False, True) if case.head_dim == 128 else ways
        owns = (32, *owns) if few else owns
        if not narrow:
            others, depths, ways = (32, 64, 128), (2, 3, 4), (False, True)
    tiles = []
    for own, other, warps, stages, tma in itertools.product(owns, others, (2, 4, 8), depths, ways):
        most = 8 if case.dtype == "float32" and own >= 32 else max(4, own // 16)
        if not (2 if own <= 32 else 4) <= warps <= most:
            continue
        m, n = (other, own) if kernel == "dkdv" else (own, other)
        tiles.append(Tile(m, n, warps, stages, tma=tma))
    return tiles


def variations(tile: Tile, case: Case, narrow: bool) -> list[Tile]:
    """Second round: head grouping and register limits around one leader."""
    groups = [g for g in ((4,) if narrow else (2, 4, 8, 16)) if g <= case.batch * case.heads]
    limits = () if narrow else {2: (), 4: (96, 128, 168), 8: (128, 168)}[tile.warps]
    made = [dataclasses.replace(tile, head_group=g) for g in groups]
    made += [dataclasses.replace(tile, maxnreg=r) for r in limits]
    return made + [dataclasses.replace(tile, maxnreg=r, head_group=groups[-1]) for r in limits if groups]


def measure(bench: Bench, kernel: str, jobs: list[Tile], found: list[dict], reference: tuple[torch.Tensor, ...],
            case: Case, pool: ProcessPoolExecutor) -> None:
    """Append one row per usable tile to `found`: time, resources, error against the reference outputs."""
    best = min((row["ms"] for row in found), default=float("inf"))
    for tile, use in zip(jobs, pool.map(compile_candidate, [(case, kernel, t) for t in jobs]), strict=True):
        row = {"kernel": kernel, "tile": dataclasses.asdict(tile)}
        if isinstance(use, str) or not usable(use, case):
            found.append(row | {"ms": float("inf"), "why": use})
            continue
        try:
            outputs = bench.outputs(kernel, tile)
            error = max(((x - r).norm() / r.norm()).item() for x, r in zip(outputs, reference, strict=True))
            ms = device_ms(lambda t=tile: bench.launch(kernel, t), 2)
            if ms < 1.15 * best:
                ms = device_ms(lambda t=tile: bench.launch(kernel, t), 5)
        except Exception as problem:
            found.append(row | {"ms": float("inf"), "why": str(problem)[:120]})
            continue
        best = min(best, ms)
        found.append(row | use | {"ms": ms, "rms_error": error})


def tune(case: Case, kernels: list[str], narrow: bool, pool: ProcessPoolExecutor) -> list[dict]:
    """All rows of all kernels for one case."""
    bench = Bench(case)
    rows = []
    for kernel in kernels:
        found: list[dict] = []
        reference = bench.outputs(kernel, first_guess(case))
        measure(bench, kernel, shapes(kernel, case, narrow), found, reference, case, pool)
        leaders = sorted(found, key=lambda r: r["ms"])[: 2 if narrow else LEADERS]
        more = [t for row in leaders for t in variations(Tile(**row["tile"]), case, narrow)]
        measure(bench, kernel, more, found, reference, case, pool)
        found.sort(key=lambda r: r["ms"])
        finalists = [row for row in found[:DUELLISTS] if row["ms"] < float("inf")]
        duel(bench, kernel, finalists)
        rows += sorted(finalists, key=lambda r: r["sustained_ms"]) + found[len(finalists):]
    return rows


def show(case: Case, rows: list[dict], top: int) -> None:
    """Print the best rows of each kernel and the counts of the rest."""
    print(f"\n{case}")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        usable = [row for row in mine if row["ms"] < float("inf")]
        print(f"  {kernel}: {len(mine)} candidates, {len(usable)} usable")
        for row in usable[:top]:
            tile = ", ".join(f"{k}={v}" for k, v in row["tile"].items() if v is not None and v is not False)
            print(f"    {row.get('sustained_ms', float('nan')):8.4f} ms ({row['ms']:.4f} alone)  "
                  f"regs {row['registers']:3d} spill {row['spilled_bytes']:4d} smem {row['shared_bytes']:6d}  "
                  f"err {row['rms_error']:.1e}  {tile}")


def report() -> list[Record]:
    """One record per key and kernel of the shipped table: registers, spilled bytes, shared memory."""
    triton.runtime.driver.set_active(Hopper())
    records = []
    where, code = environment("cpu"), commit()
    for key, *tiles in ((key, *configs.TABLE[key]) for key in configs.TABLE):
        rows = 1 if key.few else 16
        case = Case(1, rows, 4096, key.head_dim, "float32" if key.bits == 32 else "bfloat16", key.causal, key.precision)
        for kernel, tile in zip(configs.KERNELS, tiles, strict=True):
            use = compile_candidate((case, kernel, tile))
            metrics = use if isinstance(use, dict) else {"status": use}
            config = dataclasses.asdict(key) | {"kernel": kernel} | dataclasses.asdict(tile)
            records.append(Record("flash_attention_resources", kernel, config, metrics, where, code))
    return records


REPORT_COLUMNS = [
    Column("config.bits", "bits"), Column("config.precision", "precision"), Column("config.head_dim", "d"),
    Column("config.causal", "causal"), Column("config.few", "few rows"), Column("variant", "kernel"),
    Column("config.block_m", "block m"), Column("config.block_n", "block n"), Column("config.warps", "warps"),
    Column("config.stages", "stages"), Column("config.tma", "tma"), Column("metrics.registers", "registers"),
    Column("metrics.spilled_bytes", "spilled B"), Column("metrics.shared_bytes", "shared B", ",d"),
]


def table_source(rows: tuple) -> str:
    """The text of table.py for these rows; its docstring is kept."""
    lines = [f'"""{table.__doc__}"""', "", "ROWS = ("]
    for key, origin, *tiles in rows:
        lines.append(f'    ({key!r}, "{origin}",'.replace("'", '"'))
        lines.append("     " + ", ".join(repr(tile) for tile in tiles) + "),")
    return "\n".join([*lines, ")", ""])


def merge(rows: tuple, case: Case, found: list[dict], gpu: str) -> tuple:
    """ROWS with the winners of one case in the place of their key."""
    bench = Bench(case, "meta")
    key = configs.key_of(bench.q, bench.problem, gpu)
    best = [min((r for r in found if r["kernel"] == kernel and "sustained_ms" in r), key=lambda r: r["sustained_ms"])
            for kernel in configs.KERNELS]
    shape = "x".join(map(str, (case.batch, case.heads, case.length, case.head_dim)))
    origin = f"{shape}: {' '.join(format(row['sustained_ms'], '.3f') for row in best)} ms"
    new = (dataclasses.astuple(key), origin, *(tuple(row["tile"].values()) for row in best))
    return (*(row for row in rows if row[0] != new[0]), new)


def to_records(case: Case, found: list[dict], commit_id: str | None) -> list[Record]:
    """Everything measured for one case; a tile that could not be used has the reason in `status`."""
    where, code = environment("cuda"), commit(commit_id)
    records = []
    for row in found:
        metrics = {name: value for name, value in row.items() if name not in ("kernel", "tile", "why")}
        if metrics["ms"] == float("inf"):
            metrics = {"status": str(row["why"])}
        config = dataclasses.asdict(case) | row["tile"]
        records.append(Record("tune_flash_attention", row["kernel"], config, metrics, where, code))
    return records


STANDARD = {  # batch, heads, length, head dim; the small ones have few rows in the sense of configs.FEW_ROWS
    "half": [(1, 16, 16384, 64), (1, 16, 16384, 128), (1, 16, 8192, 32), (1, 16, 8192, 16), (1, 4, 8192, 256),
             (1, 1, 4096, 64), (1, 1, 4096, 128), (1, 1, 4096, 32), (1, 1, 4096, 16), (1, 1, 4096, 256)],
    "full": [(1, 16, 16384, 64), (1, 16, 16384, 128)],
    "single": [(1, 16, 8192, 64), (1, 1, 4096, 64), (1, 16, 8192, 128), (1, 1, 4096, 128), (1, 16, 8192, 32),
               (1, 1, 4096, 32), (1, 16, 8192, 16), (1, 1, 4096, 16)],
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="batch,heads,length,head_dim; may be repeated")
    parser.add_argument("--standard", choices=STANDARD, help="a list of shapes; half and single are causal")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--precision", default="ieee", help="of float32 products: ieee, tf32x3, tf32")
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--kernels", nargs="+", default=list(configs.KERNELS), choices=configs.KERNELS)
    parser.add_argument("--narrow", action="store_true", help="only the likely candidates")
    parser.add_argument("--top", type=int, default=2, help="rows to print per kernel")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--table", type=pathlib.Path, help="write a table.py with the winners; needs all kernels")
    parser.add_argument("--report", action="store_true", help="no search: what the shipped configurations use")
    parser.add_argument("--commit", help="recorded where the tree has no git")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("outputs"))
    return parser.parse_args(argv)


def search(options: argparse.Namespace) -> None:
    """Tune for every shape asked for, one file of everything measured per shape."""
    folder = OutputFolder(options.out, "tune_flash_attention").path
    asked = [tuple(map(int, shape.split(","))) for shape in options.shape or []]
    shapes_asked = asked + STANDARD.get(options.standard, []) or [(1, 16, 16384, 64)]
    causal = not (options.full or options.standard == "full")
    rows = table.ROWS
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        for shape in shapes_asked:
            case = Case(*shape, options.dtype, causal, options.precision)
            found = tune(case, options.kernels, options.narrow, pool)
            show(case, found, options.top)
            name = "x".join(map(str, shape)) + f"_{options.dtype}_{options.precision}{'' if causal else '_full'}.json"
            write_json(to_records(case, found, options.commit), folder / name)
            if options.table:
                rows = merge(rows, case, found, generation())
                options.table.write_text(table_source(rows))
            torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.report:
        records = report()
        folder = OutputFolder(options.out, "flash_attention_resources").path
        write_json(records, folder / "records.json")
        write_csv(records, folder / "records.csv")
        print(render(records, REPORT_COLUMNS))
        print(json_line("flash_attention_resources", records, folder))
        return 0
    if not torch.cuda.is_available():
        print("tuning needs a GPU (--report does not)", file=sys.stderr)
        return 1
    search(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
