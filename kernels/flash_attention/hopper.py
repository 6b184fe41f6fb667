"""Which calls the Hopper kernels take, and their launchers; the kernels are in hopper_forward.py, hopper_backward.py
and, for head dims above 128, hopper_wide.py.

`serves` is the rule, which a deterministic backward asks only where `adds_in_any_order` is false,
`SERVED` the rule in words, which `distlab doctor` says. What is not taken runs on the Triton
kernels, with the same results: windows and packed documents, whose rows see keys between two
borders where these kernels know only the upper one; softcap; other head dims; fp32; calls too short
to fill the GPU.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from .. import _dispatch
from .._dispatch import cdiv, generation, multiprocessors
from . import configs
from .options import Problem

# Heads of 80 and 96 are tiles of 128 whose other columns TMA makes zeros, those of 192 tiles of
# 256.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SERVED = (
    "16 bits, head dims 64, 80, 96, 128, 192 and 256, without window, documents or softcap, from 16,384 rows on "
    "(the forward at 64 from 65,536; a deterministic backward only above 128)"
)
# Of all heads: programs of 128 for a GPU of 132 multiprocessors; fewer leave it idle. The forward
# at 64 has programs of 256, and loses to Triton's where each multiprocessor gets but one.
LEAST_ROWS, LEAST_ROWS_64 = 2**14, 2**16
DTYPES = (torch.float16, torch.bfloat16)
KEYS = 128  # of a program of the one-pass backward
# Of the forward, by the columns of its tiles: consumers, of 64 queries each, keys of a tile,
# buffers of K and V.
FORWARD = {64: (4, 64, 3), 128: (2, 128, 2), 256: (2, 64, 2)}
LOG2_E = 1.4426950408889634
# The forward deals out the longest tiles of all heads first, which comes out the most evenly, if
# the L2 holds all keys and values, or if these are so few heads that many programs read one at a
# time.
L2_BYTES, MOST_HEADS = 2**26, 32
# Else it goes head after head, unless the program with the most to do then has UNEVEN times the
# mean. MOST_DEALT tiles take a few ms to count, once.
UNEVEN, MOST_DEALT = 1.1, 2**15
# Else, as in the backward, each tile has its program, and those side by side are of heads with so
# many bytes. The backward's add as many to sums of dQ.
FORWARD_BYTES, BACKWARD_BYTES = 2**25, 2**23
# Query heads of one key head that a program of the backward may walk over. A program whose keys few
# queries see is soon some heads ahead of the others, and the L2 loses what they share. If there are
# several programs for one key head, dK and dV are sums of what each gives, in the dtype of k.
EACH = (4, 3, 2, 1)


@functools.cache
def installed() -> bool:
    """Whether this Triton has Gluon for Hopper, which came with 3.6."""
    try:
        return (
            importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
        )
    except ModuleNotFoundError:
        return False


def unavailable(index: int | None) -> str | None:
    """Why no call on this CUDA device takes these kernels, in words; None if they run there."""
    if (gpu := generation(index)) != "sm_90":
        return f"those for Hopper need sm_90, this is {gpu}"
    return None if installed() else "this Triton has no Gluon, which came with 3.6"


def serves(
    direction: str, q: Tensor, k: Tensor, v: Tensor, problem: Problem, *more: Tensor
) -> bool:
    """Whether the Hopper kernel takes this call: (B, H, T, D) tensors with contiguous rows, `more` likewise.

    They take fp16 and bf16 with one of HEAD_DIMS, causal or not, any lengths and heads, from
    LEAST_ROWS rows on, on compute capability 9.0 with a Triton that has Gluon; no window, documents
    or softcap. TMA asks for 16-byte aligned addresses and strides, and for dimensions that are not
    expanded. `direction` is "forward" or "backward".
    """
    owned = q if direction == "forward" else k  # whose rows the programs share out
    least = LEAST_ROWS_64 if direction == "forward" and q.shape[-1] == 64 else LEAST_ROWS
    # of Δ: more than of anything else but the keys
    padded_rows = q.shape[0] * q.shape[1] * (q.shape[2] + KEYS)
    return (
        q.shape[-1] in HEAD_DIMS
        and q.dtype in DTYPES
        and problem.band[0] is None
        and problem.bounds is None
        and problem.softcap is None
        # beyond, hopper_forward.py's maximum of no scores times it were infinite
        and problem.scale < 2**63
        and owned.shape[0] * owned.shape[1] * owned.shape[2] >= least
        and max(padded_rows, q.shape[2] + k.shape[2] + KEYS) < configs.MAX_COORDINATE
        and all(configs.tma_strides(x) for x in (q, k, v, *more))
        and unavailable(q.device.index) is None
        and not _dispatch.FORCED
    )


def adds_in_any_order(q: Tensor) -> bool:
    """Whether the backward sums dQ in one pass; the two passes of head dims above 128 are bit-identical."""
    return q.shape[-1] <= 128


def _descriptor(x: Tensor, rows: int) -> "TensorDescriptor":  # noqa: F821
    """Of tiles of `rows` rows of one head of a (B, H, T, D) tensor.

    Columns past the head dim are read as zeros and not written. Of Δ and the log-sum-exp, which are
    contiguous: of runs of `rows` elements.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.dim() == 3:
        return TensorDescriptor(x, [x.numel()], [1], [rows], NVMMASharedLayout(0, 32, rank=1))
    if x.dim() == 2:
        return TensorDescriptor(
            x, list(x.shape), list(x.stride()), [rows, x.shape[1]], NVMMASharedLayout(0, 32, rank=2)
        )
    layout = NVMMASharedLayout(128, 8 * x.element_size(), rank=4)
    block = [1, 1, rows, configs.block_d(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), configs.tma_strides(x), block, layout)


