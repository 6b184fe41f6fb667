"""Operations that a user's kernel can claim to be: signatures, references, sizes and values.

An operation says which tensors a function of this name takes, what it must return in exact
arithmetic, and which sizes and values are hard for it. `hostile.py` draws the tensors, and
`judge.py` compares results. References are torch's own functions where torch has one. They run
twice: in float64, which is called exact here, and in the dtype of the case, which says how much
rounding is usual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference

Sizes = dict[str, int]
Result = Tensor | tuple[Tensor, ...]

IGNORED = -100  # target that counts nowhere, as in torch
EPS = 1e-5

# Sizes around those of common tiles: one more, one less, one element, and no power of two.
COLUMNS = (1, 2, 15, 16, 17, 24, 31, 33, 63, 64, 65, 100, 127, 129, 255, 257, 513, 1000)
ROWS = (1, 2, 3, 5, 16, 17, 33)
# Rows around the tiles of 64 and 128 that kernels cut them into. A sum over rows that stops after
# the first tile is right on fewer. They are tried with few columns, because Triton's interpreter
# takes time for each row.
TALL_ROWS = (63, 64, 65, 127, 128, 129)
# Rows of equal sign whose sum in half precision is wrong by many roundings. Fewer do not show it.
ROWS_OF_SUM = 257
# Layouts of any rank. Functions that take (…, D) also get inputs with more dimensions.
STRIDED = ("contiguous", "transposed", "sliced", "every second", "expanded")
# Layouts of several arguments. In `different`, arguments with the role `values` have other strides
# than each other, as where v is a view of a fused projection. In `parameters`, all other arguments
# take every second element of a row, as a column of a table does.
DIFFERENT = "different"
PARAMETERS = "parameters"
LENGTHS = (1, 3, 15, 16, 17, 31, 33, 64, 65, 100)


@dataclass(frozen=True)
class Argument:
    """A tensor that a function takes.

    Attributes:
        name: name in the signature.
        shape: names of sizes. The last one is the dimension along which a row is reduced.
        role: `values` take the values of the case. `weight` is around 1, `small` around 0.
            `targets` are indices below the size that `of` names. `cosines` and `sines` are rope's
            tables.
        of: name of the number of classes, for targets.
        has_gradient: True if the backward returns its gradient.
    """

    name: str
    shape: tuple[str, ...]
    role: str = "values"
    of: str = ""
    has_gradient: bool = True


@dataclass(frozen=True)
class OfTensors:
    """A constant of an operation that depends on the sizes of its tensors.

    Attributes:
        formula: the constant in words.
        value: function of the tensors that returns it.
    """

    formula: str
    value: Callable[[Sequence[Tensor]], Any]

    def __str__(self) -> str:
        return self.formula


@dataclass(frozen=True)
class Operation:
    """An operation that a kernel can claim to be.

    Attributes:
        name: name for `--as`.
        signature: form in which the function is called.
        about: what it returns.
        arguments: tensors that it takes, in order.
        exact: function of the tensors in torch. It runs in float64 and in the dtype of the case.
        formula: the operation written out, as a textbook's kernel computes it, where torch's own
            rounds less. LayerNorm rounds its mean. That moves a whole row, and two elements of a
            row that are nearly equal get a gradient that is all rounding.
        sizes: name of a size → candidates. The first combination of small ones is the plain case.
        values: kinds of values, see `hostile._values`.
        is_valid: function that says whether sizes go together.
        rows: name of the size that is also tried at `TALL_ROWS`.
        cancelling: function of the tensors and the upstream gradient that returns the size of what
            the backward of a row subtracts from an equal number, in fp32. Softmax has
            y·g − y·Σ(y·g), and its y add up to 1. If all g are equal, every gradient is 0, and what
            is left is rounding. None if nothing cancels.
        largest_logit: function of the tensors that returns the absolute value of the largest number
            whose exponential is a weight. A rounding of it in fp32 changes the weight by as much,
            relative to the weight. None where the results are the weights, as in softmax.
        subtracted: function of the tensors, the result and the upstream gradient that returns the
            size of what the backward subtracts from an equal number, in the dtype of the case. None
            where `cancelling` or another gradient says it.
        options: name → value that the function is called with, see `calls.call_of`. Without it the
            function is another operation.
        constants: name → number in the formula, or a function of the tensors that returns it. A
            function that has a parameter for it is called with it.
        layouts: layouts of the arguments with the role `values`, see `hostile.laid_out`.
    """

    name: str
    signature: str
    about: str
    arguments: tuple[Argument, ...]
    exact: Callable[..., Result]
    sizes: dict[str, Sequence[int]]
    values: tuple[str, ...] = ("normal", "ascending", "mean 1,000", "±50", "tiny", "zeros", "large")
    is_valid: Callable[[Sizes], bool] = lambda sizes: True
    rows: str = "N"
    cancelling: Callable[[Sequence[Tensor], Tensor], float] | None = None
    formula: Callable[..., Result] | None = None
    largest_logit: Callable[[Sequence[Tensor]], float] | None = None
    subtracted: Callable[[Sequence[Tensor], Tensor, Tensor], float] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    layouts: tuple[str, ...] = (*STRIDED, "rank 4")

    @property
    def all_layouts(self) -> tuple[str, ...]:
        """`layouts`, and those of several arguments, if it has such arguments."""
        layouts = list(self.layouts)
        has_values = [argument.role == "values" for argument in self.arguments]
        if sum(has_values) > 1:
            layouts.append(DIFFERENT)
        if not all(has_values):
            layouts.append(PARAMETERS)
        return tuple(layouts)

    def candidates(self, name: str) -> list[int]:
        """Return all values of a size, the smallest first."""
        tall = TALL_ROWS if name == self.rows else ()
        return sorted({*self.sizes[name], *tall})


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=IGNORED)


def _linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORED)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _largest_score(tensors: Sequence[Tensor]) -> float:
    """Return the largest |q·k|/√D."""
    query, key = (tensor.detach().cpu().double() for tensor in tensors[:2])
    return (query @ key.mT).abs().max().item() / query.shape[-1] ** 0.5


def _subtracted_by_attention(tensors: Sequence[Tensor], result: Tensor, upstream: Tensor) -> float:
    """Return how large the gradient of q or k is before Σ g·o of its query is subtracted.

    If all values are equal, Σ g·v of each key is equal to Σ g·o. The textbook's backward rounds
    both, and multiplies the difference by the keys or the queries.
    """
    query, key = (tensor.detach().abs().max().item() for tensor in tensors[:2])
    products = result.double() * upstream.double()
    # The norm also, because products that cancel in the sum have been rounded.
    terms = torch.maximum(products.norm(dim=-1), products.sum(-1).abs())
    of_query = terms.max().item() * key
    of_key = terms.norm(dim=-1).max().item() * query  # which has a term of every query
    return max(of_query, of_key) / result.shape[-1] ** 0.5


def _largest_upstream(tensors: Sequence[Tensor], upstream: Tensor) -> float:
    """Return the largest |g|."""
    return upstream.abs().max().item()


def _cancelling_in_layer_norm(tensors: Sequence[Tensor], upstream: Tensor) -> float:
    """Return how large the gradient of x is before its mean and its part along x are subtracted.

    In a row of one element they are equal, and a fused multiply-add leaves their rounding.
    """
    x, weight = (tensor.detach().cpu().double() for tensor in tensors[:2])
    return _of_rows(x.var(-1, correction=0), weight, upstream)


def _cancelling_in_rms_norm(tensors: Sequence[Tensor], upstream: Tensor) -> float:
    """Return how large the gradient of x is before its part along x is subtracted."""
    x, weight = (tensor.detach().cpu().double() for tensor in tensors[:2])
    return _of_rows(x.square().mean(-1), weight, upstream)


def _of_rows(square: Tensor, weight: Tensor, upstream: Tensor) -> float:
    """Return the largest |g·weight|/√(square + eps), from the mean square of each row."""
    scaled = (upstream.detach().cpu().double() * weight).abs().amax(-1)
    return (scaled * torch.rsqrt(square + EPS)).max().item()


def _scale_of_attention(tensors: Sequence[Tensor]) -> float:
    """Return 1/√D."""
    return tensors[0].shape[-1] ** -0.5


def _even_width(sizes: Sizes) -> bool:
    return sizes["D"] % 2 == 0


ROW_SIZES = {"N": ROWS, "D": COLUMNS}
ATTENTION_SIZES = {"B": (1, 2), "H": (1, 2), "D": (16, 32, 64, 128)}
LOGITS = ("normal", "ascending", "±50", "−1e5", "mean −1e5", "−inf", "zeros", "large")
PRODUCTS = ("normal", "constant", "mean 1,000", "tiny", "zeros")
X = Argument("x", ("N", "D"))
WEIGHT = Argument("weight", ("D",), "weight")
QUERIES = Argument("q", ("B", "H", "T", "D"))
SCALE = ("scale", OfTensors("1/√D", _scale_of_attention))

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            name="add",
            signature="add(x (…, D), y (…, D)) → (…, D)",
            about="x + y",
            arguments=(X, Argument("y", ("N", "D"))),
            exact=reference.add,
            sizes=ROW_SIZES,
        ),
        Operation(
            name="gelu",
            signature="gelu(x (…, D)) → (…, D)",
            about="GeLU with the tanh approximation",
            arguments=(X,),
            exact=_gelu,
            constants=(("approximate", "tanh"),),
            sizes=ROW_SIZES,
        ),
        Operation(
            name="swiglu",
            signature="swiglu(gate (…, D), up (…, D)) → (…, D)",
            about="silu(gate)·up",
            arguments=(Argument("gate", ("N", "D")), Argument("up", ("N", "D"))),
            exact=_swiglu,
            sizes=ROW_SIZES,
            values=("normal", "ascending", "±50", "tiny", "zeros"),
        ),
        Operation(
            name="softmax",
            signature="softmax(x (…, D)) → (…, D)",
            about="softmax over the last dimension",
            arguments=(X,),
            exact=_softmax,
            constants=(("dim", -1),),
            sizes=ROW_SIZES,
            values=LOGITS,
            cancelling=_largest_upstream,
        ),
        Operation(
            name="weighted_sum",
            signature="weighted_sum(x (…, D), weight (D)) → (…)",
            about="Σ x·weight over the last dimension",
            arguments=(X, WEIGHT),
            exact=_weighted_sum,
            sizes=ROW_SIZES,
            values=PRODUCTS,
        ),
        Operation(
            name="layer_norm",
            signature="layer_norm(x (…, D), weight (D), bias (D)) → (…, D)",
            about="LayerNorm with eps 1e-5",
            arguments=(X, WEIGHT, Argument("bias", ("D",), "small")),
            exact=_layer_norm,
            constants=(("eps", EPS),),
            formula=reference.layer_norm,
            cancelling=_cancelling_in_layer_norm,
            sizes=ROW_SIZES,
        ),
        Operation(
            name="rms_norm",
            signature="rms_norm(x (…, D), weight (D)) → (…, D)",
            about="RMSNorm with eps 1e-5",
            arguments=(X, WEIGHT),
            exact=_rms_norm,
            constants=(("eps", EPS),),
            cancelling=_cancelling_in_rms_norm,
            sizes=ROW_SIZES,
        ),
        Operation(
            name="add_rms_norm",
            signature="add_rms_norm(x (…, D), residual (…, D), weight (D)) → (y, s)",
            about="s = x + residual and y = rms_norm(s), with eps 1e-5",
            arguments=(X, Argument("residual", ("N", "D")), WEIGHT),
            exact=_add_rms_norm,
            constants=(("eps", EPS),),
            sizes=ROW_SIZES,
            values=("normal", "ascending", "±50", "tiny", "zeros"),
        ),
        Operation(
            name="rope",
            signature="rope(x (…, T, D), cos (T, D), sin (T, D)) → (…, T, D)",
            about="x·cos + roll(x, D/2)·sin in x's dtype: cos of two equal halves, sin of two of "
            "opposite sign, both fp32 in every dtype",
            arguments=(
                Argument("x", ("B", "T", "D")),
                Argument("cos", ("T", "D"), "cosines", has_gradient=False),
                Argument("sin", ("T", "D"), "sines", has_gradient=False),
            ),
            exact=reference.rope,
            sizes={"B": (1, 3), "T": ROWS, "D": (2, 16, 30, 64, 96, 128)},
            values=("normal", "mean 1,000", "tiny"),
            is_valid=_even_width,
            rows="T",
            layouts=STRIDED,
        ),
        Operation(
            name="cross_entropy",
            signature="cross_entropy(logits (N, V), targets (N)) → ()",
            about="mean over the targets that are not −100",
            arguments=(
                Argument("logits", ("N", "D")),
                Argument("targets", ("N",), "targets", of="D", has_gradient=False),
            ),
            exact=_cross_entropy,
            sizes=ROW_SIZES,
            values=(
                *("normal", "ascending", "±50", "−1e5", "mean −1e5"),
                *("zeros", "large", "all ignored"),
            ),
            layouts=STRIDED,
        ),
        Operation(
            name="linear_cross_entropy",
            signature="linear_cross_entropy(x (N, D), weight (V, D), targets (N)) → ()",
            about="cross_entropy(x @ weight.T, targets)",
            arguments=(
                Argument("x", ("N", "D")),
                Argument("weight", ("V", "D"), "small"),
                Argument("targets", ("N",), "targets", of="V", has_gradient=False),
            ),
            exact=_linear_cross_entropy,
            sizes={"N": ROWS, "D": (16, 17, 33, 64, 100), "V": (2, 17, 64, 100, 257)},
            values=("normal", "±50", "zeros", "all ignored"),
            layouts=STRIDED,
        ),
        Operation(
            name="matmul",
            signature="matmul(a (M, K), b (K, N)) → (M, N)",
            about="a @ b",
            arguments=(Argument("a", ("M", "K")), Argument("b", ("K", "N"))),
            exact=torch.matmul,
            sizes={"M": LENGTHS, "K": (*LENGTHS, 257), "N": LENGTHS},
            values=PRODUCTS,
            rows="M",
            layouts=STRIDED,
        ),
        Operation(
            name="attention",
            signature="attention(q (B, H, T, D), k (B, H, S, D), v (B, H, S, D)) → (B, H, T, D)",
            about="softmax(q kᵀ/√D) v",
            arguments=(
                QUERIES,
                Argument("k", ("B", "H", "S", "D")),
                Argument("v", ("B", "H", "S", "D")),
            ),
            exact=_attention,
            constants=(("is_causal", False), SCALE),
            sizes={**ATTENTION_SIZES, "T": LENGTHS, "S": LENGTHS},
            values=("normal", "±50", "constant", "zeros", "tiny"),
            largest_logit=_largest_score,
            subtracted=_subtracted_by_attention,
            rows="T",
            layouts=STRIDED,
        ),
        Operation(
            name="causal_attention",
            signature="causal_attention(q, k, v, is_causal=True), all (B, H, T, D) → (B, H, T, D)",
            about="attention in which a query sees the keys up to its own position",
            arguments=(
                QUERIES,
                Argument("k", ("B", "H", "T", "D")),
                Argument("v", ("B", "H", "T", "D")),
            ),
            exact=_causal_attention,
            sizes={**ATTENTION_SIZES, "T": LENGTHS},
            values=("normal", "±50", "constant", "zeros", "tiny"),
            largest_logit=_largest_score,
            subtracted=_subtracted_by_attention,
            rows="T",
            options=(("is_causal", True),),
            constants=(SCALE,),
            layouts=STRIDED,
        ),
    )
}


def operation_of(name: str) -> Operation:
    """Return an operation by its name.

    Raises:
        ValueError: there is none of that name. The message lists those that exist.
    """
    if name not in OPERATIONS:
        raise ValueError(f"operation {name!r} is unknown; allowed: {', '.join(OPERATIONS)}")
    return OPERATIONS[name]
