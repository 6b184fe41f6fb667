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
from kernels import adamw, cross_entropy, dropout, elementwise, layernorm, matmul, rmsnorm, rope, softmax, swiglu
from kernels import weighted_sum, _dispatch, _long_rows, _scale, _triton
from kernels.flash_attention import backward_launch, configs, forward
from kernels.flash_attention.options import Problem
from experiments.kernel_roofline.tuning import compile_kernel

F, H, I = torch.float32, torch.bfloat16, torch.int64

def e(*shape, dtype=H):
    return torch.empty(shape, dtype=dtype, device="meta")

n, d = 8192, 4096
x, w, stat = e(n, d), e(d), e(n, dtype=F)
wide, wide_w = e(256, 200000), e(200000)
z, t, one = e(2048, 151936), e(2048, dtype=I), e(1, dtype=F)
q = e(4, 2048, 3, 32, 128).permute(2, 0, 3, 1, 4)
table = e(2048, 128, dtype=F)

def attention(tiles, softcap, bounds, head_dim=64, length=1000):
    problem = Problem((100, 0), 0.125, "ieee", softcap, bounds)
    q, k, lse = e(2, 4, length, head_dim), e(2, 2, length, head_dim), e(2, 4, length, dtype=F)
    forward.launch_forward(q, k, k, q, lse, problem, tiles.forward)
    saved = backward_launch.launch_delta(q, k, k, q, lse, q, dlse=lse)
    backward_launch.launch_dkdv(saved, k, k, problem, tiles.dkdv)
    backward_launch.launch_dq(saved, q, problem, tiles.dq)

