"""The fused operations as modules, under the names and arguments of `torch.nn` where it has them.

    import kernels.nn
    norm = kernels.nn.RMSNorm(1024)
    norm.load_state_dict(torch_norm.state_dict())

State dicts have torch's names (`SwiGLU`: those of Llama's MLP), so weights go both ways; norms and
`CrossEntropyLoss` are subclasses of torch's, so that code which asks `isinstance(module,
torch.nn.LayerNorm)` finds them. Each computes what its function does, on a CPU too: results have
the input's dtype (norms under autocast autocast's, where torch gives fp32), losses are fp32, and
second derivatives are refused. What no kernel computes is refused, when the module is made or when
its function is first called.

The functions are imported at the first call: importing this module imports no Triton.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm(normalized_shape, eps=None, elementwise_affine=True)` over the last dimension.

    eps None is that of fp32, in which the mean is taken, whatever the input's dtype.

    Raises:
        ValueError: a `normalized_shape` of several dimensions.
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
        """(…, D) → (…, D)."""
        from .. import rmsnorm

        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return rmsnorm.rms_norm(input, _weight(self, input), eps)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm(normalized_shape, eps=1e-5, elementwise_affine=True, bias=True)` over the last dimension.

    Raises:
        ValueError: a `normalized_shape` of several dimensions.
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
        """(…, D) → (…, D)."""
        from .. import layernorm

        return layernorm.layer_norm(input, _weight(self, input), self.bias, self.eps)


def _refuse_several_dimensions(norm: RMSNorm | LayerNorm) -> None:
    if len(norm.normalized_shape) != 1:
        raise ValueError(
            f"kernels.nn.{type(norm).__name__} normalises over the last dimension, and normalized_shape is "
            f"{tuple(norm.normalized_shape)}: give one number, or take torch.nn.{type(norm).__name__}"
        )


def _weight(norm: RMSNorm | LayerNorm, input: Tensor) -> Tensor:
    return input.new_ones(norm.normalized_shape) if norm.weight is None else norm.weight


class SwiGLU(torch.nn.Module):
    """down_proj(silu(gate_proj(x))·up_proj(x)), the MLP of Llama; `kernels.swiglu.swiglu` is what lies between.

    Args:
        in_features: D.
        hidden_features: F, the width of gate and up.
        bias: whether the three projections have one.

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
        """(…, D) → (…, D)."""
        from .. import swiglu

        return self.down_proj(swiglu.swiglu(self.gate_proj(input), self.up_proj(input)))


class Float8Linear(torch.nn.Linear):
    """`torch.nn.Linear` whose products are computed in fp8; D, F and the number of rows are multiples of 16."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, D) → (…, F)."""
        from .. import float8_linear

        y = float8_linear.float8_linear(input, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` of class indices: logits (N, V), targets (N); see `kernels.cross_entropy`.

    Args:
        weight: refused unless None.
        ignore_index, reduction, label_smoothing: as torch's; where all targets are ignored, the
            mean is 0.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        _refuse(weight=weight)
        super().__init__(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """(N, V) and (N) → the loss, fp32."""
        from .. import cross_entropy

        return cross_entropy.cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class LinearCrossEntropyLoss(torch.nn.Module):
    """`torch.nn.LinearCrossEntropyLoss` (torch 2.13): projects to V classes, with one chunk of logits in memory.

    The projection is `linear`, as torch's; assign `linear.weight` to tie it to an embedding.

    Args:
        in_features, num_classes: D and V.
        bias, weight: refused unless False and None.
        reduction: "mean" or "sum"; gradients are made in the forward, for one backward.
        ignore_index, label_smoothing: as for `CrossEntropyLoss`.
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
        _refuse(bias=bias or None, weight=weight)
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, False, device, dtype)
        self.ignore_index, self.label_smoothing, self.reduction = (
            ignore_index,
            label_smoothing,
            reduction,
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """(N, D) and (N) → the loss, fp32."""
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
    """Attention of several heads, between the projections, which stay the model's own (and RoPE with them).

    Args:
        num_heads: H, of queries.
        num_kv_heads: Hk, of keys and values, a divisor of H; None means H.
        causal, scale, window, softcap: as for `kernels.flash_attention.flash_attention`; where
            there are fewer queries than keys, causal and window count from the last key, as for
            decoding with a cache.
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
        self.options = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None = None
    ) -> Tensor:
        """(B, T, H·D), twice (B, Tk, Hk·D) and, for packed sequences, (B, T) → (B, T, H·D)."""
        from .. import flash_attention

        q = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (x.unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for x in (key, value))
        o = flash_attention.flash_attention(
            q, k, v, alignment="bottom-right", document_ids=document_ids, **self.options
        )
        return o.transpose(1, 2).flatten(-2)

    def extra_repr(self) -> str:
        """Return the options, for `repr`."""
        return ", ".join(
            f"{name}={value}"
            for name, value in {
                "num_heads": self.num_heads,
                "num_kv_heads": self.num_kv_heads,
                **self.options,
            }.items()
        )


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} is given, which no kernel here computes; use torch's module for it"
            )
