"""Rule for which calls take the Hopper kernels, and their launchers.

The kernels are in hopper_forward.py, hopper_backward.py and, for head dims above 128,
hopper_wide.py. `serves` is the rule, and SERVED is the rule in words, which `distlab doctor`
prints. The backward up to head dim 128 is not deterministic (`adds_in_any_order`), so a
deterministic backward does not ask `serves` there.

Other calls run on the Triton kernels, with the same results: windows and packed documents, whose
rows see keys between two borders where these kernels know only the upper one; softcap; other head
dims; fp32; calls too short to fill the GPU.
"""

import functools
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _dispatch
from .._dispatch import cdiv, generation, multiprocessors
from . import configs
from .options import Problem

# Heads of 80 and 96 have tiles of 128 columns, those of 192 have tiles of 256. TMA fills the other
# columns with zeros.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SERVED = (
    "16 bits, head dims 64, 80, 96, 128, 192 and 256, without window, documents or softcap, "
    "the forward from 12,288 rows on and the backward from 4,800 "
    "(above 128 both from 4,096; a deterministic backward only above 128)"
)
# Least number of rows of all query heads together: of queries in the forward, of keys in the
# backward. With fewer rows, Triton's kernels are faster: their tiles are smaller, so they use more
# of the multiprocessors. Found on an H200, see docs/notes/flash_attention.md. Above head dim 128,
# fewer rows than these were not measured.
LEAST_ROWS = {"forward": 12_288, "backward": 4_800}
LEAST_ROWS_WIDE = 4_096
DTYPES = (torch.float16, torch.bfloat16)
KEYS = 128  # keys of a program of the one-pass backward


class ForwardShape(NamedTuple):
    """Shape of a program of the forward.

    Attributes:
        consumers: number of warpgroups that compute, each with 64 queries.
        keys: keys of a tile.
        stages: number of buffers for K and V.
    """

    consumers: int
    keys: int
    stages: int


# By the columns of a tile.
FORWARD = {
    64: ForwardShape(consumers=2, keys=128, stages=2),
    128: ForwardShape(consumers=2, keys=128, stages=2),
    256: ForwardShape(consumers=2, keys=64, stages=2),
}
# At 64 columns, four consumers are faster from this many rows on. With fewer, programs of 256
# queries are too few to keep the multiprocessors equally busy.
FOUR_CONSUMERS = ForwardShape(consumers=4, keys=64, stages=3)
FOUR_CONSUMERS_ROWS = 2**16
LOG2_E = 1.4426950408889634
# Order of the forward's tiles, see `_order`. Starting with the longest tiles of all heads gives the
# most even end. It is best if the L2 holds all keys and values, or if there are so few heads that
# many programs read one head at a time.
L2_BYTES = 2**26
MOST_HEADS = 32
# Otherwise the forward goes head by head, unless the program with the most work then has UNEVEN
# times the mean. Counting the work of MOST_DEALT tiles takes a few ms, once.
UNEVEN = 1.1
MOST_DEALT = 2**15
# Otherwise, and in the backward, each tile has its own program. Programs that run at the same time
# belong to as many heads as have this many bytes together. In the backward, the sums of dQ add as
# many.
FORWARD_BYTES = 2**25
BACKWARD_BYTES = 2**23
# Numbers of query heads of one key head that one program of the backward may walk over, best first.
# A program whose keys are seen by few queries is soon some heads ahead of the others, and then the
# L2 does not hold what they share. With several programs for one key head, each writes a part of dK
# and dV in the dtype of k, and the parts are summed.
EACH = (4, 3, 2, 1)
# Least number of programs per multiprocessor for which a program walks over more than one query
# head. With a mask, programs see different numbers of queries, and end at different times. 128
# programs for 132 multiprocessors are too few then, and 192 are enough.
LEAST_PROGRAMS = 1.25
LEAST_PROGRAMS_FULL = 0.9


@functools.cache
def installed() -> bool:
    """Return whether this Triton has Gluon for Hopper, which came with 3.6."""
    try:
        module = importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper")
    except ModuleNotFoundError:  # one of its parents is missing
        return False
    return module is not None


def unavailable(index: int | None) -> str | None:
    """Return why no call on this CUDA device takes these kernels, or None if they run there."""
    gpu = generation(index)
    if gpu != "sm_90":
        return f"those for Hopper need sm_90, this is {gpu}"
    if not installed():
        return "this Triton has no Gluon, which came with 3.6"
    return None