@functools.lru_cache(4096)
def dealt_evenly(
    heads: int, query_count: int, key_count: int, hi: int, programs: int, queries: int, keys: int
) -> bool:
    """Whether programs of the forward have about as much to do, one as another, if its tiles go head after head.

    A head with about as many tiles as there are programs gives the first of them all the long ones.
    `queries` and `keys` are those of a tile.
    """
    last = [min(first + queries, query_count) - 1 for first in range(0, query_count, queries)][::-1]
    work = [max(cdiv(min(row + hi + 1, key_count), keys), 1) for row in last]
    dealt = [0] * programs
    for place in range(heads * len(work)):
        turn, i = divmod(place, programs)
        dealt[programs - 1 - i if turn % 2 else i] += work[place % len(work)]
    return max(dealt) * programs < UNEVEN * sum(work) * heads


def backward_cut(key_count: int, hi: int, square: bool = False) -> int:
    """Which tiles may have keys that some query does not see: 0 none, 1 each program's first, 2 any.

    A program of the backward sees the diagonal in its first tile alone if its tiles are `square`
    and of one head.
    """
    if key_count % KEYS == 0 and hi + 1 >= key_count:
        return 0
    return 1 if square and key_count % KEYS == hi % KEYS == 0 else 2


def forward_cut(key_count: int, hi: int, keys: int) -> int:
    """Which tiles of a consumer of the forward may be cut: 0 none, 1 its first, which has the last keys seen, 2 any."""
    if hi + 1 >= key_count:
        return int(key_count % keys > 0)
    return 1 if hi % keys == 0 else 2


def _order(q: Tensor, k: Tensor, hi: int, queries: int, keys: int) -> tuple[int, int]:
    """Programs of a forward, and how many heads' longest tiles come first."""
    (batch, heads, query_count, _), key_bytes = q.shape, 2 * k.numel() * k.element_size()
    tiles = cdiv(query_count, queries) * batch * heads
    programs = min(multiprocessors(q.device), tiles)
    if key_bytes < L2_BYTES or batch * k.shape[1] <= MOST_HEADS:
        return programs, batch * heads
    if tiles <= MOST_DEALT and dealt_evenly(
        batch * heads, query_count, k.shape[2], hi, programs, queries, keys
    ):
        return programs, 1
    return tiles, max(1, FORWARD_BYTES * batch * heads // key_bytes)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, problem: Problem
) -> None:
    """Fill o and lse: tensors as in forward.py that `serves` takes, o among them, lse contiguous."""
    from .hopper_forward import hopper_forward_kernel

    batch, heads, query_count, head_dim = q.shape
    key_count = k.shape[2]
    consumers, keys, stages = FORWARD[configs.block_d(head_dim)]
    hi = key_count if problem.band[1] is None else problem.hi
    programs, group = _order(q, k, hi, 64 * consumers, keys)
    _dispatch.launch(
        hopper_forward_kernel,
        (programs,),
        _descriptor(q, 64),
        _descriptor(k, keys),
        _descriptor(v, keys),
        _descriptor(o, 64),
        lse,
        heads,
        batch * heads,
        heads // k.shape[1],
        query_count,
        key_count,
        hi,
        group,
        problem.scale * LOG2_E,
        CONSUMERS=consumers,
        STAGES=stages,
        CUT=forward_cut(key_count, hi, keys),
        num_warps=4,
    )


