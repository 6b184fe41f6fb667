"""FlashAttention-2: the public function, the autograd Functions behind it, and its cost.

Files, from the call to the kernels:
    function.py            `flash_attention` and the autograd Functions
    options.py             the mask as a band, and the checks of arguments
    ops.py                 the operators that torch.compile sees, and the choice of kernels
    tiled.py               the algorithm in plain torch
    configs.py, tiles.csv  tile shapes by GPU, dtype, head dim and length; tune.py finds them
    forward.py, backward.py, ranges.py, products.py
                           the Triton kernels and their parts
    hopper.py              which calls take the Hopper kernels, and their launchers
    hopper_forward.py, hopper_backward.py, hopper_wide.py
                           the Hopper kernels, in Gluon
"""

from .function import (
    FlashAttention2,
    FlashAttention2PyTorch,
    cost,
    flash_attention,
    part_backward,
    part_forward,
)
from .options import document_bounds

__all__ = [
    "FlashAttention2",
    "FlashAttention2PyTorch",
    "cost",
    "document_bounds",
    "flash_attention",
    "part_backward",
    "part_forward",
]
