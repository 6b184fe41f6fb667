"""FlashAttention-2: `flash_attention` for use, `FlashAttention2` and `FlashAttention2PyTorch` as autograd Functions."""

from .function import FlashAttention2, FlashAttention2PyTorch, cost, flash_attention

__all__ = ["FlashAttention2", "FlashAttention2PyTorch", "cost", "flash_attention"]
