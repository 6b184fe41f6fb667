"""What Triton's compiler makes of every kernel: kept in `compiled.json`, beside a digest of all that decides it.

    python -m tests.kernels.compiled            # compile what has changed, and keep it: after an edit of a kernel
    python -m tests.kernels.compiled --check    # compile everything; 1 if the file says otherwise

A unit is what launches some kernels; its digest is of these launches, of every file that they import at any depth,
and of this file. The results are those of one version of Triton: under another, tests compile everything.

Interpreting says nothing about types, registers or shared memory, so each launcher is given tensors of benchmark size
on the meta device, in a process of its own, where kernels are compiled instead and no GPU is asked.
"""

import ast
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch

from experiments.ir import catalogue
from experiments.ir.catalogue import D, F, H, N, e
from kernels import _compile, layernorm, matmul, rmsnorm, softmax
from kernels.flash_attention import backward, configs, forward, hopper
from kernels.flash_attention.options import Problem

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("compiled.json")
RENEW = "python -m tests.kernels.compiled"


def _attention(tiles: configs.Choice, softcap: float | None, bounds: Any, head_dim: int = 64) -> None:
    problem = Problem((100, 0), 0.125, "ieee", softcap, bounds)
    q, k, lse = e(2, 4, 1000, head_dim), e(2, 2, 1000, head_dim), e(2, 4, 1000, dtype=F)
    forward.launch_forward(q, k, k, q, lse, problem, tiles.forward)
    saved = backward.launch_delta(q, k, k, q, lse, q, dlse=lse)
    backward.launch_dkdv(saved, k, k, problem, tiles.dkdv)
    backward.launch_dq(saved, q, problem, tiles.dq)


def _attention_options() -> None:
    long = configs.lookup(configs.Key("sm_90", 16, "ieee", 64, 65536))
    for softcap, bounds in ((None, None), (30.0, e(2, 2, 1000, dtype=torch.int32))):
        _attention(long, softcap, bounds)
    _attention(long, None, None, head_dim=48)


def _attention_of_little_memory() -> None:
    _attention(configs.Choice(*[configs.CANDIDATES[16][-1]] * 3), 30.0, None)


def _matmul() -> None:
    a, w = e(D, D), e(D)
    matmul.launch_pointers(a, a, w, a, "gelu", "ieee")
    matmul.launch_pointers(a, e(D, 256), None, e(D, 256), "rms_norm", "ieee")


def _matmul_precisions() -> None:
    a, f = e(D, D), e(D, D, dtype=F)
    matmul.launch_pointers(a, e(D, 512), None, e(D, 512), None, "ieee")
    matmul.launch_pointers(f, f, None, f, None, "tf32x3")
    matmul.launch_pointers(f, e(D, 256, dtype=F), None, e(D, 256, dtype=F), "rms_norm", "tf32x3")


def _wide_softmax() -> None:
    softmax.launch_forward(e(N, 32768), e(N, 32768))


def _norms() -> None:
    stat, w, long, longer = e(N, dtype=F), e(D), e(N, D, dtype=F), e(N, 8192, dtype=F)
    rmsnorm.launch_backward(longer, None, longer, e(8192), stat, longer, False)
    rmsnorm.launch_backward(long, long, long, w, stat, long, False)
    layernorm.launch_backward(long, long, w, stat, stat, long, F)


def _hopper(head_dim: int) -> None:
    for dtype in (H, torch.float16):
        q, k = (e(2, heads, 1000, head_dim, dtype=dtype) for heads in (4, 2))
        lse, problem = e(2, 4, 1000, dtype=F), Problem((None, 0), 0.125)
        hopper.launch_forward(q, k, k, q, lse, problem)
        hopper.launch_backward(q, k, k, q, lse, q, q, k, k, problem)


# "unit capability" → what launches its kernels. The instructions of 89 are those of 86.
UNITS: dict[str, Callable[[], None]] = {
    **{f"{name} 90": launches for name, launches in catalogue.MODULES.items() if name != "flash_attention"},
    "attention_options 90": _attention_options,
    "wide_softmax 90": _wide_softmax,
    **{f"matmul {capability}": _matmul for capability in (80, 86, 89)},
    **{f"attention {capability}": _attention_of_little_memory for capability in (80, 86, 89)},
    **{f"matmul_precisions {capability}": _matmul_precisions for capability in (80, 86)},
    "wide_softmax 86": _wide_softmax,
    "norms 86": _norms,
    **{f"hopper_{head_dim} 90": functools.partial(_hopper, head_dim) for head_dim in (64, 80, 128)},
}


