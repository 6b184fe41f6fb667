"""Every kernel of the lab, launched on tensors without data, at sizes of a benchmark.

A compiler needs no more than that.

MODULES: file of `kernels/`, or lesson of `experiments/lessons/`, → a function that launches all of
its kernels, those that need Hopper last. Within `kernels._compile.compile_for` a launch compiles
and does not run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.lessons import _lesson_attention
from experiments.lessons import _lesson_forms as forms
from experiments.lessons import _lesson_kernels as lessons
from kernels import (
    _dispatch,
    _scale,
    adamw,
    average,
    cross_entropy,
    dropout,
    elementwise,
    float8_linear,
    matmul,
    rmsnorm,
    rope,
    softmax,
    swiglu,
    weighted_sum,
)
from kernels import _long_rows as long_rows
from kernels._dispatch import tl

# The letters keep launches readable: fp32, 16-bit and int64, then rows and columns.
F, H, I = torch.float32, torch.bfloat16, torch.int64  # noqa: E741
N, D = 8192, 4096


def e(*shape: int, dtype: torch.dtype = H) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _elementwise() -> None:
    """Launch addition and GeLU."""
    x = e(N, D)
    elementwise.launch_flat(elementwise.add_kernel, "add", x, x, x)
    elementwise.launch_flat(elementwise.gelu_forward_kernel, "gelu", x, x)
    elementwise.launch_flat(elementwise.gelu_backward_kernel, "gelu_backward", x, x, x)


def _weighted_sum() -> None:
    """Launch the course's first reduction."""
    x, w = e(N, D), e(D)
    weighted_sum.launch_forward(x, w, e(N))
    weighted_sum.launch_backward(e(N), x, w, x)


def _rmsnorm() -> None:
    """Launch RMSNorm on rows of three lengths, with a residual, on few rows and on long rows."""
    stat = e(N, dtype=F)
    for cols in (1024, D, 16384):
        x, w = e(N, cols), e(cols)
        rmsnorm.launch_forward(x, None, w, x, x, stat, 1e-5, False)
        # Longer rows have another backward kernel, which `_long_rows` launches.
        if cols <= rmsnorm.ONE_TILE_BACKWARD:
            rmsnorm.launch_backward(x, None, x, w, stat, x, False, None)
    x, w = e(N, D), e(D)
    rmsnorm.launch_forward(x, x, w, x, x, stat, 1e-5, True)
    rmsnorm.launch_backward(x, x, x, w, stat, x, True, None)
    rmsnorm.launch_backward(x[:512], None, x[:512], w, stat, x, False, H)


def _layernorm() -> None:
    """Launch LayerNorm on rows of three lengths."""
    stat = e(2, N, dtype=F)
    for cols in (1024, D, 16384):
        x, w = e(N, cols), e(cols)
        rmsnorm.launch_forward(x, None, w, x, x, stat, 1e-5, False, w)
        if cols <= rmsnorm.ONE_TILE_BACKWARD:
            rmsnorm.launch_backward(x, None, x, w, stat, x, False, H)


def _long_rows() -> None:
    """Launch norms of rows that do not fit on chip."""
    x, w, stat = e(256, 200000), e(200000), e(2, 256, dtype=F)
    long_rows.launch_long_forward(x, None, w, x, x, stat[0], 1e-5, False)
    long_rows.launch_long_forward(x, x, w, x, x, stat, 1e-5, True, w)
    rmsnorm.launch_backward(x, x, x, w, stat, x, True, H)


def _softmax() -> None:
    """Launch the softmax of rows of several lengths, in fp32 and bf16."""
    for cols in (1024, D, 32768):
        softmax.launch_forward(e(N, cols, dtype=F), e(N, cols, dtype=F))
    for cols in (D, 16384, 32768, 200000):
        softmax.launch_backward(*(e(256, cols, dtype=F) for _ in range(3)))
    for cols in (32768, 200000):
        x = e(256, cols)
        softmax.launch_forward(x, x)
    softmax.launch_forward(x[:1], x[:1])  # Triton makes a size of 1 a constant


def _swiglu() -> None:
    """Launch forward and backward."""
    x = e(N, D)
    swiglu.launch(swiglu.forward_kernel, "swiglu", (x, x), (x,))
    swiglu.launch(swiglu.backward_kernel, "swiglu_backward", (x, x, x), (x, x))


def _rope() -> None:
    """Launch rotation of queries in a fused projection."""
    q, table = e(4, 2048, 3, 32, 128).permute(2, 0, 3, 1, 4), e(2048, 128, dtype=F)
    rope.launch_rope(q, table, table, q.contiguous(), 1.0)


