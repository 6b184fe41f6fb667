"""One case on a GPU: its tensors, its kernels launched with any tile, compiled and timed."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from statistics import median

import torch
import triton

from distlab.measure import interleave, replay_ms
from kernels._compile import compile_for
from kernels._triton import compile_only
from kernels.flash_attention import backward_launch as backward
from kernels.flash_attention import forward
from kernels.flash_attention.configs import Choice, Tile

from .candidates import Case, Row, shape_of

GRAPH_MS = 0.5  # of launches in one timed graph replay, so that starting it weighs little
FINALISTS = 4
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}  # of RMS against the first guess
LIMIT_SHARED_BYTES = 227 * 1024  # of one program on an H100
LIMIT_SPILLED_BYTES = {"float32": 1024, "float16": 256, "bfloat16": 256}  # per thread; fp32 tiles rarely fit whole


class Bench:
    """Inputs of a case and a launcher per kernel: "forward", "dkdv", "dq", "split", or "backward" for a `Choice`'s."""

    def __init__(self, case: Case, device: str = "cuda"):
        self.problem = case.problem()
        self.q, self.k, self.v, self.do, self.o = (case.tensor(device) for _ in range(5))
        self.lse = torch.empty(self.q.shape[:-1], device=device, dtype=torch.float32)
        self.grads = tuple(torch.empty_like(self.q) for _ in range(3))
        if device == "cuda":
            self.launch("forward", case.first_guess())
            self.saved = self._delta()
        else:
            padded = torch.empty(*self.lse.shape[:2], -(-case.length // 128) * 128, device=device)
            self.saved = backward.Saved(self.q, self.k, self.v, self.do, padded, padded)

    def _delta(self) -> backward.Saved:
        return backward.launch_delta(self.q, self.k, self.v, self.o, self.lse, self.do)

    def launch(self, kernel: str, how: Tile | Choice) -> None:
        """Run one kernel with a tile, on this bench's tensors."""
        dq, dk, dv = self.grads
        if kernel == "forward":
            forward.launch_forward(self.q, self.k, self.v, self.o, self.lse, self.problem, how)
        elif kernel == "dkdv":
            backward.launch_dkdv(self.saved, dk, dv, self.problem, how)
        elif kernel == "dq":
            backward.launch_dq(self.saved, dq, self.problem, how)
        elif kernel == "split":
            backward.launch_split(self.saved, dq, dk, dv, self.problem, how)
        else:
            backward.launch_backward(self._delta(), dq, dk, dv, self.problem, how.passes, how.dkdv, how.dq)

    def outputs(self, kernel: str, how: Tile | Choice) -> tuple[torch.Tensor, ...]:
        """Copies of what a launch filled, poisoned before."""
        dq, dk, dv = self.grads
        filled = {"forward": (self.o,), "dkdv": (dk, dv), "dq": (dq,)}.get(kernel, self.grads)
        for x in filled:
            x.fill_(float("nan"))
        self.launch(kernel, how)
        return tuple(x.float() for x in filled)


def compile_candidate(job: tuple[Case, str, Tile | Choice]) -> dict[str, int] | str:
    """Compile without running; registers, spilled bytes and shared memory, or why it cannot be used.

    Without a GPU, for an H100.
    """
    case, kernel, how = job
    try:
        bench = Bench(case, "meta")
        with compile_only() if torch.cuda.is_available() else compile_for(90) as compiled:
            bench.launch(kernel, how)
        return resources([c for c in compiled if c.metadata.name not in ("combine_kernel", "sum_kernel")][-1])
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


def _usable(use: dict[str, int] | str, case: Case) -> bool:
    """Whether a compiled candidate fits an H100 and keeps its registers."""
    return not isinstance(use, str) and (
        use["shared_bytes"] <= LIMIT_SHARED_BYTES and use["spilled_bytes"] <= LIMIT_SPILLED_BYTES[case.dtype]
    )


def device_ms(run: Callable[[], None], repetitions: int) -> float:
    """Median device time in ms of one launch, from replays of a CUDA graph of several."""
    return median(replay_ms(run, repetitions, graph_ms=GRAPH_MS, calls=(5, 20), tidy=False))


def time_candidates(bench: Bench, case: Case, kernel: str, jobs: list, uses: dict, guess: Tile | Choice) -> list[Row]:
    """One row per job: time, resources and error, or why there is none; fastest first."""
    reference = jobs and bench.outputs("backward" if kernel == "split" else kernel, guess)
    rows = []
    for how in jobs:
        use = uses[kernel, shape_of(how)]
        row: Row = {"kernel": kernel, "length": case.length, "how": how, "ms": float("inf")}
        rows.append(row)
        if not _usable(use, case):
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
