"""FlashAttention-2: `flash_attention` for use, the autograd Functions behind it, and what it must cost."""

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
