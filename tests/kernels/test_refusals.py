"""What the fused operations refuse: the message names the argument and what is allowed."""

import pytest
import torch

from kernels.average import average_into
from kernels.cross_entropy import cross_entropy
from kernels.dropout import dropout, linear_gelu_dropout
from kernels.elementwise import add, gelu
from kernels.layernorm import layer_norm
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.matmul import matmul
from kernels.rmsnorm import RMSNormPyTorch, add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.softmax import softmax
from kernels.swiglu import swiglu
from kernels.weighted_sum import weighted_sum

from .fused import DEVICE, draw

X = draw(2, 8)
W = draw(8)
T = torch.tensor([0, 1], device=DEVICE)


# An error names the argument and the allowed values. One function checks shape, dtype and device of
# a weight or bias, and each call of it has a row.
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: rms_norm(X, W[:3]), ValueError, r"weight has shape \(3,\).*allowed: \(8,\)"),
        (lambda: rms_norm(X.double(), W), ValueError, "x has dtype.*allowed: float32"),
        (lambda: rms_norm(X, W, 0.0), ValueError, "eps is 0"),
        (lambda: add_rms_norm(X, X[:1], W), ValueError, "residual has shape"),
        (lambda: add_rms_norm(X, X, W, 1e-5, "gelu"), ValueError, "activation is 'gelu'"),
        (lambda: layer_norm(X, W, W[:2]), ValueError, "bias has shape"),
        (lambda: softmax(X[0, 0]), ValueError, "at least 1 dimension"),
        (lambda: weighted_sum(X.long(), W), ValueError, "x has dtype"),
        (lambda: rms_norm(X, W.to("meta")), ValueError, "weight is on meta"),
        (lambda: RMSNormPyTorch.apply(X, W[:3]), ValueError, r"weight has shape \(3,\)"),
        (lambda: add(X, X[:1]), ValueError, r"y has shape \(1, 8\), x \(2, 8\)"),
        (lambda: swiglu(X, X.T), ValueError, "up has shape"),
        (lambda: gelu(X.int()), ValueError, "x has dtype"),
        (lambda: rope(X[:, :7], X, X), ValueError, "even"),
        (lambda: rope(X, X[:1], X), ValueError, r"cos has shape \(1, 8\); allowed: \(T, D\)"),
        (lambda: dropout(X, 1.5), ValueError, "p is 1.5"),
        (lambda: dropout(X, 0.5, seed=-1), ValueError, "seed is -1"),
        (lambda: linear_gelu_dropout(X, X[:, :3]), ValueError, "weight has shape"),
        (
            lambda: linear_gelu_dropout(X, X.half()),
            ValueError,
            "weight has dtype torch.float16, x torch.float32",
        ),
        (
            lambda: linear_gelu_dropout(X, X, X[0]),
            ValueError,
            r"bias has shape \(8,\); allowed: \(2,\)",
        ),
        (
            lambda: rope(X, X.clone().requires_grad_(), X),
            ValueError,
            "cos or sin requires a gradient",
        ),
        (lambda: matmul(X, X), ValueError, r"a has shape \(2, 8\), b \(2, 8\); allowed: \(M, K\)"),
        (lambda: matmul(X, X.T, epilogue="tanh"), ValueError, "epilogue is 'tanh'"),
        (lambda: matmul(X, X.T.half()), ValueError, "b has dtype"),
        (lambda: matmul(X, X.T, precision="bf16"), ValueError, "precision is 'bf16'"),
        (lambda: matmul(X, X.T, X[0]), ValueError, "bias has shape"),
        (
            lambda: matmul(X[:, :1], torch.ones(1, 300, device=DEVICE), epilogue="rms_norm"),
            ValueError,
            "300 columns",
        ),
        (lambda: cross_entropy(X, T[:1]), ValueError, r"targets has shape \(1,\); allowed: \(2,\)"),
        (lambda: cross_entropy(X, T.float()), ValueError, "targets has dtype"),
        (lambda: cross_entropy(X, T, reduction="max"), ValueError, "reduction is 'max'"),
        (lambda: cross_entropy(X, T, label_smoothing=2), ValueError, "label_smoothing is 2"),
        (lambda: cross_entropy(X, T, ignore_index=2**70), ValueError, f"ignore_index is {2**70}"),
        (lambda: cross_entropy(X[0], T), ValueError, "at least 2 dimensions"),
        (lambda: cross_entropy(X, [0, 1]), TypeError, "targets must be a torch.Tensor"),
        (
            lambda: linear_cross_entropy(X, X.half(), T),
            ValueError,
            "weight has dtype torch.float16, x torch.float32",
        ),
        (lambda: linear_cross_entropy(X, X[:, :3], T), ValueError, "weight has shape"),
        (
            lambda: linear_cross_entropy(X, X, T, reduction="none"),
            ValueError,
            "reduction is 'none'",
        ),
        (lambda: linear_cross_entropy(X, X, T, chunk_bytes=0), ValueError, "chunk_bytes is 0"),
        (lambda: average_into(X[0], X[:, :4], 1.0), ValueError, "own|strides"),
        (lambda: average_into(X[0], X.half(), 1.0), ValueError, "own|strides"),
        (lambda: average_into(X[0, ::2], X[:, :4], 1.0), ValueError, "own|strides"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
