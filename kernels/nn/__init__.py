"""Fused operations as modules, with the names and arguments of `torch.nn` where it has them.

    import kernels.nn
    norm = kernels.nn.RMSNorm(1024)
    norm.load_state_dict(torch_norm.state_dict())

State dicts have torch's names (those of Llama's MLP for `SwiGLU`), so weights can be loaded in both
directions. The norms and `CrossEntropyLoss` are subclasses of torch's, so that `isinstance(module,
torch.nn.LayerNorm)` is true for them.

Each module computes what its function does, also on a CPU. Results have the input's dtype. Under
autocast, norms give autocast's dtype, where torch gives fp32. Losses are fp32. Second derivatives
are refused. Arguments that no kernel supports raise an error, when the module is made or when its
function is first called.

The functions are imported at the first call, so importing this module does not import Triton.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension.

    Args:
        normalized_shape: D, as a number or a sequence of one.
        eps: number added to the mean of squares. None is the machine epsilon of fp32, the dtype of
            the mean, for every dtype of the input.
        elementwise_affine: whether there is a weight (D).
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: normalized_shape has several dimensions.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _refuse_several_dimensions(self)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, (…, D) → (…, D)."""
        from .. import rmsnorm

        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return rmsnorm.rms_norm(input, _weight(self, input), eps)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension.

    Args:
        normalized_shape: D, as a number or a sequence of one.
        eps: number added to the variance.
        elementwise_affine: whether there is a weight (D).
        bias: whether there is a bias (D), if there is a weight.
        device: device of weight and bias.
        dtype: dtype of weight and bias.

    Raises:
        ValueError: normalized_shape has several dimensions.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _refuse_several_dimensions(self)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, (…, D) → (…, D)."""
        from .. import layernorm

        return layernorm.layer_norm(input, _weight(self, input), self.bias, self.eps)


def _refuse_several_dimensions(norm: RMSNorm | LayerNorm) -> None:
    """Raise ValueError if the norm is to be taken over several dimensions."""
    if len(norm.normalized_shape) != 1:
        name = type(norm).__name__
        raise ValueError(
            f"kernels.nn.{name} normalises over the last dimension, and normalized_shape is "
            f"{tuple(norm.normalized_shape)}: give one number, or take torch.nn.{name}"
        )


def _weight(norm: RMSNorm | LayerNorm, input: Tensor) -> Tensor:
    """Return the norm's weight, or ones where it has none: the kernels always multiply by one."""
    return input.new_ones(norm.normalized_shape) if norm.weight is None else norm.weight


class SwiGLU(torch.nn.Module):
    """MLP of Llama: down_proj(silu(gate_proj(x))·up_proj(x)).

    The projections are `torch.nn.Linear`. `kernels.swiglu.swiglu` computes what is between them.

    Args:
        in_features: width D of input and output.
        hidden_features: width F of gate and up.
        bias: whether the three projections have a bias.
        device: device of the weights.
        dtype: dtype of the weights.

    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = torch.nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = torch.nn.Linear(hidden_features, in_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the MLP, (…, D) → (…, D)."""
        from .. import swiglu

        gate = self.gate_proj(input)
        up = self.up_proj(input)
        return self.down_proj(swiglu.swiglu(gate, up))


class Float8Linear(torch.nn.Linear):
    """`torch.nn.Linear` that computes its products in fp8.

    in_features, out_features and the number of rows of the input must be multiples of 16.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return input weightᵀ + bias, (…, D) → (…, F)."""
        from .. import float8_linear

        y = float8_linear.float8_linear(input, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` for class indices; see `kernels.cross_entropy`.

    Args:
        weight: None. Weights of classes are not supported.
        ignore_index: target of rows that do not count. If no row counts, the mean is 0.
        reduction: "mean", "sum" or "none".
        label_smoothing: weight that is spread evenly over all classes, 0 to 1.

    Raises:
        ValueError: a weight is given.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if weight is not None:
            raise _not_supported("weight")
        super().__init__(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the fp32 loss of logits (N, V) with targets (N)."""
        from .. import cross_entropy

        return cross_entropy.cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class LinearCrossEntropyLoss(torch.nn.Module):
    """Projection to V classes and its cross-entropy, with one chunk of logits in memory at a time.

    The names are those of `torch.nn.LinearCrossEntropyLoss` (torch 2.13). The projection is
    `linear`: assign `linear.weight` to tie it to an embedding.

    Args:
        in_features: width D of the input.
        num_classes: number of classes V.
        bias: False. A bias is not supported.
        weight: None. Weights of classes are not supported.
        reduction: "mean" or "sum". Gradients are computed in the forward, for one backward.
        ignore_index: as for `CrossEntropyLoss`.
        label_smoothing: as for `CrossEntropyLoss`.
        device: device of the projection.
        dtype: dtype of the projection.

    Raises:
        ValueError: a bias or a weight is given.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bias:
            raise _not_supported("bias")
        if weight is not None:
            raise _not_supported("weight")
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, False, device, dtype)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the fp32 loss of input (N, D) with targets (N)."""
        from .. import linear_cross_entropy

        return linear_cross_entropy.linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class Attention(torch.nn.Module):
    """Attention of several heads, without the projections before and after it, and without RoPE.

    Args:
        num_heads: number of query heads H.
        num_kv_heads: number of key and value heads Hk, a divisor of H. None means H.
        causal: as for `kernels.flash_attention.flash_attention`. If there are fewer queries than
            keys, the last query is aligned with the last key, as in decoding with a cache.
        scale: as for `flash_attention`.
        window: as for `flash_attention`, and aligned as for causal.
        softcap: as for `flash_attention`.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.causal = causal
        self.scale = scale
        self.window = window
        self.softcap = softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None = None
    ) -> Tensor:
        """Return the attention of all heads next to each other, (B, T, H·D).

        Args:
            query: tensor (B, T, H·D).
            key: tensor (B, Tk, Hk·D).
            value: tensor (B, Tk, Hk·D).
            document_ids: tensor (B, T) for packed sequences, or None.
        """
        from .. import flash_attention

        # (B, T, H·D) → (B, H, T, D), as views.
        q = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = key.unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = value.unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        o = flash_attention.flash_attention(
            q,
            k,
            v,
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            alignment="bottom-right",
            document_ids=document_ids,
        )
        return o.transpose(1, 2).flatten(-2)

    def extra_repr(self) -> str:
        """Return the options, for `repr`."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"causal={self.causal}, scale={self.scale}, "
            f"window={self.window}, softcap={self.softcap}"
        )


def _not_supported(name: str) -> ValueError:
    """Return the error for an argument that torch's module has and no kernel here computes."""
    return ValueError(f"{name} is given, which no kernel here computes; use torch's module for it")
