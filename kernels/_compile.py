"""Compiling kernels without running them, also where there is no GPU: PTX, registers, spills."""

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
    """What Triton asks a driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        """Triton keeps compiled kernels by device: another for each generation, so that one's are not another's."""
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_for(capability: int = 90) -> Iterator[list[Any]]:
    """Within, `launch` compiles for a GPU that need not be there; yields the growing list of compiled kernels.

    The launchers may be given tensors on the meta device: nothing is read.

    Args:
        capability: the GPU's, 90 for Hopper.

    Raises:
        RuntimeError: where kernels are interpreted or Triton is missing.
    """
    if _dispatch.interpreted() or not _dispatch.installed():
        raise RuntimeError(
            "compile_for needs Triton's compiler: install triton and unset TRITON_INTERPRET"
        )
    from triton.runtime import driver

    before, _dispatch._pretended = driver._active, capability
    driver.set_active(_NoDriver(capability))
    try:
        with _dispatch.compile_only() as compiled:
            yield compiled
    finally:
        _dispatch._pretended = None
        driver._active = before


def resources(compiled: Any) -> dict[str, int]:
    """Of a compiled kernel: registers per thread, bytes spilled, bytes of shared memory, wgmma that ptxas serialized.

    On a GPU of the generation it is compiled for the driver is asked; elsewhere the kernel's PTX
    goes through Triton's own ptxas once more.
    """
    arch = compiled.metadata.target.arch
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == divmod(arch, 10):
        compiled._init_handles()
        return {
            "registers": compiled.n_regs,
            "spill_bytes": 4 * compiled.n_spills,
            # the driver does not say
            "shared_bytes": compiled.metadata.shared,
            "serialized": 0,
        }
    import triton

    binary = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(compiled.asm["ptx"])
        source.flush()
        command = [
            binary,
            "-v",
            f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}",
            source.name,
            "-o",
            os.devnull,
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found[1]) if found else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores"),
        "shared_bytes": compiled.metadata.shared,
        "serialized": report.count("wgmma.mma_async instructions are serialized"),
    }