with compile_for(90) as compiled:
    elementwise.launch_flat(elementwise.add_kernel, "add", x, x, x)
    elementwise.launch_flat(elementwise.gelu_forward_kernel, "gelu", x, x)
    elementwise.launch_flat(elementwise.gelu_backward_kernel, "gelu_backward", x, x, x)
    weighted_sum.launch_forward(x, w, e(n)); weighted_sum.launch_backward(e(n), x, w, x)
    for cols in (1024, 4096, 16384):
        r, v = e(n, cols), e(cols)
        rmsnorm.launch_forward(r, None, v, r, r, stat, 1e-5, False)
        layernorm.launch_forward(r, v, v, r, stat, stat, 1e-5)
        if cols <= rmsnorm.ONE_TILE_BACKWARD:
            rmsnorm.launch_backward(r, None, r, v, stat, r, False)
            layernorm.launch_backward(r, r, v, stat, stat, r, H)
    rmsnorm.launch_forward(x, x, w, x, x, stat, 1e-5, True); rmsnorm.launch_backward(x, x, x, w, stat, x, True)
    _long_rows.launch_long_forward(wide, None, wide_w, wide, wide, stat, 1e-5, False)
    _long_rows.launch_long_forward(wide, wide, wide_w, wide, wide, stat, 1e-5, True, stat, wide_w)
    _long_rows.launch_long_backward(wide, wide, wide, wide_w, stat, stat, wide, True, H)
    for cols in (1024, 4096, 32768):
        softmax.launch_forward(e(n, cols, dtype=F), e(n, cols, dtype=F))
    for cols in (4096, 16384, 32768, 200000):
        softmax.launch_backward(*(e(256, cols, dtype=F) for _ in range(3)))
    softmax.launch_long_forward(wide, wide)
    softmax.launch_long_forward(wide[:1], wide[:1])  # Triton makes a size of 1 a constant
    swiglu.launch(swiglu.forward_kernel, "swiglu", (x, x), (x,))
    swiglu.launch(swiglu.backward_kernel, "swiglu_backward", (x, x, x), (x, x))
    rope.launch_rope(q, table, table, q.contiguous(), 1.0)
    seed = e(1, dtype=I)
    for gelu in (False, True):
        dropout.launch_dropout(x, w if gelu else None, seed, x, 0.1, gelu)
        dropout.launch_dropout(x, w if gelu else None, seed, x, 0.1, gelu, x)
    cross_entropy.launch_loss(z, t, stat, stat, stat, -100, 0.1)
    cross_entropy.launch_loss(z, t, stat, stat, stat, -100, 0.1, z, one)
    cross_entropy.launch_gradient(z, t, stat, stat, one, one, z, -100, 0.1)
    cross_entropy.launch_gradient(z[:1], t[:1], stat, stat, one, one, z[:1], -100, 0.0)
    _dispatch.launch(_scale.scale_kernel, (8,), z, one, z.numel(), BLOCK=4096, num_warps=8)
    a = e(d, d)
    for left, right in ((a, a), (a.T, a), (a, a.T)):
        assert matmul.launch_persistent(left, right, w, a, "gelu")
    assert matmul.launch_persistent(e(512, 512), e(512, 512), None, e(512, 512), None)
    matmul.launch_pointers(a, a, w, a, "silu", "ieee")
    matmul.launch_pointers(a, e(d, 256), None, e(d, 256), "rms_norm", "ieee")
    for precision in matmul.PRECISIONS:
        f = e(d, d, dtype=F); matmul.launch_pointers(f, f, None, f, None, precision)
    matmul.launch_pointers(f, e(d, 256, dtype=F), None, e(d, 256, dtype=F), "rms_norm", "tf32x3")
    half = e(d, d, dtype=torch.float16)
    assert matmul.launch_persistent(half, half, None, f, None)  # the product that a gradient in fp16 starts from
    assert matmul.launch_persistent(half[:512], half[:, :512], None, e(512, 512, dtype=F), None)
    i = e(8, dtype=I)
    for dtype in adamw._TYPES.values():
        options = adamw.factors(3, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        _dispatch.launch(adamw.adamw_kernel, (8,), i, i, e(8, dtype=torch.int32), i, *options,
                       PARAMETER=dtype, GRADIENT=dtype, ALIGNMENT=16, BLOCK=2048, num_warps=8)
    long = configs.lookup(configs.Key("sm_90", 16, "ieee", 64, True, 65536))
    for softcap, bounds in ((None, None), (30.0, e(2, 2, 1000, dtype=torch.int32))):
        attention(long, softcap, bounds)
    attention(long, None, None, head_dim=48)
older = []
for capability in (80, 86, 89):
    with compile_for(capability) as found:
        matmul.launch_pointers(a, a, w, a, "gelu", "ieee")
        matmul.launch_pointers(a, e(d, 256), None, e(d, 256), "rms_norm", "ieee")
        attention(configs.Choice(*[configs.CANDIDATES[16][-1]] * 3), 30.0, None)
        if capability == 86:
            long, longer = e(n, d, dtype=F), e(n, 8192, dtype=F)
            rmsnorm.launch_backward(longer, None, longer, e(8192), stat, longer, False)
            rmsnorm.launch_backward(long, long, long, w, stat, long, False)
            layernorm.launch_backward(long, long, w, stat, stat, long, F)
        if capability != 89:  # whose instructions are those of 86
            matmul.launch_pointers(a, e(d, 512), None, e(d, 512), None, "ieee")
            matmul.launch_pointers(f, f, None, f, None, "tf32x3")
            matmul.launch_pointers(f, e(d, 256, dtype=F), None, e(d, 256, dtype=F), "rms_norm", "tf32x3")
    older += [(capability, k) for k in found]
ptx = compile_kernel("gelu").asm["ptx"]
assert ".target sm_90" in ptx and "gelu_forward_kernel" in ptx, ptx[:300]
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
    products = {"persistent_kernel"}
    narrow = {k["name"] for k in compiled if not k["wide_loads"]} - products
    assert not narrow


def test_compiling_is_refused_where_kernels_are_interpreted(monkeypatch):
    from kernels import _compile

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), _compile.compile_for():
        pass
