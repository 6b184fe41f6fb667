"""Compile every kernel, and keep the facts about the compiled code in `compiled.json`.

    python -m tests.kernels.compiled            # compile changed kernels and renew the file
    python -m tests.kernels.compiled --check    # compile all; exit code 1 if the file differs

A unit is code that launches some kernels. The file holds a digest of each unit: of its launches, of
every file of ours that they need at any depth, and of this file. The results are those of one
version of Triton. Under another version, tests compile everything.

The interpreter does not show types, registers or shared memory. So each launcher gets tensors of
benchmark size on the meta device, in a process of its own, where kernels are compiled and no GPU is
used.
"""

import functools
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from experiments.lessons.ir.catalogue import MODULES

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("compiled.json")
FILES = {
    path.stem: path
    for pattern in ("kernels/**/*.py", "experiments/**/_*.py")
    for path in ROOT.glob(pattern)
}
IMPORT = r"^ *(?:from|import) [^(\n]*(?:\([^)]*\))?"
SCRIPT = r"""
import json, re, sys, torch
from unittest import mock
from kernels._compile import compile_for, resources
from kernels import matmul, rmsnorm, softmax
from kernels.flash_attention import backward, configs, forward, hopper
from kernels.flash_attention.options import Problem
from experiments.lessons.ir.catalogue import MODULES, D, F, H, N, e

stat, w, a, f = e(N, dtype=F), e(D), e(D, D), e(D, D, dtype=F)
long, longer = e(N, D, dtype=F), e(N, 8192, dtype=F)
def attention(tiles, softcap, bounds, head_dim=64, length=1000):
    problem = Problem((100, 0), 0.125, "ieee", softcap, bounds)
    q, k, lse = e(2, 4, length, head_dim), e(2, 2, length, head_dim), e(2, 4, length, dtype=F)
    forward.launch_forward(q, k, k, q, lse, problem, tiles.forward)
    saved = backward.launch_delta(q, k, k, q, lse, q, dlse=lse)
    backward.launch_dkdv(saved, k, k, problem, tiles.dkdv)
    backward.launch_dq(saved, q, problem, tiles.dq)

def facts(kernel):
    ptx = kernel.asm["ptx"]
    ttgir = kernel.asm["ttgir"]
    order = []
    for instruction in ("sync", "arrive"):
        order.append([ptx.count(f"bar.{instruction} {i}, 256") for i in range(8, 12)])
    unused_barriers = []
    for name in re.findall(r"(%made\w*) = ttg.local_alloc", ttgir):
        if not re.search(rf"warp_specialize\(.*{name}\b", ttgir):
            unused_barriers.append(name)
    return {
        "name": kernel.metadata.name,
        "wide_loads": bool(re.search(r"ld\.global[\w.:]*\.v4|cp\.async", ptx)),
        "warps": kernel.metadata.num_warps,
        "wgmma": ptx.count("wgmma.mma_async"),
        "reductions": ptx.count("cp.reduce.async.bulk.tensor"),
        "order": order,
        "unused_barriers": unused_barriers,
    } | resources(kernel)

found = {}
for unit, launches in json.loads(sys.argv[1]).items():
    capability = int(unit.split()[1])
    with compile_for(capability) as kernels:
        MODULES[launches]() if launches in MODULES else exec(launches, dict(globals()))
    assert all(k.metadata.target.arch == capability for k in kernels)
    # An H100 cannot load kernels of older generations, so there resources are read without it.
    with mock.patch.multiple(
        "torch.cuda",
        is_available=lambda: capability != 90,
        get_device_capability=lambda: (9, 0),
    ):
        found[unit] = [facts(kernel) for kernel in kernels]
json.dump(found, sys.stdout)
"""
OPTIONS = """
long = configs.lookup(configs.Key("sm_90", 16, "ieee", 64, 65536))
for softcap, bounds in ((None, None), (30.0, e(2, 2, 1000, dtype=torch.int32))):
    attention(long, softcap, bounds)
attention(long, None, None, head_dim=48)
"""
OLDER = """
matmul.launch_pointers(a, a, w, a, "gelu", "ieee")
matmul.launch_pointers(a, e(D, 256), None, e(D, 256), "rms_norm", "ieee")
"""
PRECISIONS = """
matmul.launch_pointers(a, e(D, 512), None, e(D, 512), None, "ieee")
matmul.launch_pointers(f, f, None, f, None, "tf32x3")
matmul.launch_pointers(f, e(D, 256, dtype=F), None, e(D, 256, dtype=F), "rms_norm", "tf32x3")
"""
NORMS = """
rmsnorm.launch_backward(longer, None, longer, e(8192), stat, longer, False, None)
rmsnorm.launch_backward(long, long, long, w, stat, long, False, None)
rmsnorm.launch_backward(long, None, long, w, e(2, N, dtype=F), long, False, F)
"""
HOPPER = """
for dtype, length, heads, hi in (
    (H, 1000, 2, 0),
    (torch.float16, 1000, 2, 5),
    (H, 1024, 4, 0),
    (H, 1024, 4, None),
):
    q, k = (e(2, count, length, {}, dtype=dtype) for count in (4, heads))
    lse, problem = e(2, 4, length, dtype=F), Problem((None, hi), 0.125)
    hopper.launch_forward(q, k, k, q, lse, problem)
    hopper.launch_backward(q, k, k, q, lse, q, q, k, k, problem)
"""
# Enough rows for the forward with four consumers.
HOPPER_LONG = """
q, lse = e(2, 4, 8192, 64), e(2, 4, 8192, dtype=F)
for hi in (0, 5, None):
    hopper.launch_forward(q, q, q, q, lse, Problem((None, hi), 0.125))
"""
SOFTMAX = "softmax.launch_forward(e(N, 32768), e(N, 32768))"
ATTENTION = (
    "attention(configs.Choice(*[configs.CANDIDATES[16][-1]] * 3), 30.0, None)  # forward, backward"
)
# "unit capability" → a module of the catalogue, or what launches its kernels. The instructions of
# 89 are those of 86.
UNITS = {f"{name} 90": name for name in MODULES if name != "flash_attention"} | {
    "attention_options 90": OPTIONS + "# forward, backward",
    **{f"matmul {capability}": OLDER for capability in (80, 86, 89)},
    **{f"attention {capability}": ATTENTION for capability in (80, 86, 89)},
    "precisions 80": PRECISIONS,
    "precisions 86": PRECISIONS,
    "wide_softmax 86": SOFTMAX,
    "norms 86": NORMS,
    **{f"hopper_{head_dim} 90": HOPPER.format(head_dim) for head_dim in (64, 80, 128, 256)},
    "hopper_long 90": HOPPER_LONG,
}


