"""A decoder layer in the shape of Hugging Face's Llama, of torch's, this lab's or Liger's modules.

It has Llama's attribute names, and so its state dict, and is written in plain torch: transformers
is not needed. Shapes: `B` batch, `T` sequence, `H` heads, `K` heads of keys, `D` width of a head,
`d` of the layer.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.model.config import ModelConfig
from distlab.model.ops import positions, rope, rope_tables, sdpa

linear = partial(nn.Linear, bias=False)


class SelfAttention(nn.Module):
    """Attention with grouped queries.

    Args:
        shape: sizes of the model.
        rotate: function from (q_BHTD, k_BKTD) to both, rotated.
        attend: causal attention of (q, k, v).
    """

    def __init__(self, shape: ModelConfig, rotate: Callable, attend: Callable) -> None:
        super().__init__()
        d = shape.d_model
        self.head_dim = d // shape.num_heads
        kv_width = shape.kv_heads * self.head_dim
        # The attribute names are those of Hugging Face, by which state dicts are matched.
        self.q_proj = linear(d, d)
        self.k_proj = linear(d, kv_width)
        self.v_proj = linear(d, kv_width)
        self.o_proj = linear(d, d)
        self.rotate = rotate
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        """Compute (B, T, d) → (B, T, d)."""
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        # (B, T, H·D) → (B, H, T, D). k and v have fewer heads, which -1 leaves open.
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)
        out_BHTD = self.attend(*self.rotate(q, k), v)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Feed-forward down_proj(silu(gate_proj(x)) · up_proj(x)), by torch's operations."""

    def __init__(self, d: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = linear(d, d_ff)
        self.up_proj = linear(d, d_ff)
        self.down_proj = linear(d_ff, d)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (…, d) → (…, d)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A layer of Llama.

    Args:
        shape: sizes of the model.
        norm: function that makes a module from `(d, eps)`.
        mlp: function that makes a module from `(d, d_ff)`.
        rotate, attend: functions as in `SelfAttention`.
    """

    def __init__(
        self, shape: ModelConfig, norm: Callable, mlp: Callable, rotate: Callable, attend: Callable
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(shape.d_model, shape.norm_eps)
        self.self_attn = SelfAttention(shape, rotate, attend)
        self.post_attention_layernorm = norm(shape.d_model, shape.norm_eps)
        self.mlp = mlp(shape.d_model, shape.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (B, T, d) → (B, T, d)."""
        # Pre-norm: the residual stream itself is never normalized.
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def each(turn: Callable, cos: Tensor, sin: Tensor) -> Callable:
    """Return the rotation of queries and keys by a rotation of one tensor."""

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q, cos, sin), turn(k, cos, sin)

    return rotate


def torchs(cos: Tensor, sin: Tensor) -> tuple[Callable, ...]:
    """Return torch's norm, MLP, rotation and attention.

    What torch does not have is made of its operations.
    """
    # torch has no rotation of its own. Ours in plain torch, `rope`, takes its place.
    return nn.RMSNorm, MLP, each(rope, cos, sin), sdpa


def ours(cos: Tensor, sin: Tensor) -> tuple[Callable, ...]:
    """Return this lab's norm, MLP, rotation and attention.

    Attention is a function of (B, H, T, D) tensors, because a rotated q has that shape.
    """
    # These imports load Triton, which the other layers do not need.
    import kernels.nn
    from kernels.flash_attention import flash_attention
    from kernels.rope import rope

    return (
        kernels.nn.RMSNorm,
        kernels.nn.SwiGLU,
        each(rope, cos, sin),
        partial(flash_attention, causal=True),
    )


def ligers(cos: Tensor, sin: Tensor) -> tuple[Callable, ...]:
    """Return Liger's norm, MLP and rotation, with torch's attention, as its patch of Llama does.

    These imports need no transformers.
    """
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb

    def mlp(d: int, d_ff: int) -> nn.Module:
        # Liger's MLP takes a configuration of transformers, of which it reads these three fields.
        return LigerSwiGLUMLP(
            SimpleNamespace(hidden_act="silu", hidden_size=d, intermediate_size=d_ff)
        )

    # Llama's tables have a batch dimension, and the first half of its sin is not negative.
    llama_cos = cos[None]
    llama_sin = sin.chunk(2, -1)[1].repeat(1, 1, 2)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return liger_rotary_pos_emb(q, k, llama_cos, llama_sin)

    return LigerRMSNorm, mlp, rotate, sdpa


PARTS = {
    "torch": torchs,
    "torch-compiled": torchs,
    "nn": ours,
    "nn-compiled": ours,
    "liger": ligers,
}


def layer(
    name: str, shape: ModelConfig, device: torch.device, on: torch.device | str = "meta"
) -> DecoderLayer:
    """Make a layer of these PARTS, its parameters on `on`, for tensors on `device`."""
    tables = rope_tables(
        positions(shape.context_length, device), shape.d_model // shape.num_heads, shape.rope_theta
    )
    parts = PARTS[name](*tables)
    # On meta the layer has no memory. The caller then puts parameters of another layer into it.
    with torch.device(on):
        return DecoderLayer(shape, *parts)
