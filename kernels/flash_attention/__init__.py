"""FlashAttention-2: `flash_attention` for use, the autograd Functions behind it, and what it must cost."""

from .function import FlashAttention2, FlashAttention2PyTorch, cost, flash_attention

__all__ = ["FlashAttention2", "FlashAttention2PyTorch", "cost", "flash_attention"]