def _dropout() -> None:
    """Launch dropout with and without bias and GeLU."""
    x, w, seed = e(N, D), e(D), e(1, dtype=I)
    for gelu in (False, True):
        dropout.launch_dropout(x, w if gelu else None, seed, x, 0.1, gelu)
        dropout.launch_dropout(x, w if gelu else None, seed, x, 0.1, gelu, x)


def _cross_entropy() -> None:
    """Launch the loss, the loss with its gradient, the gradient, and the sums over rows."""
    z, t, one, stat = e(2048, 151936), e(2048, dtype=I), e(1, dtype=F), e(N, dtype=F)
    cross_entropy.launch_loss(z, t, stat, stat, stat, -100, 0.1)
    cross_entropy.launch_loss(z, t, stat, stat, stat, -100, 0.1, z, one)
    cross_entropy.launch_gradient(z, t, stat, stat, one, one, z, -100, 0.1)
    cross_entropy.launch_gradient(z[:1], t[:1], stat, stat, one, one, z[:1], -100, 0.0)
    for count in (False, True):
        _dispatch.launch(
            cross_entropy.total_kernel,
            (1,),
            t if count else stat,
            one,
            one,
            one,
            2048,
            -100,
            COUNT=count,
            BLOCK=4096,
            num_warps=16,
        )


def _matmul() -> None:
    """Launch products by pointers, then by descriptors every layout of two 16-bit matrices."""
    a, w, f, half = e(D, D), e(D), e(D, D, dtype=F), e(D, D, dtype=torch.float16)
    matmul.launch_pointers(a, a, None, a, None, "ieee", group=1)
    matmul.launch_pointers(a, a, w, a, "silu", "ieee")
    matmul.launch_pointers(a, e(D, 256), None, e(D, 256), "rms_norm", "ieee")
    for precision in matmul.PRECISIONS:
        matmul.launch_pointers(f, f, None, f, None, precision)
    matmul.launch_pointers(f, e(D, 256, dtype=F), None, e(D, 256, dtype=F), "rms_norm", "tf32x3")
    for left, right in ((a, a), (a.T, a), (a, a.T)):
        matmul.launch_persistent(left, right, w, a, "gelu")
    # The smaller tiles.
    matmul.launch_persistent(e(512, D), a, None, e(512, D), None)
    matmul.launch_persistent(e(512, 512), e(512, 512), None, e(512, 512), None)
    # The first matmul of a gradient in fp16.
    matmul.launch_persistent(half, half, None, f, None)
    matmul.launch_persistent(half[:512], half[:, :512], None, e(512, 512, dtype=F), None)


def _float8_linear() -> None:
    """Launch the largest element, the cast, and a transposition of bytes."""
    q = e(N, D, dtype=float8_linear.E4M3)
    float8_linear.launch_cast(e(N, D), e(float8_linear.PARTS, dtype=F), q, e(dtype=F))
    float8_linear.launch_transpose(q, q)


