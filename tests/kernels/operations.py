"""Every fused operation in one table: what to call, the same in plain torch, and the shapes of its
tensors.
"""

import functools
import math

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


def product(epilogue):
    """Of a, b and a bias, with this epilogue: function and reference."""
    return lambda *t: matmul(*t, epilogue=epilogue), lambda *t: reference.matmul(*t, epilogue)


def attention_by(function):
    """Causal attention of one head, and the same in plain torch; (N, h) each."""
    plain = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    return lambda *t: function.apply(*(x[None] for x in t), True)[0], plain


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


# name → (function, the same in plain torch, a shape for each tensor). Letters of shapes: n is all
# dimensions before the last, m the same but at least one, N as many rows in one, d the width, e the
# next even one, h the nearest that a head can have, o another width.
OPERATIONS = {
    "add": (add, reference.add, "nd", "nd"),
    "gelu": (gelu, lambda x: F.gelu(x, approximate="tanh"), "nd"),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, "nd", "nd"),
    "rope": (lambda x: rope(x, *tables(x)), lambda x: reference.rope(x, *tables(x)), "me"),
    "dropout": (lambda x: dropout(x, 0.0), lambda x: x, "nd"),
    "seeded_dropout": (lambda x: dropout(x, 1.0, seed=1), lambda x: 0 * x, "nd"),
    "linear_gelu_dropout": (
        lambda *t: linear_gelu_dropout(*t, 0.0),
        lambda *t: reference.gelu(F.linear(*t)),
        "nd",
        "od",
        "o",
    ),
    "softmax": (softmax, lambda x: x.softmax(-1), "nd"),
    "weighted_sum": (weighted_sum, reference.weighted_sum, "nd", "d"),
    "rms_norm": (rms_norm, reference.rms_norm, "nd", "d"),
    "RMSNormPyTorch": (RMSNormPyTorch.apply, reference.rms_norm, "nd", "d"),
    "add_rms_norm": (add_rms_norm, reference.add_rms_norm, "nd", "nd", "d"),
    "layer_norm": (layer_norm, reference.layer_norm, "nd", "d", "d"),
    "cross_entropy": (labelled(cross_entropy), labelled(F.cross_entropy), "No"),
    "cross_entropies": (
        labelled(cross_entropy, reduction="none"),
        labelled(F.cross_entropy, reduction="none"),
        "No",
    ),
    "linear_cross_entropy": (
        labelled(linear_cross_entropy),
        labelled(plain_linear_cross_entropy),
        "Nd",
        "od",
    ),
    "matmul": (matmul, lambda a, b: a @ b, "Nd", "do"),
    "matmul_gelu": (*product("gelu"), "Nd", "do", "o"),
    "attention": (*attention_by(FlashAttention2), "Nh", "Nh", "Nh"),
    "attention_lse": (attention_and_lse, plain_attention_and_lse, "Nh", "Nh", "Nh"),
    "attention_torch": (*attention_by(FlashAttention2PyTorch), "Nh", "Nh", "Nh"),
}
# What takes other ways with other options; the properties that do not depend on those are tested of
# OPERATIONS alone.
VARIANTS = {
    **{f"matmul_{name}": (*product(name), "Nd", "do", "o") for name in EPILOGUES},
    "swiglu_of_halves": (
        lambda x: swiglu(*x.chunk(2, -1)),
        lambda x: reference.swiglu(*x.chunk(2, -1)),
        "ne",
    ),
    "half_dropout": (
        lambda x: dropout(x, 0.5, seed=1),
        lambda x: reference.dropout(x, keep(x, 0.5), 0.5),
        "nd",
    ),
    "linear_gelu_half_dropout": (
        lambda *t: linear_gelu_dropout(*t, p=0.5, seed=1),
        lambda *t: reference.dropout(h := reference.gelu(F.linear(*t)), keep(h, 0.5), 0.5),
        "nd",
        "od",
    ),
    "add_rms_norm_silu": (
        lambda *t: add_rms_norm(*t, 1e-5, "silu"),
        lambda *t: reference.add_rms_norm(*t, 1e-5, "silu"),
        "nd",
        "nd",
        "d",
    ),
    "RMSNormPyTorch_eps": (
        lambda *t: RMSNormPyTorch.apply(*t, 0.1),
        lambda *t: reference.rms_norm(*t, 0.1),
        "nd",
        "d",
    ),
    "layer_norm_without_bias": (layer_norm, reference.layer_norm, "nd", "d"),
    **{
        f"cross_entropy_{options}": (
            labelled(cross_entropy, **options),
            labelled(F.cross_entropy, **options),
            "No",
        )
        for options in (
            {"label_smoothing": 0.1},
            {"reduction": "sum"},
            {"reduction": "none", "label_smoothing": 0.3},
        )
    },
    **{
        f"linear_cross_entropy_{size}_{options}": (
            labelled(functools.partial(linear_cross_entropy, chunk_bytes=size), **options),
            labelled(plain_linear_cross_entropy, **options),
            "Nd",
            "od",
        )
        for size, options in (
            (600, {"label_smoothing": 0.1, "ignore_index": 4}),
            (10**9, {"reduction": "sum"}),
        )
    },
}


def shapes_of(name, n=(3,), d=8, o=5):
    """The shapes of an operation's tensors."""
    lengths = {
        "n": n,
        "m": n or (1,),
        "N": (math.prod(n),),
        "d": (d,),
        "e": (d + d % 2,),
        "o": (o,),
        "h": (max(1, min(d, 256)),),
    }
    return [
        sum((lengths[letter] for letter in shape), ())
        for shape in (OPERATIONS | VARIANTS)[name][2:]
    ]


def compare_at(name, sizes, dtype=torch.float32, tolerance=None):
    """An operation with its reference.

    Weights of products are small, so that their results are of order one.
    """
    function, plain, *letters = (OPERATIONS | VARIANTS)[name]
    drawn = [draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes_of(name, *sizes))]
    scaled = [
        x * max(sizes[1], 1) ** -0.5 if shape in ("do", "od") else x
        for shape, x in zip(letters, drawn, strict=True)
    ]
    compare(function, plain, *scaled, tolerance=tolerance)