def sources(unit: str) -> list[Path]:
    """Return the files that the launches name, those that these import, and so on."""
    launches = UNITS[unit]
    text = inspect.getsource(MODULES[launches]) if launches in MODULES else launches
    names, found = set(), FILES.keys() & {"_compile", *re.findall(r"\w+", text)}
    while found != names:
        names = found
        imports = (re.findall(IMPORT, FILES[name].read_text(), re.M) for name in names)
        found = names | FILES.keys() & re.findall(r"\w+", " ".join(chain(*imports)))
    return [
        *(FILES[name] for name in sorted(names)),
        Path(inspect.getfile(MODULES["rope"])),
        Path(__file__),
    ]


def digest(unit: str) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources(unit))).hexdigest()[:16]


def kept() -> dict:
    return json.loads(KEPT.read_text())


def changed() -> list[str]:
    """Return the units whose sources have changed since `compiled.json` was written."""
    units = kept()["units"] if kept()["triton"] == version("triton") else {}
    return [unit for unit in UNITS if units.get(unit, {}).get("digest") != digest(unit)]


def compiled(units: list[str], **variables: str) -> dict[str, list[dict]]:
    """Compile units in a new process that sees no GPU, and return unit → facts of its kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""} | variables
    command = [sys.executable, "-c", SCRIPT, json.dumps({unit: UNITS[unit] for unit in units})]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@functools.cache
def results() -> dict[str, list[dict]]:
    """Return unit → facts of each kernel that it launches. Units that have changed are compiled."""
    again, units = changed(), kept()["units"]
    fresh = compiled(again) if again else {}
    return {unit: fresh[unit] if unit in fresh else units[unit]["kernels"] for unit in UNITS}


def main() -> str | None:
    if "--check" in sys.argv:
        found = compiled([*UNITS], TRITON_ALWAYS_COMPILE="1")
        other = [
            unit for unit in UNITS if found[unit] != kept()["units"].get(unit, {}).get("kernels")
        ]
        return f"not what {KEPT.name} says: {', '.join(other)}" if other else None
    units = {
        unit: {"digest": digest(unit), "kernels": kernels} for unit, kernels in results().items()
    }
    text = json.dumps({"triton": version("triton"), "units": units})
    KEPT.write_text(re.sub(r'(?=\{"name")|(?<=\}, )(?=")', "\n", text) + "\n")
    return None


if __name__ == "__main__":
    sys.exit(main())
