"""Table of every fused operation: the function, the same in plain torch, the tensors' shapes."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.cross_entropy import cross_entropy
from kernels.dropout import dropout, linear_gelu_dropout
from kernels.elementwise import add, gelu
from kernels.flash_attention import FlashAttention2, FlashAttention2PyTorch, flash_attention
from kernels.layernorm import layer_norm
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.matmul import EPILOGUES, matmul
from kernels.rmsnorm import RMSNormPyTorch, add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.softmax import softmax
from kernels.swiglu import swiglu
from kernels.weighted_sum import weighted_sum

from .attention_reference import attention, log_sum_exp
from .fused import compare, draw


def tables(x):
    """RoPE's cosines and sines for (…, T, D)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(1.0 * length * half, device=x.device).view(length, half)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


def labelled(loss, **options):
    """The loss of logits, or of rows and a weight, with a class for each row.

    The fourth row is ignored.
    """

    def call(x, *weight):
        rows = torch.arange(len(x), device=x.device)
        classes = rows * 7919 % (len(weight[0]) if weight else x.shape[1])
        return loss(
            x,
            *weight,
            torch.where(rows == 3, options.get("ignore_index", -100), classes),
            **options,
        )

    return call


def plain_linear_cross_entropy(x, weight, t, **options):
    return F.cross_entropy(x @ weight.T, t, **options)


def options_of(q):
    """Options of attention that need more than q, k and v: documents of three rows each, with a
    softcap.
    """
    return {
        "causal": True,
        "softcap": 2.0,
        "document_ids": torch.arange(len(q), device=q.device)[None] // 3,
    }


def attention_and_lse(q, k, v):
    return tuple(
        x[0] for x in flash_attention(q[None], k[None], v[None], **options_of(q), return_lse=True)
    )


def plain_attention_and_lse(q, k, v):
    lse = log_sum_exp(q[None, None], k[None, None], **options_of(q))
    return attention(q[None], k[None], v[None], **options_of(q))[0], lse[0, 0]


def keep(x, p):
    """The elements that dropout with seed 1 keeps."""
    return dropout(torch.ones_like(x, dtype=torch.float32), p, seed=1) != 0


class Operation(NamedTuple):
    """A fused operation, and what it is compared with.

    Attributes:
        function: function of the tensors.
        plain: the same in plain torch.
        shapes: shape of each tensor, a letter for each dimension: n is all dimensions before the
            last, m the same but at least one, N their product, d the width, e the next even number
            from d on, h the nearest width that a head can have, o another width.
    """

    function: Callable
    plain: Callable
    shapes: tuple[str, ...]


def attention_of(function):
    """Return causal attention of one head by a Function, (N, h) each, and the same in torch."""

    def ours(*tensors):
        # A batch of one.
        return function.apply(*(tensor[None] for tensor in tensors), True)[0]

    plain = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    return Operation(ours, plain, ("Nh", "Nh", "Nh"))


def matmul_with(epilogue):
    """Return a product of a, b and a bias, with an epilogue."""
    return Operation(
        lambda *tensors: matmul(*tensors, epilogue=epilogue),
        lambda *tensors: reference.matmul(*tensors, epilogue),
        ("Nd", "do", "o"),
    )


def half_dropout_of_linear_gelu(*tensors):
    hidden = reference.gelu(F.linear(*tensors))
    return reference.dropout(hidden, keep(hidden, 0.5), 0.5)