def serves(
    direction: str, q: Tensor, k: Tensor, v: Tensor, problem: Problem, *more: Tensor
) -> bool:
    """Return whether the Hopper kernels take this call.

    Args:
        direction: "forward" or "backward".
        q, k, v: (B, H, T, D) tensors with contiguous rows.
        problem: masks, scale and precision of the call.
        more: the other tensors that TMA reads or writes, of the same form.
    """
    if q.shape[-1] not in HEAD_DIMS or q.dtype not in DTYPES:
        return False
    if problem.band[0] is not None or problem.bounds is not None or problem.softcap is not None:
        return False
    # hopper_forward.py multiplies the maximum of no scores, −2⁶⁴, by the scale. The product must
    # be finite.
    if problem.scale >= 2**63:
        return False
    # The programs share the rows of queries in the forward, and of keys in the backward. A key head
    # counts once for each query head, because each can have its own programs.
    length = q.shape[2] if direction == "forward" else k.shape[2]
    least = LEAST_ROWS_WIDE if q.shape[-1] > 128 else LEAST_ROWS[direction]
    if q.shape[0] * q.shape[1] * length < least:
        return False
    # Coordinates are int32: rows of Δ, of which there are more than of anything else, and positions
    # past the last query and key.
    padded_rows = q.shape[0] * q.shape[1] * (q.shape[2] + KEYS)
    last_position = q.shape[2] + k.shape[2] + KEYS
    if max(padded_rows, last_position) >= configs.MAX_COORDINATE:
        return False
    if not all(configs.tma_strides(x) for x in (q, k, v, *more)):
        return False
    # Forced launch parameters are those of the Triton kernels.
    return unavailable(q.device.index) is None and not _dispatch.FORCED


def adds_in_any_order(q: Tensor) -> bool:
    """Return whether the last bits of the backward's dQ can differ from run to run.

    The one pass of head dims up to 128 adds parts of dQ in any order. The two passes of larger head
    dims are bit-identical.
    """
    return q.shape[-1] <= 128


