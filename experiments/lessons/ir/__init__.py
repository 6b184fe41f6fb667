"""What does the compiler make of a kernel, from IR to instructions?

    distlab run ir softmax                          # all of kernels/softmax.py; needs no GPU
    distlab run ir matmul.persistent_kernel         # one kernel
    distlab run ir attention_steps lesson_banks     # the kernels of the lessons
    distlab run ir                                  # every kernel, a minute or two
    distlab run ir rmsnorm --capability 80          # for an A100

Kernels are compiled and not run (`kernels._compile`), at sizes of a benchmark (`catalogue`). Each
leaves a file per stage in the run's folder, `stages/MODULE.KERNEL.STAGE`, to be read in this order:

    ttir    the kernel as written: blocks, not threads
    ttgir   the same with layouts: which thread has what, what is in shared memory, what is loaded
            ahead
    llir    one thread, in LLVM's IR
    ptx     NVIDIA's portable assembler, with endless registers
    sass    the instructions, with registers assigned

The table says what is scarce: registers, spilled bytes, shared memory, and how many programs of it
an SM holds at once.
"""

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from distlab import hardware
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
from distlab.theory.gpu import occupancy
from kernels._dispatch import installed

from .catalogue import MODULES

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
GPUS = {80: hardware.A100_SXM_80GB, 90: hardware.H100_SXM}
CAPABILITIES = (80, 86, 89, 90)
# Read in a worker before anything else: where kernels are interpreted there is nothing to compile.
COMPILES = "import os; os.environ.pop('TRITON_INTERPRET', None)"


@dataclass(frozen=True)
class IrConfig(Options):
    """Options of a run: the kernels to compile, and the GPU to compile for."""

    kernels: tuple[str, ...] = option((), "kernels, MODULE or MODULE.KERNEL [all]", positional=True)
    capability: int = option(90, "compute capability to compile for", choices=CAPABILITIES)
    workers: int = option(2, "number of processes that compile", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.kernels if name.partition(".")[0] not in MODULES]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: give MODULE or MODULE.KERNEL of {', '.join(MODULES)}"
            )


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    Attributes:
        name: MODULE.KERNEL.
        constants: names and values of its constants, for the table.
        metrics: resources that it uses, and counts of instructions.
        stages: stage → text.
    """

    name: str
    constants: str
    metrics: dict[str, Any]
    stages: dict[str, str]


def compile_module(module: str, capability: int) -> tuple[list[Compiled], str | None]:
    """Return every kernel of a module, and the reason why others are missing."""
    from kernels._compile import compile_for

    problem = None
    with compile_for(capability) as found:
        try:
            MODULES[module]()
        except Exception as error:  # for example, an older GPU has no tensor descriptors
            # The error's message may be long. Its first line names the missing feature.
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
    return [described(module, kernel, capability) for kernel in found], problem


def disassembled(cubin: bytes) -> str:
    """Return a binary's instructions, by the disassembler of Triton or of a CUDA toolkit."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        # The disassembler is another process, which reads the file by its name.
        file.flush()
        # -c prints the code alone, without the binary's other sections.
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def described(module: str, kernel: Any, capability: int) -> Compiled:
    """Return name, constants, resources and stages of one of Triton's compiled kernels."""
    from kernels._compile import resources

    # Gluon has no TTIR
    stages = {stage: str(kernel.asm[stage]) for stage in STAGES[:-1] if stage in kernel.asm}
    with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError):  # no disassembler
        stages["sass"] = disassembled(kernel.asm["cubin"])
    used, warps = resources(kernel), kernel.metadata.num_warps
    metrics: dict[str, Any] = used | {"warps": warps, "status": "ok"}
    spec = GPUS.get(capability)
    if spec is not None:
        resident = occupancy(spec, 32 * warps, used["registers"], used["shared_bytes"])
        metrics |= {"programs_per_sm": resident.blocks, "limited_by": resident.limiter}
    # The number of lines shows how one level becomes many instructions of the next.
    metrics |= {f"{stage}_lines": text.count("\n") for stage, text in stages.items()}
    ptx = stages["ptx"]
    metrics["matmul"] = ""
    for instruction in ("mma.sync", "wgmma.mma_async"):  # if both occur, wgmma is noted
        if instruction in ptx:
            metrics["matmul"] = instruction
    metrics["wide_loads"] = len(re.findall(r"ld\.global[\w.:]*\.v4|cp\.async\.c[ag]", ptx))
    metrics["bulk_copies"] = len(re.findall(r"cp\.(?:reduce\.)?async\.bulk\.tensor", ptx))
    # Constants decide what is compiled, so kernels of one name differ in them.
    constants = {}
    for path, value in kernel.src.constants.items():
        name = kernel.src.fn.arg_names[path[0]]
        if name.isupper():  # our kernels write the names of their constexprs in capitals
            constants[name] = value
    return Compiled(
        name=f"{module}.{kernel.metadata.name}",
        constants=" ".join(f"{name}={value}" for name, value in constants.items()),
        metrics=metrics,
        stages=stages,
    )


