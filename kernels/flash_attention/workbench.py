"""Inputs and launchers of one attention problem, for whoever measures or compiles the kernels one by one.

Nothing here is needed to compute attention: `experiments/tune_flash_attention.py` times candidates with it, and
`experiments/flash_attention_resources.py` asks the compiler what the shipped configurations use.
"""

import dataclasses
import re
import subprocess
import tempfile
from dataclasses import dataclass

import torch
import triton

from .._triton import compile_only
from . import backward_launch as backward
from . import forward, table
from .configs import Choice, Key, Tile, key_of
from .options import Problem

LIMIT_SHARED_BYTES = 227 * 1024  # of one program on an H100
LIMIT_SPILLED_BYTES = {"float32": 1024, "float16": 256, "bfloat16": 256}  # per thread; fp32 tiles rarely fit whole


@dataclass(frozen=True)
class Case:
    """One problem: q, k, v of (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    causal: bool = True
    precision: str = "ieee"

    def problem(self) -> Problem:
        """What the kernels are asked to compute."""
        return Problem((None, 0 if self.causal else None), self.head_dim**-0.5, self.precision)

    def tensor(self, device: str) -> torch.Tensor:
        """A random tensor of the case's shape and type on `device`."""
        shape = (self.batch, self.heads, self.length, self.head_dim)
        return torch.randn(shape, device=device, dtype=getattr(torch, self.dtype))

    def key(self, gpu: str) -> Key:
        """Where the table of configurations looks this case up."""
        return key_of(self.tensor("meta"), self.problem(), gpu)

    def first_guess(self) -> Tile:
        """A tile that fits every head dim and type."""
        return Tile(32, 16, 4, 1) if self.dtype == "float32" else Tile(64, 32, 4, 2)


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
            saved = self._delta()
            if how.passes == "split":
                backward.launch_split(saved, dq, dk, dv, self.problem, how.dkdv)
            elif how.passes == "joint":
                backward.launch_joint(saved, dq, dk, dv, self.problem, how.dkdv, how.dq)
            elif how.passes == "side by side":
                backward.launch_side_by_side(saved, dq, dk, dv, self.problem, how.dkdv, how.dq)
            else:
                backward.launch_dkdv(saved, dk, dv, self.problem, how.dkdv)
                backward.launch_dq(saved, dq, self.problem, how.dq)

    def outputs(self, kernel: str, how: Tile | Choice) -> tuple[torch.Tensor, ...]:
        """Copies of what a launch filled, poisoned before."""
        dq, dk, dv = self.grads
        filled = {"forward": (self.o,), "dkdv": (dk, dv), "dq": (dq,)}.get(kernel, self.grads)
        for x in filled:
            x.fill_(float("nan"))
        self.launch(kernel, how)
        return tuple(x.float() for x in filled)


def compile_candidate(job: tuple[Case, str, Tile | Choice]) -> dict[str, int] | str:
    """Compile without running; registers, spilled bytes and shared memory, or why it cannot be used."""
    case, kernel, how = job
    try:
        bench = Bench(case, "meta")
        with compile_only() as compiled:
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


def usable(use: dict[str, int] | str, case: Case) -> bool:
    """Whether a compiled candidate fits an H100 and keeps its registers."""
    return not isinstance(use, str) and (
        use["shared_bytes"] <= LIMIT_SHARED_BYTES and use["spilled_bytes"] <= LIMIT_SPILLED_BYTES[case.dtype]
    )


def fields(tile: Tile) -> tuple:
    """A tile as table.py has it: without the chunk where there is none."""
    return dataclasses.astuple(tile) if tile.chunk else dataclasses.astuple(tile)[:-1]


def table_source(rows: tuple) -> str:
    """The text of table.py for these rows; its docstring is kept."""
    lines = [f'"""{table.__doc__}"""', "", "ROWS = ("]
    for key, origin, *tiles, passes in rows:
        lines.append(f'    ({key!r}, "{origin}",'.replace("'", '"'))
        line, end = "     " + ", ".join(repr(tile) for tile in tiles), f'"{passes}"),'
        lines += [f"{line}, {end}"] if len(line) + len(end) < 119 else [f"{line},", f"     {end}"]
    return "\n".join([*lines, ")", ""])