def _launched(function: Callable) -> set[str]:
    """Names of the modules that launches mention, or functions of the same file that they call."""
    function = getattr(function, "func", function)
    found = set()
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            found |= _launched(value)
        elif isinstance(value, ModuleType):
            found.add(value.__name__)
        elif "." in name:  # of an import within
            found.add(name)
    return found


def _file(module: str) -> Path | None:
    ours = module.partition(".")[0] in ("kernels", "experiments")
    try:
        spec = find_spec(module) if ours else None
    except ModuleNotFoundError:  # a function of a module
        return None
    return Path(spec.origin) if spec else None


@functools.cache
def _imports(module: str) -> set[str]:
    """The module, and what of this repository's it imports, also within functions."""
    if (path := _file(module)) is None:
        return set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = {module}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if _file(name)}


def sources(unit: str) -> list[Path]:
    """The files that decide what a unit's kernels become: what its launches import, at any depth, and the catalogue."""
    modules, known = _launched(UNITS[unit]) | {_compile.__name__}, set()
    while modules != known:
        modules, known = modules.union(*map(_imports, modules)), modules
    return [*filter(None, map(_file, sorted(modules))), Path(catalogue.__file__), Path(__file__)]


def digest(unit: str) -> str:
    """Of the texts of all sources."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources(unit))).hexdigest()[:16]


def kept() -> dict[str, Any]:
    return json.loads(KEPT.read_text(encoding="utf-8"))


def is_of_this_triton() -> bool:
    return kept()["triton"] == version("triton")


def changed() -> list[str]:
    """The units whose kept results are not what the compiler would make of their sources now."""
    units = kept()["units"] if is_of_this_triton() else {}
    return [unit for unit in UNITS if units.get(unit, {}).get("digest") != digest(unit)]


@functools.cache
def results() -> dict[str, list[dict[str, Any]]]:
    """Unit → what is said of each kernel that it launches; what has changed is compiled now."""
    again, units = changed(), kept()["units"]
    fresh = compiled(again) if again else {}
    return {unit: fresh[unit] if unit in fresh else units[unit]["kernels"] for unit in UNITS}


def compiled(units: Iterable[str], **variables: str) -> dict[str, list[dict[str, Any]]]:
    """What a new process says of the units' kernels; there Triton compiles, and sees no GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""} | variables
    command = [sys.executable, "-m", __spec__.name, "--units", *units]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def described(unit: str) -> list[dict[str, Any]]:
    """Compile a unit here."""
    capability = int(unit.split()[1])
    with _compile.compile_for(capability) as found:
        UNITS[unit]()
    assert all(kernel.metadata.target.arch == capability for kernel in found)
    on_hopper = {"is_available": lambda: True, "get_device_capability": lambda: (9, 0)}  # which cannot load the others
    with mock.patch.multiple("torch.cuda", **on_hopper if capability != 90 else {"is_available": lambda: False}):
        return [{"name": kernel.metadata.name, "warps": kernel.metadata.num_warps,
                 "wide_loads": bool(re.search(r"ld\.global[\w.:]*\.v4|cp\.async", kernel.asm["ptx"])),
                 "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
                 "reductions": kernel.asm["ptx"].count("cp.reduce.async.bulk.tensor"),
                 **_compile.resources(kernel)} for kernel in found]  # fmt: skip


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--units"]:
        print(json.dumps({unit: described(unit) for unit in arguments[1:]}))
        return 0
    if arguments == ["--check"]:
        units = kept()["units"]
        found = compiled(UNITS, TRITON_ALWAYS_COMPILE="1")
        other = [unit for unit in UNITS if found[unit] != units.get(unit, {}).get("kernels")]
        print(f"not what {KEPT.name} says: {', '.join(other)}" if other else f"all {len(UNITS)} units are as kept")
        return bool(other)
    again = changed()
    entries = []
    for unit, kernels in results().items():
        lines = ",\n".join(map(json.dumps, kernels))
        entries.append(f'"{unit}": {{"digest": "{digest(unit)}", "kernels": [\n{lines}]}}')
    text = f'{{"triton": "{version("triton")}", "units": {{\n' + ",\n".join(entries) + "}}\n"
    KEPT.write_text(text, encoding="utf-8")
    print(f"compiled: {', '.join(again) or 'nothing, all was as kept'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
