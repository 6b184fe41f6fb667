"""Which calls the Hopper kernels take, and their launchers; the kernels are in hopper_forward.py, hopper_backward.py.

`serves` is the whole rule. What it does not take runs on the Triton kernels, with the same results.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from .. import _dispatch
from .._triton import cdiv, generation
from . import configs
from .options import Problem

HEAD_DIMS = {"forward": (128,), "backward": (64, 128)}  # the Triton forward is the faster one at 64
LEAST_ROWS = 2**14  # of all heads: programs of 128 for a GPU of 132 multiprocessors; fewer leave it idle
DTYPES = (torch.float16, torch.bfloat16)
ALIGNMENT_BYTES = 16  # of the base address and of every stride, for TMA
LARGEST = 2**31  # coordinates are int32
KEYS = 128  # of a program of the backward, of a tile of the forward
CONSUMER_REGISTERS = {2: 240, 3: 160}  # by consumers; with the producer's they fill the 64 Ki of a multiprocessor
LOG2_E = 1.4426950408889634
CAST_ROWS = 32


@functools.cache
def installed() -> bool:
    """Whether this Triton has Gluon for Hopper, which came with 3.6."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


def unavailable(index: int | None) -> str | None:
    """Why no call on this CUDA device takes these kernels, in words; None if they run there."""
    if (gpu := generation(index)) != "sm_90":
        return f"those for Hopper need sm_90, this is {gpu}"
    return None if installed() else "this Triton has no Gluon, which came with 3.6"


def serves(direction: str, q: Tensor, k: Tensor, v: Tensor, problem: Problem, *more: Tensor) -> bool:
    """Whether the Hopper kernel takes this call: (B, H, T, D) tensors with contiguous rows, `more` likewise.

    They take fp16 and bf16 with one of HEAD_DIMS, causal or not, any lengths and heads, from LEAST_ROWS rows on, on
    compute capability 9.0 with a Triton that has Gluon; no window and no documents. TMA asks for 16-byte aligned
    addresses and strides, and for dimensions that are not expanded. `direction` is "forward" or "backward".
    """
    owned = q if direction == "forward" else k  # whose rows the programs share out
    padded_rows = q.shape[0] * q.shape[1] * (q.shape[2] + KEYS)  # of Δ: more than of anything else but the keys
    return (
        q.shape[-1] in HEAD_DIMS[direction] and q.dtype in DTYPES and not (problem.has_lo or problem.has_doc)
        and owned.shape[0] * owned.shape[1] * owned.shape[2] >= LEAST_ROWS
        and max(padded_rows, q.shape[2] + k.shape[2] + KEYS) < LARGEST
        and all(_described(x) for x in (q, k, v, *more))
        and unavailable(q.device.index) is None and not configs.forces()
    )


def _described(x: Tensor) -> bool:
    """Whether TMA can describe x."""
    apart = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return x.data_ptr() % ALIGNMENT_BYTES == 0 and all(
        s > 0 and s * x.element_size() % ALIGNMENT_BYTES == 0 for s in apart)


def _descriptor(x: Tensor, rows: int, columns: int | None = None) -> "TensorDescriptor":  # noqa: F821
    """Of tiles of `rows` rows of one head; all columns unless given."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    head_dim = x.shape[3]
    strides = [head_dim if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    layout = NVMMASharedLayout(128, 8 * x.element_size(), rank=4)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns or head_dim], layout)


def _flat_descriptor(x: Tensor, rows: int) -> "TensorDescriptor":  # noqa: F821
    """Of runs of `rows` elements of a contiguous tensor."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, [x.numel()], [1], [rows], NVMMASharedLayout(0, 8 * x.element_size(), rank=1))


def _last_seen(problem: Problem, key_count: int) -> int:
    """hi of a band that has none reaches past the last key from everywhere."""
    return problem.hi if problem.has_hi else key_count


def launch_forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, problem: Problem, consumers: int = 2,
                   stages: int = 2) -> None:
    """Fill o and lse: tensors as in forward.py that `serves` takes, o among them, lse contiguous.

    `consumers` is 2 or 3, warpgroups of 64 queries each; `stages` the buffers of K and V.
    """
    from .hopper_forward import hopper_forward_kernel

    batch, heads, query_count, _ = q.shape
    _dispatch.launch(
        hopper_forward_kernel, (cdiv(query_count, 64 * consumers) * batch * heads,),
        _descriptor(q, 64), _descriptor(k, KEYS), _descriptor(v, KEYS), _descriptor(o, 64), lse,
        heads, heads // k.shape[1], query_count, k.shape[2], _last_seen(problem, k.shape[2]), problem.scale * LOG2_E,
        CONSUMERS=consumers, STAGES=stages, REGISTERS=CONSUMER_REGISTERS[consumers], num_warps=4)


def launch_backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dq: Tensor, dk: Tensor,
                    dv: Tensor, problem: Problem) -> None:
    """Fill dq, dk and dv: tensors as in backward.py that `serves` takes, do, dk and dv among them."""
    from .backward_launch import launch_delta
    from .hopper_backward import cast_kernel, hopper_backward_kernel

    batch, heads, query_count, head_dim = q.shape
    rows, queries = batch * heads * query_count, 64 if head_dim == 128 else 128
    dq_sum = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    saved = launch_delta(q, k, v, o, lse, do, dq_sum)
    _dispatch.launch(
        hopper_backward_kernel, (cdiv(k.shape[2], KEYS) * batch * k.shape[1],),
        _descriptor(q, queries), _descriptor(k, 64), _descriptor(v, 64), _descriptor(do, queries),
        _flat_descriptor(saved.lse2, queries), _flat_descriptor(saved.delta, queries),
        _descriptor(dq_sum, 64, 64), _descriptor(dk, 64), _descriptor(dv, 64),
        heads, heads // k.shape[1], *saved.counts(), _last_seen(problem, k.shape[2]), problem.scale,
        problem.scale * LOG2_E, num_warps=4)
    _dispatch.launch(cast_kernel, (cdiv(rows, CAST_ROWS),), dq_sum, dq, *dq.stride()[:3], heads, query_count, rows,
                     problem.scale, HEAD_DIM=head_dim, ROWS=CAST_ROWS, num_warps=4)
