"""What kind of work an operator or a kernel is, told by its name.

The names come from four worlds: operators (``aten::mm``), nodes of autograd (``MmBackward0``), kernels of libraries
(``nvjet_…``, ``cunn_SoftMaxForward``) and kernels of Triton, whose own names say little (``forward_kernel``): those
are told by the operator that launched them.
"""

from __future__ import annotations

import functools
import re

# In this order; the first pattern that is found decides. `mm` must not be found inside a longer word.
_PATTERNS = (
    ("communication", r"nccl|gloo|c10d"),
    ("optimizer", r"adam|sgd|multi_?tensor|foreach|clip_grad"),
    ("loss", r"log_?softmax|nll_?loss|cross_?entropy"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("softmax", r"softmax"),
    ("normalisation", r"(rms|layer|group|batch)_?norm|gammabeta|rmsnorm"),
    ("matrix products", r"(?<![a-z])(add)?b?a?(add)?b?mm(?![a-z])|(add|b)?mm_?backward|matmul|linear|gem[mv]|nvjet"
                        r"|cutlass|xmma|cublas|split_?k"),
    ("element-wise", r"triton_(poi|red|per)|swiglu|silu|gelu|sigmoid|rope|"
                     r"(?<![a-z])(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt|reciprocal|where|masked_?fill|dropout|sum|"
                     r"mean|tanh|cos|sin|abs|maximum|minimum|ones_like|zeros_like|fill|zero)_?(backward|(?![a-z]))"),
    ("casts and copies", r"copy|::to$|clone|contiguous|mem(cpy|set)|catarray|::cat$|catbackward|split\w*backward|"
                         r"roll|stack|unbind|reshape|::index_put"),
    ("element-wise", r"element_?wise|reduce_kernel"),
)  # fmt: skip
_COMPILED = [(name, re.compile(pattern)) for name, pattern in _PATTERNS]
OTHER = "other"
CATEGORIES = (
    "matrix products", "attention", "softmax", "normalisation", "element-wise", "loss", "casts and copies",
    "communication", "optimizer", OTHER,
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def category(name: str, operator: str | None = None) -> str:
    """One of `CATEGORIES`.

    ``attention`` is a fused attention; one that is written out is matrix products and ``softmax``. Embeddings, views
    and what nobody thought of are ``other``.

    Args:
        name: of the operator, node or kernel.
        operator: for a kernel, the operator that launched it, which decides if its name says something.
    """
    for text in (operator, name):
        for kind, pattern in _COMPILED if text else ():
            if pattern.search(text.lower()):
                return kind
    return OTHER


def readable(name: str) -> str:
    """An operator's name without what only a machine reads: autograd's prefix, and the hash of a compiled graph."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return re.sub(r"## Call CompiledFxGraph \w+ ##", "compiled graph", name)
