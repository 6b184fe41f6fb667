"""What the shipped attention configurations use: registers, spilled bytes and shared memory.

    python experiments/flash_attention_resources.py

Every row of the table is compiled for an H100, which need not be there; the figures depend on the Triton version. A
backward whose passes run jointly is one kernel, reported as "backward"; one that is split has a kernel "split", and
the two others for calls with a window.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable

import triton
from triton.backends.compiler import GPUTarget

from distlab.measure.pace import Pace
from distlab.report import (
    Column,
    Record,
    View,
    add_output_options,
    commit,
    environment,
    progress,
    run_command,
)
from kernels.flash_attention import configs
from kernels.flash_attention.workbench import Case, compile_candidate

EXPERIMENT = "flash_attention_resources"
COLUMNS = [
    Column("config.bits", "bits"), Column("config.precision", "precision"), Column("config.head_dim", "d"),
    Column("config.rows", "rows"), Column("variant", "kernel"), Column("config.passes", "passes"),
    Column("config.tiles", "tiles"), Column("metrics.registers", "registers"),
    Column("metrics.spilled_bytes", "spilled B"), Column("metrics.shared_bytes", "shared B", ",d"),
    Column("metrics.status", "status"),
]  # fmt: skip


class Hopper:
    """What Triton has to know of a GPU to compile for an H100 where there is none."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def kernels_of(choice: configs.Choice) -> dict[str, configs.Tile | configs.Choice]:
    """The kernels a row launches, besides the one that computes Δ."""
    if choice.passes == "joint":
        return {"forward": choice.forward, "backward": choice}
    return {kernel: getattr(choice, kernel) for kernel in configs.KERNELS} | (
        {"split": choice.dkdv} if choice.passes == "split" else {})


def describe(how: configs.Tile | configs.Choice) -> str:
    """Tiles as queries × keys, warps, stages."""
    if isinstance(how, configs.Choice):
        return f"{describe(how.dkdv)} | {describe(how.dq)}"
    return f"{how.block_m}x{how.block_n} w{how.warps} s{how.stages}{' tma' if how.tma else ''}"


def run(
    table: dict[configs.Key, configs.Choice] = configs.TABLE, progress: Callable[[str], None] = lambda text: None
) -> list[Record]:
    """One record per row and kernel; `status` says why one does not compile."""
    triton.runtime.driver.set_active(Hopper())
    where, code = environment("cpu"), commit()
    records, seen = [], {}
    pace = Pace(len(table), "configurations", progress)
    for key, choice in table.items():
        case = Case(1, 1, 4096, key.head_dim, "float32" if key.bits == 32 else "bfloat16", key.causal, key.precision)
        for kernel, how in kernels_of(choice).items():
            joint = dataclasses.replace(how, forward=how.dq) if isinstance(how, configs.Choice) else how
            job = (case, kernel, joint)
            seen[job] = seen[job] if job in seen else compile_candidate(job)
            metrics = seen[job] if isinstance(seen[job], dict) else {"status": seen[job]}
            config = dataclasses.asdict(key) | {"passes": choice.passes, "tiles": describe(how)}
            records.append(Record(EXPERIMENT, kernel, config, metrics, where, code))
        pace()
    return records


def headline(records: list[Record]) -> str:
    """One line that says what the table below it was made with."""
    env = records[0].environment
    return f"Compiled for an H100 (sm_90), triton {env['triton']}, torch {env['torch']}; nothing ran"


VIEW = View(
    name=EXPERIMENT,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    reading="Of 65,536 registers per SM, a block of w warps takes 32·w times the figure in the table; spilled bytes go "
    "through local memory and should be few. Shared memory decides with the registers how many blocks an SM holds.",
    noise="The compiler's figures do not vary.",
)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(EXPERIMENT, description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="the table's first two rows")
    add_output_options(parser, measures=False)
    options = parser.parse_args(argv)
    table = dict(list(configs.TABLE.items())[:2]) if options.quick else configs.TABLE
    return run_command(VIEW, options, lambda: lambda folder: run(table, progress))


if __name__ == "__main__":
    sys.exit(main())