def _descriptor(x: Tensor, rows: int) -> "TensorDescriptor":  # noqa: F821
    """Return a descriptor of a tensor, for tiles of `rows` rows.

    Args:
        x: a (B, H, T, D) tensor: a tile is rows of one head, and columns past the head dim are read
            as zeros and not written. Or the (…, 256) sum of dQ. Or Δ or the log-sum-exp (B, H, T):
            a tile is `rows` consecutive elements.
        rows: rows of a tile.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.dim() == 3:  # Δ, log-sum-exp
        layout = NVMMASharedLayout(0, 32, rank=1)
        return TensorDescriptor(x, [x.numel()], [1], [rows], layout)
    if x.dim() == 2:  # sum of dQ
        layout = NVMMASharedLayout(0, 32, rank=2)
        block = [rows, x.shape[1]]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
    layout = NVMMASharedLayout(128, 8 * x.element_size(), rank=4)
    block = [1, 1, rows, configs.block_d(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), configs.tma_strides(x), block, layout)


@functools.lru_cache(4096)
def dealt_evenly(
    heads: int, query_count: int, key_count: int, hi: int, programs: int, queries: int, keys: int
) -> bool:
    """Return whether all programs of the forward have about the same work, head by head.

    If one head has about as many tiles as there are programs, the first programs get all its long
    tiles. So the programs take tiles in turns, back and forth, and this counts what each one gets.

    Args:
        heads: number of query heads of all batches.
        query_count: Tq.
        key_count: Tk.
        hi: number of keys visible after the query.
        programs: number of programs.
        queries: queries of a tile.
        keys: keys of a tile.
    """
    # Work of a tile: the key tiles that its last query sees, at least one. The longest come first.
    work = []
    for first in range(0, query_count, queries):
        last = min(first + queries, query_count) - 1
        seen = min(last + hi + 1, key_count)
        work.append(max(cdiv(seen, keys), 1))
    work.reverse()
    dealt = [0] * programs
    for place in range(heads * len(work)):
        turn, i = divmod(place, programs)
        program = i if turn % 2 == 0 else programs - 1 - i
        dealt[program] += work[place % len(work)]
    return max(dealt) * programs < UNEVEN * sum(work) * heads


def backward_cut(key_count: int, hi: int, square: bool = False) -> int:
    """Return which tiles the mask can cut: 0 none, 1 only the first of each program, 2 any.

    A tile is cut if it has keys that one of its queries does not see.

    Args:
        key_count: Tk.
        hi: number of keys visible after the query.
        square: whether tiles have as many queries as keys, and programs have one query head. Only
            then can the diagonal be in the first tile alone.
    """
    if key_count % KEYS == 0 and hi + 1 >= key_count:
        return 0
    if square and key_count % KEYS == hi % KEYS == 0:
        return 1
    return 2


def forward_cut(key_count: int, hi: int, keys: int) -> int:
    """Return which tiles of a consumer the mask can cut: 0 none, 1 only the first, 2 any.

    The first tile of a consumer has the last keys that its queries see.

    Args:
        key_count: Tk.
        hi: number of keys visible after the query.
        keys: keys of a tile.
    """
    if hi + 1 >= key_count:  # all queries see all keys
        return 1 if key_count % keys > 0 else 0
    return 1 if hi % keys == 0 else 2


def _order(q: Tensor, k: Tensor, hi: int, queries: int, keys: int) -> tuple[int, int]:
    """Return the number of programs of a forward, and of heads whose longest tiles come first.

    Args:
        q: queries (B, H, Tq, D).
        k: keys (B, Hk, Tk, D).
        hi: number of keys visible after the query.
        queries: queries of a tile.
        keys: keys of a tile.
    """
    batch, heads, query_count, _ = q.shape
    batch_heads = batch * heads
    key_bytes = 2 * k.numel() * k.element_size()  # keys and values
    tiles = cdiv(query_count, queries) * batch_heads
    programs = min(multiprocessors(q.device), tiles)
    if key_bytes < L2_BYTES or batch * k.shape[1] <= MOST_HEADS:
        return programs, batch_heads
    if tiles <= MOST_DEALT and dealt_evenly(
        batch_heads, query_count, k.shape[2], hi, programs, queries, keys
    ):
        return programs, 1
    return tiles, max(1, FORWARD_BYTES * batch_heads // key_bytes)


def _last_visible(k: Tensor, problem: Problem) -> int:
    """Return hi for the kernels. Without a mask it is the number of keys, which hides none."""
    return k.shape[2] if problem.band[1] is None else problem.hi


def forward_shape(q: Tensor) -> ForwardShape:
    """Return the shape of the forward's programs for queries (B, H, Tq, D)."""
    columns = configs.block_d(q.shape[3])
    if columns == 64 and q.shape[0] * q.shape[1] * q.shape[2] >= FOUR_CONSUMERS_ROWS:
        return FOUR_CONSUMERS
    return FORWARD[columns]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, problem: Problem
) -> None:
    """Fill o and lse.

    Args:
        q, k, v, o: tensors as in forward.py that `serves` takes.
        lse: contiguous tensor (B, H, Tq) in fp32.
        problem: mask and scale.
    """
    from .hopper_forward import hopper_forward_kernel

    batch, heads, query_count, _ = q.shape
    key_count = k.shape[2]
    shape = forward_shape(q)
    hi = _last_visible(k, problem)
    programs, group = _order(q, k, hi, 64 * shape.consumers, shape.keys)
    _dispatch.launch(
        hopper_forward_kernel,
        (programs,),
        _descriptor(q, 64),
        _descriptor(k, shape.keys),
        _descriptor(v, shape.keys),
        _descriptor(o, 64),
        lse,
        heads,
        batch * heads,
        heads // k.shape[1],  # kv_group
        query_count,
        key_count,
        hi,
        group,
        problem.scale * LOG2_E,
        CONSUMERS=shape.consumers,
        STAGES=shape.stages,
        CUT=forward_cut(key_count, hi, shape.keys),
        num_warps=4,
    )


