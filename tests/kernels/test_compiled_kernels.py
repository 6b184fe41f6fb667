"""Every kernel compiles for Hopper, without spilling registers and within its shared memory: no GPU needed.

Those that take much of it also for the generations before, whose programs have less.

Interpreting says nothing about types, registers or shared memory, so each launcher is given tensors of benchmark size
on the meta device, in a process of its own, where kernels are compiled instead.
"""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = r"""
import json, re, sys, torch
from unittest import mock
from kernels._compile import compile_for, resources
from kernels import layernorm, matmul, rmsnorm, softmax
from kernels.flash_attention import backward, configs, forward
from kernels.flash_attention.options import Problem
from experiments.ir.catalogue import MODULES, D, F, H, N, e

stat, w, a, f = e(N, dtype=F), e(D), e(D, D), e(D, D, dtype=F)
def attention(tiles, softcap, bounds, head_dim=64, length=1000):
    problem = Problem((100, 0), 0.125, "ieee", softcap, bounds)
    q, k, lse = e(2, 4, length, head_dim), e(2, 2, length, head_dim), e(2, 4, length, dtype=F)
    forward.launch_forward(q, k, k, q, lse, problem, tiles.forward)
    saved = backward.launch_delta(q, k, k, q, lse, q, dlse=lse)
    backward.launch_dkdv(saved, k, k, problem, tiles.dkdv)
    backward.launch_dq(saved, q, problem, tiles.dq)

with compile_for(90) as compiled:
    for name, launches in MODULES.items():
        if name != "flash_attention":  # whose registers are the tests' of its own
            launches()
    long = configs.lookup(configs.Key("sm_90", 16, "ieee", 64, 65536))
    for softcap, bounds in ((None, None), (30.0, e(2, 2, 1000, dtype=torch.int32))):
        attention(long, softcap, bounds)
    attention(long, None, None, head_dim=48)
    softmax.launch_forward(e(N, 32768), e(N, 32768))
older = []
for capability in (80, 86, 89):
    with compile_for(capability) as found:
        matmul.launch_pointers(a, a, w, a, "gelu", "ieee")
        matmul.launch_pointers(a, e(D, 256), None, e(D, 256), "rms_norm", "ieee")
        attention(configs.Choice(*[configs.CANDIDATES[16][-1]] * 3), 30.0, None)
        if capability == 86:
            softmax.launch_forward(e(N, 32768), e(N, 32768))
            long, longer = e(N, D, dtype=F), e(N, 8192, dtype=F)
            rmsnorm.launch_backward(longer, None, longer, e(8192), stat, longer, False)
            rmsnorm.launch_backward(long, long, long, w, stat, long, False)
            layernorm.launch_backward(long, long, w, stat, stat, long, F)
        if capability != 89:  # whose instructions are those of 86
            matmul.launch_pointers(a, e(D, 512), None, e(D, 512), None, "ieee")
            matmul.launch_pointers(f, f, None, f, None, "tf32x3")
            matmul.launch_pointers(f, e(D, 256, dtype=F), None, e(D, 256, dtype=F), "rms_norm", "tf32x3")
    older += [(capability, k) for k in found]
assert all(k.metadata.target.arch == capability for capability, k in older)
with mock.patch.multiple("torch.cuda", is_available=lambda: True, get_device_capability=lambda: (9, 0)):
    resources(older[0][1])  # an H100 could not load it
json.dump([{"name": k.metadata.name, "wide_loads": bool(re.search(r"ld\.global[\w.:]*\.v4|cp\.async", k.asm["ptx"])),
            "warps": k.metadata.num_warps, "capability": capability} | resources(k)
           for capability, k in [*((90, k) for k in compiled), *older]], sys.stdout)
"""
# KiB of shared memory that a block can have (CUDA programming guide), by compute capability
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227}
SPILLS = {"dkdv_kernel": 64}  # addresses: a window, documents and softcap at once, compiled by Triton 3.6


@pytest.fixture(scope="module")
def compiled():
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_all_kernels_fit_their_generation(compiled):
    assert sum(kernel["capability"] == 90 for kernel in compiled) > 40
    assert {kernel["capability"] for kernel in compiled} == set(SHARED_MEMORY)
    for kernel in compiled:
        assert kernel["spill_bytes"] <= SPILLS.get(kernel["name"], 0), kernel
        assert kernel["shared_bytes"] <= 1024 * SHARED_MEMORY[kernel["capability"]], kernel
        assert kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel


def test_memory_bound_kernels_load_sixteen_bytes_at_a_time(compiled):
    """A kernel that loads element by element reaches a fraction of the bandwidth."""
    no_matter = {"persistent_kernel", "total_kernel"}  # loads by TMA; one program
    lessons = {"busy_kernel", "divergent_kernel", "strided_kernel", "transpose_kernel"}  # of other things
    narrow = {k["name"] for k in compiled if not k["wide_loads"]} - no_matter - lessons
    assert not narrow


def test_compiling_is_refused_where_kernels_are_interpreted(monkeypatch):
    from kernels import _compile

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), _compile.compile_for():
        pass