OPERATIONS = {
    "add": Operation(add, reference.add, ("nd", "nd")),
    "gelu": Operation(gelu, lambda x: F.gelu(x, approximate="tanh"), ("nd",)),
    "swiglu": Operation(swiglu, lambda gate, up: F.silu(gate) * up, ("nd", "nd")),
    "rope": Operation(
        lambda x: rope(x, *tables(x)), lambda x: reference.rope(x, *tables(x)), ("me",)
    ),
    "dropout": Operation(lambda x: dropout(x, 0.0), lambda x: x, ("nd",)),
    "seeded_dropout": Operation(lambda x: dropout(x, 1.0, seed=1), lambda x: 0 * x, ("nd",)),
    "linear_gelu_dropout": Operation(
        lambda *tensors: linear_gelu_dropout(*tensors, 0.0),
        lambda *tensors: reference.gelu(F.linear(*tensors)),
        ("nd", "od", "o"),
    ),
    "softmax": Operation(softmax, lambda x: x.softmax(-1), ("nd",)),
    "weighted_sum": Operation(weighted_sum, reference.weighted_sum, ("nd", "d")),
    "rms_norm": Operation(rms_norm, reference.rms_norm, ("nd", "d")),
    "RMSNormPyTorch": Operation(RMSNormPyTorch.apply, reference.rms_norm, ("nd", "d")),
    "add_rms_norm": Operation(add_rms_norm, reference.add_rms_norm, ("nd", "nd", "d")),
    "layer_norm": Operation(layer_norm, reference.layer_norm, ("nd", "d", "d")),
    "cross_entropy": Operation(labelled(cross_entropy), labelled(F.cross_entropy), ("No",)),
    "cross_entropies": Operation(
        labelled(cross_entropy, reduction="none"),
        labelled(F.cross_entropy, reduction="none"),
        ("No",),
    ),
    "linear_cross_entropy": Operation(
        labelled(linear_cross_entropy), labelled(plain_linear_cross_entropy), ("Nd", "od")
    ),
    "matmul": Operation(matmul, lambda a, b: a @ b, ("Nd", "do")),
    "matmul_gelu": matmul_with("gelu"),
    "attention": attention_of(FlashAttention2),
    "attention_lse": Operation(attention_and_lse, plain_attention_and_lse, ("Nh", "Nh", "Nh")),
    "attention_torch": attention_of(FlashAttention2PyTorch),
}
# Other options take other paths in the same kernels. Properties that do not depend on the options
# are tested with OPERATIONS alone.
VARIANTS = {f"matmul_{name}": matmul_with(name) for name in EPILOGUES}
VARIANTS |= {
    "swiglu_of_halves": Operation(
        lambda x: swiglu(*x.chunk(2, -1)), lambda x: reference.swiglu(*x.chunk(2, -1)), ("ne",)
    ),
    "half_dropout": Operation(
        lambda x: dropout(x, 0.5, seed=1),
        lambda x: reference.dropout(x, keep(x, 0.5), 0.5),
        ("nd",),
    ),
    "linear_gelu_half_dropout": Operation(
        lambda *tensors: linear_gelu_dropout(*tensors, p=0.5, seed=1),
        half_dropout_of_linear_gelu,
        ("nd", "od"),
    ),
    "add_rms_norm_silu": Operation(
        lambda *tensors: add_rms_norm(*tensors, 1e-5, "silu"),
        lambda *tensors: reference.add_rms_norm(*tensors, 1e-5, "silu"),
        ("nd", "nd", "d"),
    ),
    "RMSNormPyTorch_eps": Operation(
        lambda *tensors: RMSNormPyTorch.apply(*tensors, 0.1),
        lambda *tensors: reference.rms_norm(*tensors, 0.1),
        ("nd", "d"),
    ),
    "layer_norm_without_bias": Operation(layer_norm, reference.layer_norm, ("nd", "d")),
}
for _options in (
    {"label_smoothing": 0.1},
    {"reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.3},
):
    VARIANTS[f"cross_entropy_{_options}"] = Operation(
        labelled(cross_entropy, **_options), labelled(F.cross_entropy, **_options), ("No",)
    )
for _chunk_bytes, _options in (
    (600, {"label_smoothing": 0.1, "ignore_index": 4}),
    (10**9, {"reduction": "sum"}),
):
    _in_chunks = functools.partial(linear_cross_entropy, chunk_bytes=_chunk_bytes)
    VARIANTS[f"linear_cross_entropy_{_chunk_bytes}_{_options}"] = Operation(
        labelled(_in_chunks, **_options),
        labelled(plain_linear_cross_entropy, **_options),
        ("Nd", "od"),
    )


def shapes_of(name, n=(3,), d=8, o=5):
    """Return the shapes of an operation's tensors.

    Args:
        name: name of the operation.
        n: sizes of all dimensions before the last.
        d: width.
        o: another width.
    """
    lengths = {
        "n": n,
        "m": n or (1,),
        "N": (math.prod(n),),
        "d": (d,),
        "e": (d + d % 2,),
        "o": (o,),
        "h": (max(1, min(d, 256)),),
    }
    shapes = []
    for letters in (OPERATIONS | VARIANTS)[name].shapes:
        shape = ()
        for letter in letters:
            shape += lengths[letter]
        shapes.append(shape)
    return shapes


def compare_at(name, sizes, dtype=torch.float32, tolerance=None):
    """Compare an operation with its reference.

    Weights of products are small, so that their results are of order one.
    """
    operation = (OPERATIONS | VARIANTS)[name]
    d = sizes[1]  # sizes are (n, d) or (n, d, o), as in `shapes_of`
    tensors = []
    for seed, shape in enumerate(shapes_of(name, *sizes)):
        tensor = draw(*shape, dtype=dtype, seed=seed)
        if operation.shapes[seed] in ("do", "od"):
            tensor = tensor * max(d, 1) ** -0.5
        tensors.append(tensor)
    compare(operation.function, operation.plain, *tensors, tolerance=tolerance)