def _query_heads(kv_group: int, key_tiles: int, full: bool, device: torch.device) -> int:
    """Return the number of query heads that one program of the backward walks over.

    It is the first of EACH that leaves enough programs, otherwise 1.

    Args:
        kv_group: number of query heads that read a key head.
        key_tiles: number of key tiles of all key heads.
        full: whether all queries see all keys.
        device: CUDA device of the call.
    """
    least = multiprocessors(device) * (LEAST_PROGRAMS_FULL if full else LEAST_PROGRAMS)
    for each in EACH:
        if kv_group % each == 0 and key_tiles * (kv_group // each) >= least:
            return each
    return 1


def _group(q: Tensor) -> int:
    """Return of how many heads programs of the backward run at the same time.

    A head counts once for every part of it that has its own programs, see EACH.
    """
    head_bytes = 2 * q.element_size() * q.shape[2] * q.shape[3]  # Q and dO
    return max(1, BACKWARD_BYTES // head_bytes)


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
    """Fill dq, dk and dv.

    Head dims up to 128 take one pass, `hopper_backward_kernel`. It sums dQ in fp32, and
    `cast_kernel` rounds the sum. Larger head dims take two passes, `hopper_dkdv_kernel` and
    `hopper_dq_kernel`.

    Args:
        q, k, v, o, lse: tensors that the forward saved, as in backward.py.
        do: gradient of o. `serves` takes do, dq, dk and dv.
        dq, dk, dv: results.
        problem: mask and scale.
        dlse: contiguous gradient of lse, or None if it is zero.
    """
    from .backward import ROW_PADDING, launch_delta
    from .hopper_backward import cast_kernel, hopper_backward_kernel
    from .hopper_wide import hopper_dkdv_kernel, hopper_dq_kernel

    batch, heads, query_count, head_dim = q.shape
    key_heads, key_count = k.shape[1], k.shape[2]
    columns = configs.block_d(head_dim)
    kv_group = heads // key_heads
    one_pass = adds_in_any_order(q)

    # Query heads that one program walks over. If these are not all that read its key head, several
    # programs have the same keys, and each writes its own part of dK and dV.
    hi = _last_visible(k, problem)
    keys = KEYS if one_pass else 64  # keys of a program
    key_tiles = batch * key_heads * cdiv(key_count, keys)
    each = _query_heads(kv_group, key_tiles, hi + 1 >= key_count, q.device)
    if each == kv_group:
        dk_parts = dk
        dv_parts = dv
    else:
        part_shape = (batch, heads // each, *k.shape[2:])
        dk_parts = torch.empty(part_shape, dtype=k.dtype, device=k.device)
        dv_parts = torch.empty(part_shape, dtype=k.dtype, device=k.device)

    # The sum of dQ, in rows of 256 elements: the unit that TMA adds.
    dq_sum = None
    if one_pass:
        padded_rows = batch * heads * cdiv(query_count, ROW_PADDING) * ROW_PADDING
        sum_shape = (padded_rows * columns // 256, 256)
        dq_sum = torch.empty(sum_shape, dtype=torch.float32, device=q.device)
    saved = launch_delta(q, k, v, o, lse, do, dq_sum, dlse)

    queries = 128 if columns == 64 else 64  # queries of a tile
    rows = [
        _descriptor(q, queries),
        _descriptor(k, 64),
        _descriptor(v, 64),
        _descriptor(do, queries),
    ]
    stats = [_descriptor(saved.lse2, queries), _descriptor(saved.delta, queries)]
    results = [_descriptor(dk_parts, 64), _descriptor(dv_parts, 64)]
    padded_count = saved.lse2.shape[2]
    group = _group(q)
    scale_log2 = problem.scale * LOG2_E
    numbers = [query_count, key_count, padded_count, hi, group, problem.scale, scale_log2]
    if one_pass:
        _dispatch.launch(
            hopper_backward_kernel,
            (key_tiles * (kv_group // each),),
            *rows,
            *stats,
            _descriptor(dq_sum, 16),
            *results,
            heads,
            kv_group,
            each,
            *numbers,
            CUT=backward_cut(key_count, hi, queries == KEYS and each == 1),
            num_warps=4,
            launch_pdl=True,  # starts while `delta_kernel` ends
        )
        row_tiles = padded_count // 64
        column_tiles = columns // 64
        _dispatch.launch(
            cast_kernel,
            (batch * heads * row_tiles * column_tiles,),
            dq_sum,
            dq,
            *dq.stride()[:3],
            heads,
            query_count,
            row_tiles,
            problem.scale,
            HEAD_DIM=head_dim,
            PARTS=column_tiles,
            num_warps=4,
            launch_pdl=True,
        )
    else:
        _dispatch.launch(
            hopper_dkdv_kernel,
            (key_tiles * (kv_group // each),),
            *rows,
            *stats,
            *results,
            heads,
            kv_group,
            each,
            *numbers,
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
            *numbers,
            num_warps=4,
        )
    if each != kv_group:
        # The parts of one key head are next to each other: (B, Hk, parts, Tk, D).
        by_key_head = (batch, key_heads, -1, *k.shape[2:])
        torch.sum(dk_parts.view(by_key_head), 2, out=dk)
        torch.sum(dv_parts.view(by_key_head), 2, out=dv)