def _group(q: Tensor) -> int:
    """Parts of heads whose programs of the backward run side by side."""
    return max(1, BACKWARD_BYTES // (2 * q.element_size() * q.shape[2] * q.shape[3]))


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    problem: Problem,
    dlse: Tensor | None = None,
) -> None:
    """Fill dq, dk and dv: tensors as in backward.py that `serves` takes, do, dk and dv among them."""
    from .backward import ROW_PADDING, launch_delta
    from .hopper_backward import cast_kernel, hopper_backward_kernel
    from .hopper_wide import hopper_dkdv_kernel, hopper_dq_kernel

    (batch, heads, query_count, head_dim), key_count = q.shape, k.shape[2]
    columns, kv_group, one_pass = (
        configs.block_d(head_dim),
        heads // k.shape[1],
        adds_in_any_order(q),
    )
    each = next(count for count in EACH if kv_group % count == 0)
    part = (batch, heads // each, *k.shape[2:])  # of dK and dV
    parts = (
        (dk, dv)
        if each == kv_group
        else [torch.empty(part, dtype=k.dtype, device=k.device) for _ in range(2)]
    )
    padded = batch * heads * cdiv(query_count, ROW_PADDING) * ROW_PADDING
    dq_sum = (
        torch.empty(padded * columns // 256, 256, dtype=torch.float32, device=q.device)
        if one_pass
        else None
    )
    saved = launch_delta(q, k, v, o, lse, do, dq_sum, dlse)
    queries = 128 if columns == 64 else 64
    rows = [
        _descriptor(q, queries),
        _descriptor(k, 64),
        _descriptor(v, 64),
        _descriptor(do, queries),
    ]
    read = [*rows, _descriptor(saved.lse2, queries), _descriptor(saved.delta, queries)]
    written = [_descriptor(x, 64) for x in parts]
    hi = key_count if problem.band[1] is None else problem.hi
    others = (
        query_count,
        key_count,
        saved.lse2.shape[2],
        hi,
        _group(q),
        problem.scale,
        problem.scale * LOG2_E,
    )
    programs = batch * heads // each * cdiv(key_count, KEYS if one_pass else 64)
    if one_pass:
        _dispatch.launch(
            hopper_backward_kernel,
            (programs,),
            *read,
            _descriptor(dq_sum, 16),
            *written,
            heads,
            kv_group,
            each,
            *others,
            CUT=backward_cut(key_count, hi, queries == KEYS and each == 1),
            num_warps=4,
            launch_pdl=True,
        )
        tiles, wide = saved.lse2.shape[2] // 64, columns // 64
        _dispatch.launch(
            cast_kernel,
            (batch * heads * tiles * wide,),
            dq_sum,
            dq,
            *dq.stride()[:3],
            heads,
            query_count,
            tiles,
            problem.scale,
            HEAD_DIM=head_dim,
            PARTS=wide,
            num_warps=4,
            launch_pdl=True,
        )
    else:
        _dispatch.launch(
            hopper_dkdv_kernel,
            (programs,),
            *read,
            *written,
            heads,
            kv_group,
            each,
            *others,
            num_warps=4,
        )
        _dispatch.launch(
            hopper_dq_kernel,
            (cdiv(query_count, 128) * batch * heads,),
            *rows,
            _descriptor(dq, 64),
            saved.lse2,
            saved.delta,
            heads,
            kv_group,
            *others,
            num_warps=4,
        )
    for whole, x in zip((dk, dv), parts, strict=True):
        if x is not whole:
            torch.sum(x.view(*k.shape[:2], -1, *k.shape[2:]), 2, out=whole)
