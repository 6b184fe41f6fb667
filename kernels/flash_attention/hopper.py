"""Which calls the Hopper kernels take, and their launchers; the kernels are in hopper_forward.py, hopper_backward.py.

`serves` is the whole rule, `SERVED` the rule in words, which `distlab doctor` says. What it does not take runs on the
Triton kernels, with the same results: windows and packed documents, whose rows see keys between two borders where these
kernels know only the upper one; softcap; other head dims; fp32; calls too short to fill the GPU; at d = 64 the forward,
where Triton's is faster.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from .. import _dispatch
from .._triton import cdiv, generation, multiprocessors
from . import configs
from .options import Problem

# The Triton forward is the faster one at 64. Heads of 80 and 96 are tiles of 128 whose other columns TMA makes zeros.
HEAD_DIMS = {"forward": (80, 96, 128), "backward": (64, 80, 96, 128)}
SERVED = (
    "16 bits, head dims 80, 96, 128 and 64 (there the backward), without window, documents or softcap, "
    "from 16,384 rows on"
)
LEAST_ROWS = 2**14  # of all heads: programs of 128 for a GPU of 132 multiprocessors; fewer leave it idle
DTYPES = (torch.float16, torch.bfloat16)
KEYS = 128  # of a program of the backward, of a tile of the forward
QUERIES = 128  # of a program of the forward, in each of its turns
LOG2_E = 1.4426950408889634
CAST_ROWS = 32
GROUP_BYTES = 2**25  # of the data that programs side by side read: the L2 holds 50 MB
# What a tile of the forward takes besides its key tiles, in the time of one of these: the start of a program, its first
# loads and its last store; less where they overlap with the tile before. Fitted to 2×32×2048 and 4×32×4096 at D = 128.
STARTED, TAKEN_IN_TURN = 2.5, 0.8


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
    compute capability 9.0 with a Triton that has Gluon; no window, documents or softcap. TMA asks for 16-byte aligned
    addresses and strides, and for dimensions that are not expanded. `direction` is "forward" or "backward".
    """
    owned = q if direction == "forward" else k  # whose rows the programs share out
    padded_rows = q.shape[0] * q.shape[1] * (q.shape[2] + KEYS)  # of Δ: more than of anything else but the keys
    return (
        q.shape[-1] in HEAD_DIMS[direction] and q.dtype in DTYPES and problem.band[0] is None
        and problem.bounds is None and problem.softcap is None
        and owned.shape[0] * owned.shape[1] * owned.shape[2] >= LEAST_ROWS
        and max(padded_rows, q.shape[2] + k.shape[2] + KEYS) < configs.MAX_COORDINATE
        and all(configs.tma_strides(x) for x in (q, k, v, *more))
        and unavailable(q.device.index) is None and not configs.FORCED
    )


def _descriptor(x: Tensor, rows: int, columns: int | None = None) -> "TensorDescriptor":  # noqa: F821
    """Of tiles of `rows` rows of one head of a (B, H, T, D) tensor, all columns unless given.

    Columns past the head dim are read as zeros and not written. Of Δ and the log-sum-exp, which are contiguous: of runs
    of `rows` elements.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.dim() == 3:
        return TensorDescriptor(x, [x.numel()], [1], [rows], NVMMASharedLayout(0, 32, rank=1))
    layout = NVMMASharedLayout(128, 8 * x.element_size(), rank=4)
    block = [1, 1, rows, columns or configs.block_d(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), configs.tma_strides(x), block, layout)


def _group(owned: Tensor, other: Tensor) -> int:
    """Heads of `owned` whose programs run side by side: GROUP_BYTES of what they read of `other`, twice."""
    head_bytes = 2 * other.element_size() * other.shape[1] * other.shape[2] * other.shape[3] // owned.shape[1]
    return max(1, GROUP_BYTES // head_bytes)


@functools.lru_cache(4096)
def takes_turns(heads: int, query_count: int, key_count: int, hi: int, programs: int) -> bool:
    """Whether a forward in as many programs as a GPU runs at once, tile after tile, beats a program for each tile.

    A GPU starts the next program where one ends, so all of them end at about the same time; turns are dealt out
    beforehand, and the program with the most work decides.
    """
    last = [min(first + QUERIES, query_count) - 1 for first in range(0, query_count, QUERIES)][::-1]
    work = [max(cdiv(min(row + hi + 1, key_count), KEYS), 1) for row in last]
    if not programs < heads * len(work) <= 2**13:
        return False
    dealt = [0.0] * programs
    for place in range(heads * len(work)):
        turn, i = divmod(place, programs)
        dealt[programs - 1 - i if turn % 2 else i] += work[place % len(work)] + TAKEN_IN_TURN
    return max(dealt) < (sum(work) + STARTED * len(work)) * heads / programs


def launch_forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, problem: Problem) -> None:
    """Fill o and lse: tensors as in forward.py that `serves` takes, o among them, lse contiguous."""
    from .hopper_forward import hopper_forward_kernel

    batch, heads, query_count, _ = q.shape
    key_count = k.shape[2]
    hi = key_count if problem.band[1] is None else problem.hi
    programs, group = multiprocessors(q.device), 1
    if not takes_turns(batch * heads, query_count, key_count, hi, programs):
        programs, group = cdiv(query_count, QUERIES) * batch * heads, _group(q, k)
    _dispatch.launch(
        hopper_forward_kernel, (programs,),
        _descriptor(q, 64), _descriptor(k, KEYS), _descriptor(v, KEYS), _descriptor(o, 64), lse,
        heads, batch * heads, heads // k.shape[1], query_count, key_count, hi, group, problem.scale * LOG2_E,
        num_warps=4)


def launch_backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dq: Tensor, dk: Tensor,
                    dv: Tensor, problem: Problem, dlse: Tensor | None = None) -> None:
    """Fill dq, dk and dv: tensors as in backward.py that `serves` takes, do, dk and dv among them."""
    from .backward import launch_delta
    from .hopper_backward import cast_kernel, hopper_backward_kernel

    batch, heads, query_count, head_dim = q.shape
    columns = configs.block_d(head_dim)
    queries = 64 if columns == 128 else 128
    dq_sum = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    saved = launch_delta(q, k, v, o, lse, do, dq_sum, dlse)
    _dispatch.launch(
        hopper_backward_kernel, (cdiv(k.shape[2], KEYS) * batch * k.shape[1],),
        _descriptor(q, queries), _descriptor(k, 64), _descriptor(v, 64), _descriptor(do, queries),
        _descriptor(saved.lse2, queries), _descriptor(saved.delta, queries),
        _descriptor(dq_sum, 64, 64), _descriptor(dk, 64), _descriptor(dv, 64),
        heads, heads // k.shape[1], query_count, k.shape[2], saved.lse2.shape[2],
        k.shape[2] if problem.band[1] is None else problem.hi,
        _group(k, q), problem.scale, problem.scale * LOG2_E, num_warps=4)
    rows = batch * heads * query_count
    _dispatch.launch(cast_kernel, (cdiv(rows, CAST_ROWS),), dq_sum, dq, *dq.stride()[:3], heads, query_count, rows,
                     problem.scale, HEAD_DIM=head_dim, COLUMNS=columns, ROWS=CAST_ROWS, num_warps=4)