def _adamw() -> None:
    """Launch a step over parameters of every dtype, and a scaling by a number on the device."""
    i = e(8, dtype=I)
    options = adamw.factors(3, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for dtype in adamw._TYPES.values():
        _dispatch.launch(
            adamw.adamw_kernel,
            (8,),
            i,
            i,
            e(8, dtype=torch.int32),
            i,
            *options,
            PARAMETER=dtype,
            GRADIENT=dtype,
            ALIGNMENT=16,
            BLOCK=2048,
            num_warps=8,
        )
    _dispatch.launch(
        _scale.scale_kernel, (8,), e(N, D), e(1, dtype=F), N * D, BLOCK=4096, num_warps=8
    )


def _flash_attention() -> None:
    """Launch attention of 64 heads of 4,096 by the tiles of the table, then Hopper's kernels."""
    from kernels.flash_attention import backward, configs, forward, hopper
    from kernels.flash_attention.options import Problem

    problem = Problem((None, 0), 0.125)
    q, lse = e(4, 16, 4096, 64), e(4, 16, 4096, dtype=F)
    tiles = configs.lookup(configs.key_of(q, problem, "sm_90"))
    forward.launch_forward(q, q, q, q, lse, problem, tiles.forward)
    # The backward has three kernels: Δ, then dK and dV, then dQ.
    saved = backward.launch_delta(q, q, q, q, lse, q)
    backward.launch_dkdv(saved, q, q, problem, tiles.dkdv)
    backward.launch_dq(saved, q, problem, tiles.dq)
    if hopper.installed():
        for head_dim in (128, 256):
            q = e(4, 16, 4096, head_dim)
            hopper.launch_forward(q, q, q, q, lse, problem)
            hopper.launch_backward(q, q, q, q, lse, q, q, q, q, problem)


def _attention_steps() -> None:
    """Launch the first kernels of the lesson, and the last."""
    q, lse = e(64, 4096, 64), e(64, 4096, dtype=F)
    lesson = _lesson_attention
    small, full, wide = lesson.Tile(16, 16), lesson.Tile(64, 64), lesson.Tile(64, 128)
    for step in (
        lesson.Step("", small, small, small),
        lesson.Step("", wide, full, wide, skip=True, split=True),
        lesson.Step("", wide, full, wide, skip=True, split=True, tma=True),
        lesson.Step("", wide, full, wide, skip=True, split=True, tma=True, fused=True),
    ):
        lesson.forward(step, q, q, q)
        lesson.backward(step, q, q, q, q, lse, q)


def _lesson_kernels() -> None:
    """Launch the kernels of the effects in `gpu_lessons`."""
    x, f = e(2**26), e(2**20, dtype=F)
    for stages in (1, 4):
        _dispatch.launch(
            lessons.stream_kernel, (132,), x, x, x, 2**14, BLOCK=4096, STAGES=stages, num_warps=8
        )
    _dispatch.launch(lessons.reread_kernel, (8,), f, f, 8, SPAN=2**20, BLOCK=1024, num_warps=4)
    _dispatch.launch(lessons.strided_kernel, (8,), f, f, 2, 0, BLOCK=1024, num_warps=32)
    _dispatch.launch(lessons.busy_kernel, (8,), f, 1000, BLOCK=1024, num_warps=32)
    _dispatch.launch(
        lessons.divergent_kernel, (8,), f, 1000, WIDTH=1, WAYS=4, BLOCK=1024, num_warps=32
    )


def _lesson_forms() -> None:
    """Launch the kernels of its forms.

    Work fused into a matmul, and 32 operands, serialize and spill in order to lose.
    """
    x, f = e(2**20), e(2**20, dtype=F)
    run = _dispatch.launch
    run(forms.column_sums_kernel, (8, 8), x, f, 1024, 1024, ATOMIC=True, ROWS=32, BLOCK=128)
    run(forms.variance_kernel, (8,), f, f, 2**17, FORM="Welford", BLOCK=4096, num_warps=8)
    run(forms.softmax_kernel, (528,), f, f, 1024, BLOCK=1024, STAGES=4)
    run(
        forms.prologue_kernel,
        (8, 8),
        x,
        x,
        x,
        1024,
        1024,
        1024,
        FORM="none",
        BLOCK_M=128,
        BLOCK_N=128,
        BLOCK_K=32,
        num_warps=8,
    )
    run(forms.gelu_forward_kernel, (8,), x, x, x, 0.5, STORED=True, BLOCK=1024)
    run(forms.gelu_backward_kernel, (8,), x, x, x, x, 0.5, STORED=True, BLOCK=1024)
    run(forms.log_sum_kernel, (8,), x, x, 2**15, K=16, BLOCK=1024)


def _lesson_banks() -> None:
    """Launch the copy through shared memory without and with a swizzle."""
    from experiments.lessons._lesson_banks import transpose_kernel

    for phases in (1, 32):
        _dispatch.launch(transpose_kernel, (8,), e(8, 32, 32, dtype=F), 1000, PHASES=phases)


def _average() -> None:
    """Launch the average of the chunks that copy engines have brought."""
    own = e(2**20, dtype=F)
    _dispatch.launch(
        average.average_kernel,
        (8,),
        own,
        own,
        2**20,
        2**20,
        SCALE=0.5,
        OTHERS=1,
        SUM=tl.float32,
        BLOCK=average.BLOCK,
    )


MODULES: dict[str, Callable[[], None]] = {
    # The name of a module is that of its function without the underscore.
    function.__name__[1:]: function
    for function in (
        _elementwise,
        _weighted_sum,
        _rmsnorm,
        _layernorm,
        _long_rows,
        _softmax,
        _swiglu,
        _rope,
        _dropout,
        _cross_entropy,
        _matmul,
        _float8_linear,
        _adamw,
        _average,
        _flash_attention,
        _attention_steps,
        _lesson_kernels,
        _lesson_forms,
        _lesson_banks,
    )
}
