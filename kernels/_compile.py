"""Compile kernels without running them, also on a machine without a GPU.

The result says what a GPU would run: PTX, registers, spills, shared memory. Tests compare it with
what is expected, and the lesson on intermediate representations prints it.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from . import _dispatch


class _NoDriver:
    """Substitute for Triton's driver. It answers what Triton asks a driver before it compiles.

    Args:
        capability: compute capability to compile for, 90 for Hopper.
    """

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        """Return the GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return a device number of its own for each generation.

        Triton caches compiled kernels by device, and must not find those of another generation.
        """
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        """Return any stream: nothing is launched."""
        return 0


@contextlib.contextmanager
def compile_for(capability: int = 90) -> Iterator[list[Any]]:
    """Let `_dispatch.launch` compile kernels instead of running them, for a GPU that may be absent.

    No tensor is read, so the launchers may be given tensors on the meta device.

    Args:
        capability: compute capability to compile for, 90 for Hopper.

    Yields:
        A list of Triton's compiled kernels, to which every launch appends one.

    Raises:
        RuntimeError: kernels are interpreted, or Triton is missing.
    """
    if _dispatch.interpreted() or not _dispatch.installed():
        raise RuntimeError(
            "compile_for needs Triton's compiler: install triton and unset TRITON_INTERPRET"
        )
    from triton.runtime import driver

    # Triton asks the active driver for the GPU, so a substitute suffices. The real one returns
    # afterwards.
    driver_before = driver._active
    _dispatch._pretended = capability
    driver.set_active(_NoDriver(capability))
    try:
        with _dispatch.compile_only() as compiled:
            yield compiled
    finally:
        _dispatch._pretended = None
        driver._active = driver_before


def resources(compiled: Any) -> dict[str, int]:
    """Return the resources that a compiled kernel needs.

    On a GPU of the generation that it was compiled for, the driver is asked. Elsewhere Triton's own
    ptxas compiles the kernel's PTX once more and reports.

    Args:
        compiled: kernel as `compile_for` yields it.

    Returns:
        registers: registers per thread.
        spill_bytes: bytes per thread that do not fit in registers.
        shared_bytes: bytes of shared memory per program.
        serialized: number of warnings that wgmma instructions are serialized, 0 from the driver.
    """
    arch = compiled.metadata.target.arch
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == divmod(arch, 10):
        # Loads the kernel, without running it: only then does Triton ask the driver for its
        # registers.
        compiled._init_handles()
        return {
            "registers": compiled.n_regs,
            "spill_bytes": 4 * compiled.n_spills,
            "shared_bytes": compiled.metadata.shared,
            "serialized": 0,  # the driver does not report it
        }
    report = _ptxas_report(compiled.asm["ptx"], arch)
    return {
        "registers": _number(r"Used (\d+) registers", report),
        "spill_bytes": _number(r"(\d+) bytes spill stores", report),
        "shared_bytes": compiled.metadata.shared,
        "serialized": report.count("wgmma.mma_async instructions are serialized"),
    }


def _ptxas_report(ptx: str, arch: int) -> str:
    """Return what Triton's ptxas reports of a kernel in PTX, for a compute capability."""
    import triton

    package = os.path.dirname(triton.__file__)
    # Triton's own ptxas, whose version fits the PTX. One on the PATH may be older.
    binary = os.path.join(package, "backends", "nvidia", "bin", "ptxas")
    suffix = "a" if arch >= 90 else ""  # instructions such as wgmma need the target sm_90a
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [binary, "-v", f"--gpu-name=sm_{arch}{suffix}", source.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr


def _number(pattern: str, report: str) -> int:
    """Return the number that the pattern's group matches in the report, or 0."""
    found = re.search(pattern, report)
    return int(found[1]) if found else 0
