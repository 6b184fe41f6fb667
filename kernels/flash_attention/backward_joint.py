"""Both passes of the attention backward in one launch, for calls too short to fill a GPU.

One head of 1,024 tokens has 16 tiles of 64 queries for an H100's 132 multiprocessors, and each of its programs is a
chain of small dependent steps: what such a call costs is the longest chain of each launch, one after the other. Here
the first programs own tiles of keys (dK/dV) and the rest tiles of queries (dQ), so that both chains run side by side.
Math, shapes and arguments are those of backward.py; no two programs write to the same address.
"""

import triton
import triton.language as tl

from .backward import dkdv_tile, dq_tile

COUNTS = ["heads", "kv_heads", "query_count", "key_count", "padded_count", "lo", "hi", "batch"]


@triton.jit(do_not_specialize=COUNTS)
def joint_kernel(q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, q_desc, do_desc, delta_desc, lse2_desc,
                 k_desc, v_desc, dq_ptr, dk_ptr, dv_ptr, doc_first, doc_last,
                 stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                 stride_gb, stride_gh, stride_gt, stride_dqb, stride_dqh, stride_dqt,
                 stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt,
                 heads, kv_heads, query_count, key_count, padded_count, lo, hi, scale, scale_log2, batch,
                 HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr, HEAD_DIM: tl.constexpr,
                 BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
                 KEY_BLOCK_M: tl.constexpr, KEY_BLOCK_N: tl.constexpr, KEY_GROUP: tl.constexpr,
                 KEY_RAGGED: tl.constexpr, KEY_TMA: tl.constexpr, QUERY_BLOCK_M: tl.constexpr,
                 QUERY_BLOCK_N: tl.constexpr, QUERY_GROUP: tl.constexpr, QUERY_RAGGED: tl.constexpr,
                 QUERY_TMA: tl.constexpr):
    """One program: a tile of keys (constants KEY_…, the longer chains, first) or a tile of queries (QUERY_…)."""
    pid = tl.program_id(0)
    kv_group = heads // kv_heads
    key_programs = tl.cdiv(key_count, KEY_BLOCK_N) * batch * kv_heads
    if pid < key_programs:
        dkdv_tile(pid, q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, q_desc, do_desc, delta_desc, lse2_desc,
                  dk_ptr, dv_ptr, dv_ptr, doc_first, doc_last,
                  stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                  stride_gb, stride_gh, stride_gt, stride_dkb, stride_dkh, stride_dkt,
                  stride_dvb, stride_dvh, stride_dvt, kv_heads, kv_group, query_count, key_count, padded_count,
                  lo, hi, scale, scale_log2, batch * kv_heads, 0, HAS_LO, HAS_HI, HAS_DOC, KEY_RAGGED, HEAD_DIM,
                  BLOCK_D, KEY_BLOCK_M, KEY_BLOCK_N, KEY_GROUP, PRECISION, KEY_TMA, False, False)
    else:
        dq_tile(pid - key_programs, q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, k_desc, v_desc,
                dq_ptr, doc_first, doc_last,
                stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                stride_gb, stride_gh, stride_gt, stride_dqb, stride_dqh, stride_dqt,
                heads, kv_group, query_count, key_count, padded_count, lo, hi, scale, scale_log2, batch * heads,
                HAS_LO, HAS_HI, HAS_DOC, QUERY_RAGGED, HEAD_DIM, BLOCK_D, QUERY_BLOCK_M, QUERY_BLOCK_N, QUERY_GROUP,
                PRECISION, QUERY_TMA)