def measure(config: IrConfig, context: RankContext, run: Run) -> None:
    """Add a row per compiled kernel, and write its stages as files.

    Each job of the pool compiles one module.
    """
    if not installed():
        raise ValueError(
            "there is no Triton here, whose compiler this shows: pip install triton (Linux)"
        )
    wanted = config.kernels or tuple(MODULES)
    modules = list(dict.fromkeys(name.partition(".")[0] for name in wanted))
    folder = run.path / "stages"
    folder.mkdir(exist_ok=True)
    # New processes and not forks: COMPILES must change the environment before Triton is imported,
    # which decides then whether kernels are interpreted.
    with ProcessPoolExecutor(
        min(config.workers, len(modules)), get_context("spawn"), exec, (COMPILES,)
    ) as pool:
        jobs = pool.map(compile_module, modules, [config.capability] * len(modules))
        for module, (found, problem) in zip(modules, jobs, strict=True):
            run.progress(f"{module}: {len(found)} kernels")
            chosen = [each for each in found if module in wanted or each.name in wanted]
            for each, stem in zip(chosen, stems(chosen), strict=True):
                for stage, text in each.stages.items():
                    # Each file has the name of its row, so a reader finds it from the table.
                    (folder / f"{stem}.{stage}").write_text(text, encoding="utf-8")
                run.add(stem, each.metrics, module=module, constants=each.constants)
            if problem:
                # Kernels that were compiled before the error have rows of their own.
                run.add(f"{module}, others", {"status": problem}, module=module)
    if not run.records:
        raise ValueError(
            f"{', '.join(wanted)}: no such kernel for compute capability {config.capability}; give "
            "MODULE alone to see its kernels"
        )


def stems(found: Sequence[Compiled]) -> Iterator[str]:
    """Yield a name for each kernel. One that is compiled more than once gets a number."""
    # Loops of a module may compile one kernel for several sizes.
    counts = Counter[str]()
    for kernel in found:
        counts[kernel.name] += 1
        number = counts[kernel.name]
        yield kernel.name if number == 1 else f"{kernel.name}-{number}"


def findings(records: Sequence[Record]) -> list[str]:
    """Name the kernels that spill."""
    spilling = [record for record in records if record.metrics.get("spill_bytes")]
    named = [f"{record.variant} ({record.metrics['spill_bytes']} bytes)" for record in spilling]
    return [f"Spilled registers: {', '.join(named) or 'none'}."]


headline = headline_from("compiled for compute capability {capability}, triton {triton}")
VIEW = View(
    columns=[
        Column("variant", "kernel"),
        Column("metrics.registers", "registers"),
        Column("metrics.spill_bytes", "spilled"),
        Column("metrics.shared_bytes", "shared KiB", ".1f", scale=1 / 1024),
        Column("metrics.warps", "warps"),
        Column("metrics.programs_per_sm", "per SM", missing=""),
        Column("metrics.limited_by", "limited by", missing=""),
        Column("metrics.matmul", "matmul by", missing=""),
        Column("metrics.wide_loads", "16-byte loads"),
        Column("metrics.bulk_copies", "TMA"),
        *(
            Column(f"metrics.{stage}_lines", f"{stage.upper()} lines", missing="")
            for stage in STAGES
        ),
        Column("config.constants", "constants", align="left", missing=""),
        Column("metrics.status", "status"),
    ],
    headline=headline,
    reading="Registers and spilled bytes are a thread's, shared memory a program's. A "
    "multiprocessor has 65,536 registers: two programs of 128 threads at 255 each, or all warps "
    "that have places at 32. A kernel that waits for memory wants many warps; one that multiplies "
    "by wgmma wants large tiles, and lives with few. Spilled registers are written to memory and "
    "read back. In the PTX look for ld.global.v4 (16 bytes by each thread), cp.async (loads that "
    "go to shared memory without registers), cp.async.bulk.tensor (the same by one thread for a "
    "whole tile) and wgmma (a warpgroup's matmul out of shared memory). Lines of TTIR are counted "
    "before anything is unrolled, of SASS after: their ratio is what a block of a kernel becomes "
    "for one thread.",
    terminal=(
        "registers",
        "spill_bytes",
        "shared_bytes",
        "warps",
        "programs_per_sm",
        "limited_by",
        "matmul",
        "ptx_lines",
        "sass_lines",
    ),
    findings=findings,
    prediction="`per SM` is predicted by `theory.gpu.occupancy`; registers are the assembler's own "
    "report.",
)
EXPERIMENT = Experiment(
    IrConfig, measure, VIEW, presets={"smoke": {"kernels": ("rope",)}}, ranks="none"
)
