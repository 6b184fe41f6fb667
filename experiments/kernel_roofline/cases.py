"""The rows: every operation at its sizes, with variants, least traffic and naive form."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cost import Cost

VARIANTS = ("ours", "naive", "builtin", "compile", "template", "liger", "torchao")
Function = Callable[..., Any]


class Operand(NamedTuple):
    """An input: normal values around `mean`, or, of a number of `classes`, indices of them."""

    shape: tuple[int, ...]
    deviation: float = 1.0
    mean: float = 0.0
    classes: int = 0


# What an operation takes → its operands, of the sizes in its row's shape.
OPERANDS: dict[str, Callable[..., list[Operand]]] = {
    "x": lambda *shape: [Operand(shape)],
    "x, y": lambda *shape: [Operand(shape), Operand(shape)],
    "x, w": lambda n, d: [Operand((n, d)), Operand((d,), 0.1, 1.0)],
    "x, w, b": lambda n, d: [Operand((n, d)), Operand((d,), 0.1, 1.0), Operand((d,), 0.1)],
    "x, residual, w": lambda n, d: [Operand((n, d)), Operand((n, d)), Operand((d,), 0.1, 1.0)],
    "a, b": lambda m, k, n: [Operand((m, k)), Operand((k, n))],
    "x, weight": lambda n, d, f: [Operand((n, d)), Operand((f, d), 0.02)],
    "layer": lambda n, d, f: [Operand((n, d)), Operand((f, d)), Operand((f,))],
    "logits, targets": lambda n, v: [Operand((n, v)), Operand((n,), classes=v)],
    "head, targets": lambda n, d, v: [
        Operand((n, d)),
        Operand((v, d), 0.02),
        Operand((n,), classes=v),
    ],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one size.

    Args:
        name: name of the operation.
        shape: sizes in the table, with which `least` is called.
        tiny: sizes in the smoke test.
        dtype: name of the dtype in torch.
        takes: name in OPERANDS, or a function that makes operands of the shape.
        least: function of shape, dtype and, unless it has none, `backward`, that returns the least
            FLOPs and bytes.
        variants: name → function of the inputs; "compile" and "template" are made from `plain`.
        directions: "fwd", "bwd" or "both".
        compute: True if it is bound by arithmetic: the share of cuBLAS counts, not that of the
            copy.
        moves: direction → bytes that our form moves over the least, if it knowingly moves more.
    """

    name: str
    shape: tuple[int, ...]
    tiny: tuple[int, ...]
    dtype: str
    takes: str | Callable[..., list[Operand]]
    least: Callable[..., Cost]
    variants: dict[str, Function]
    directions: tuple[str, ...] = ("fwd", "bwd")
    compute: bool = False
    moves: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} {'×'.join(map(str, self.shape))}"

    @property
    def plain(self) -> Function | None:
        """Return the form for torch.compile and for float64: the naive one, or torch's own."""
        return (
            None
            if self.name == "adamw"
            else self.variants.get("naive", self.variants.get("builtin"))
        )

    @property
    def main(self) -> Function:
        """Ours, or where there is none what is plain."""
        return self.variants.get("ours") or self.variants["naive"]

    def sized(self, small: bool) -> "Case":
        """Itself, or as in the smoke test."""
        return dataclasses.replace(self, shape=self.tiny, dtype="float32") if small else self

    def has(self, variant: str) -> bool:
        """Return whether a variant has a row.

        torch.compile takes plain forms, and its templates are for single matmuls.
        """
        made = {
            "compile": self.plain is not None,
            "template": self.name in ("matmul", "matmul_gelu"),
        }
        return variant in self.variants or made.get(variant, False)

    def inputs(self, device: str) -> list[Tensor]:
        """Return the inputs of the operation. On the meta device nothing is drawn."""
        dtype, found = getattr(torch, self.dtype), []
        generator = (
            None
            if device == "meta"
            else torch.Generator(device).manual_seed(len(self.shape) + sum(self.shape))
        )
        takes = OPERANDS[self.takes] if isinstance(self.takes, str) else self.takes
        for shape, deviation, mean, classes in takes(*self.shape):
            if classes:
                found.append(torch.arange(*shape, device=device) * 7919 % classes)
            else:
                drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
                found.append(drawn if (deviation, mean) == (1.0, 0.0) else mean + deviation * drawn)
        return found

    def cost(self, direction: str) -> Cost:
        """Least FLOPs and bytes of a direction."""
        passes = {"fwd": [{}], "bwd": [{"backward": True}], "both": [{}, {"backward": True}]}[
            direction
        ]
        costs = [self.least(self.shape, getattr(torch, self.dtype), **which) for which in passes]
        return functools.reduce(operator.add, costs)


def cases(small: bool = False) -> list[Case]:
    """Every row of the table, or, in fp32, its smoke test's, where two sizes may be one."""
    parts = (_element_wise, _rows, _fused_norms, _model_parts, _matmuls, _losses)
    every = [case for part in parts for case in part()]
    if not small:
        return every
    found: dict[str, Case] = {}
    for case in every:
        shrunk = case.sized(small)
        found.setdefault(shrunk.label, shrunk)
    return list(found.values())


# Kernels are imported inside the functions: importing them decides how they run.
NORM, TINY = (8192, 4096), (4, 64)
MANY_ROWS = (65536, 4096)  # so large that starting and ending a kernel do not show


def _element_wise() -> list[Case]:
    from kernels import adamw, dropout, elementwise, reference

    return [
        Case(
            "add",
            (8192, 8192),
            TINY,
            "bfloat16",
            "x, y",
            elementwise.add_cost,
            {"ours": elementwise.add, "naive": reference.add},
            ("fwd",),
        ),
        Case(
            "gelu",
            (8192, 11008),
            TINY,
            "bfloat16",
            "x",
            elementwise.cost,
            {
                "ours": elementwise.gelu,
                "naive": reference.gelu,
                "builtin": lambda x: F.gelu(x, approximate="tanh"),
            },
        ),
        Case(
            "add_gelu",
            (8192, 8192),
            TINY,
            "bfloat16",
            "x, y",
            elementwise.add_cost,
            {
                "ours": lambda x, y: elementwise.gelu(elementwise.add(x, y)),
                "naive": lambda x, y: reference.gelu(x + y),
                "builtin": lambda x, y: F.gelu(x + y, approximate="tanh"),
            },
            ("fwd",),
            moves={"fwd": 5 / 3},
        ),
        Case(
            "dropout",
            (8192, 8192),
            TINY,
            "bfloat16",
            "x",
            dropout.cost,
            {"ours": lambda x: dropout.dropout(x, 0.1), "builtin": lambda x: F.dropout(x, 0.1)},
        ),
        Case(
            "adamw",
            (2**27,),
            (200,),
            "float32",
            "x",
            lambda s, d: adamw.cost(s[0], d),
            {
                "ours": _stepping(adamw.AdamW),
                "naive": _stepping(torch.optim.AdamW, foreach=False),
                "builtin": _stepping(torch.optim.AdamW, fused=True),
            },
            ("fwd",),
        ),
    ]


def _stepping(optimizer_class: type, **options: Any) -> Function:
    """Return a step of an optimizer over the input cut into 64 parameters.

    The parameters are made at the first call.
    """
    made: dict = {}

    def step(x: Tensor) -> Tensor:
        if x.device not in made:
            parameters = [piece.clone().requires_grad_() for piece in x.detach().chunk(64)]
            for p in parameters:
                p.grad = torch.ones_like(p)
            made[x.device] = parameters, optimizer_class(parameters, **options)
        parameters, optimizer = made[x.device]
        optimizer.step()
        return parameters[0]

    return step


def _rows() -> list[Case]:
    from kernels import layernorm, reference, rmsnorm, softmax, weighted_sum

    found = []
    for shape in (NORM, MANY_ROWS):
        found += [
            Case(
                "weighted_sum",
                shape,
                TINY,
                "bfloat16",
                "x, w",
                weighted_sum.cost,
                {
                    "ours": weighted_sum.weighted_sum,
                    "naive": reference.weighted_sum,
                    "builtin": lambda x, w: x @ w,
                },
            ),
            Case(
                "layer_norm",
                shape,
                TINY,
                "bfloat16",
                "x, w, b",
                layernorm.cost,
                {
                    "ours": layernorm.layer_norm,
                    "naive": reference.layer_norm,
                    "liger": _liger("layer_norm", 1e-5),
                    "builtin": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
                },
            ),
            Case(
                "rms_norm",
                shape,
                TINY,
                "bfloat16",
                "x, w",
                rmsnorm.cost,
                {
                    "ours": rmsnorm.rms_norm,
                    "naive": reference.rms_norm,
                    "liger": _liger("rms_norm", 1e-5),
                    "builtin": lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
                },
            ),
        ]
    for shape in (NORM, (32768, 1024), (1024, 32768), (256, 200000)):
        dtype = "float32" if shape[1] < 8192 else "bfloat16"
        # what is read, twice
        twice = {"fwd": 3 / 2, "bwd": 5 / 3} if shape[1] > softmax.HALF_TILE_BACKWARD else {}
        found.append(
            Case(
                "softmax",
                shape,
                (4, shape[1] // 16),
                dtype,
                "x",
                softmax.cost,
                {
                    "ours": softmax.softmax,
                    "naive": reference.softmax,
                    "builtin": lambda x: F.softmax(x, -1),
                    "liger": _liger("softmax"),
                },
                moves=twice,
            )
        )
    return found


def _fused_norms() -> list[Case]:
    from kernels import reference, rmsnorm
    from kernels._dispatch import forced
    from kernels._rows import Launch

    def cost(shape: tuple[int, ...], dtype: torch.dtype, backward: bool = False) -> Cost:
        # what is timed backward is the gradient of y alone: none arrives for the sum
        return rmsnorm.cost(shape, dtype, residual=not backward, backward=backward)

    def spilling(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with forced(rmsnorm=Launch(block=w.numel(), warps=2)):
            return rmsnorm.add_rms_norm(x, r, w, 1e-5, "silu")

    def variants(activation: str | None) -> dict[str, Function]:
        after = F.silu if activation else lambda y: y
        return {
            "ours": lambda x, r, w: rmsnorm.add_rms_norm(x, r, w, 1e-5, activation),
            "naive": lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5, activation),
            "builtin": lambda x, r, w: after(F.rms_norm(x + r, w.shape, w, 1e-5)),
        }

    silu = variants("silu")
    return [
        Case("add_rms_norm", NORM, TINY, "bfloat16", "x, residual, w", cost, variants(None)),
        Case("add_rms_norm_silu", NORM, TINY, "bfloat16", "x, residual, w", cost, silu),
        Case(
            "spilling_add_rms_norm_silu",
            (2048, 16384),
            TINY,
            "bfloat16",
            "x, residual, w",
            cost,
            silu | {"ours": spilling},
            ("fwd",),
        ),
    ]


def _model_parts() -> list[Case]:
    from kernels import reference, rope, swiglu

    def with_tables(function: Function) -> Function:
        tables: dict = {}

        def run(x: Tensor) -> Tensor:
            if x.is_meta or x.device not in tables:
                length, width = x.shape[-2:]
                angles = torch.arange(length, device=x.device)[:, None] * torch.logspace(
                    0, -4, width // 2, device=x.device
                )
                tables[x.device] = (
                    torch.cat([angles.cos()] * 2, -1),
                    torch.cat([-angles.sin(), angles.sin()], -1),
                )
            return function(x, *tables[x.device])

        return run

    return [
        Case(
            "rope",
            (4, 32, 4096, 128),
            (2, 2, 8, 16),
            "bfloat16",
            "x",
            lambda s, d, **_: rope.cost(s, d),
            {"ours": with_tables(rope.rope), "naive": with_tables(reference.rope)},
        ),
        Case(
            "swiglu",
            (8192, 11008),
            TINY,
            "bfloat16",
            "x, y",
            swiglu.cost,
            {
                "ours": swiglu.swiglu,
                "naive": reference.swiglu,
                "builtin": lambda g, u: F.silu(g) * u,
                "liger": _liger("swiglu"),
            },
        ),
    ]


def _matmuls() -> list[Case]:
    from kernels import dropout, float8_linear, matmul

    def layer_cost(shape: tuple[int, ...], dtype: torch.dtype, backward: bool = False) -> Cost:
        n, _, f = shape
        return matmul.cost(shape, dtype, backward=backward) + dropout.cost(
            (n, f), dtype, gelu=True, backward=backward
        )

    squares = [
        Case(
            "matmul",
            (size,) * 3,
            (40, 24, 33),
            "bfloat16",
            "a, b",
            matmul.cost,
            {"ours": matmul.matmul, "builtin": torch.matmul},
            ("fwd",),
            True,
        )
        for size in (4096, 8192)
    ]
    gelu = partial(F.gelu, approximate="tanh")
    epilogues = [
        Case(
            f"matmul_{name}",
            shape,
            (40, 24, 33),
            "bfloat16",
            "a, b",
            matmul.cost,
            {
                "ours": partial(matmul.matmul, epilogue=name),
                "builtin": lambda a, b, after=after: after(a @ b),
            },
            ("fwd",),
            True,
        )
        for name, shape, after in (
            ("gelu", (4096,) * 3, gelu),
            ("gelu", (8192,) * 3, gelu),
            ("relu", (4096,) * 3, F.relu),
            ("leaky_relu", (4096,) * 3, F.leaky_relu),
            ("rms_norm", (65536, 1024, 256), lambda y: F.rms_norm(y, y.shape[-1:], eps=1e-5)),
        )
    ]
    layer = {
        "ours": lambda x, w, b: dropout.linear_gelu_dropout(x, w, b, 0.1),
        "builtin": lambda x, w, b: F.dropout(F.gelu(F.linear(x, w, b), approximate="tanh"), 0.1),
    }
    return (
        squares
        + epilogues
        + [
            Case(
                "float8_linear",
                (8192, 4096, 14336),
                (16, 32, 48),
                "bfloat16",
                "x, weight",
                float8_linear.cost,
                {
                    "ours": float8_linear.float8_linear,
                    "builtin": F.linear,
                    "torchao": lambda x, w: _torchao()(x, w),
                },
                compute=True,
            ),
            Case(
                "linear_gelu_dropout",
                (8192, 4096, 11008),
                (8, 16, 24),
                "bfloat16",
                "layer",
                layer_cost,
                layer,
                compute=True,
            ),
        ]
    )


def _losses() -> list[Case]:
    from kernels import cross_entropy, linear_cross_entropy, reference

    def head_cost(shape: tuple[int, ...], dtype: torch.dtype, backward: bool = False) -> Cost:
        return Cost(0, 0) if backward else linear_cross_entropy.cost(shape, dtype)

    head = (8192, 4096, 151936), (8, 16, 100), "bfloat16", "head, targets", head_cost
    liger = _liger("fused_linear_cross_entropy")
    return [
        Case(
            "cross_entropy",
            (2048, 151936),
            (8, 500),
            "bfloat16",
            "logits, targets",
            cross_entropy.cost,
            {
                "ours": cross_entropy.cross_entropy,
                "naive": reference.cross_entropy,
                "builtin": lambda z, t: F.cross_entropy(z.float(), t),
                "liger": _liger("cross_entropy"),
            },
            ("both",),
        ),
        Case(
            "linear_cross_entropy",
            *head,
            {
                "ours": linear_cross_entropy.linear_cross_entropy,
                "liger": liger,
                "builtin": lambda x, w, t: F.cross_entropy((x @ w.T).float(), t),
            },
            ("both",),
            True,
        ),
    ]


@functools.cache
def _torchao() -> Function:
    """Return torchao's linear layer in fp8, by its default recipe and compiled, as its users do."""
    from torchao.float8 import convert_to_float8_training

    layer = convert_to_float8_training(torch.nn.Linear(1, 1, bias=False))
    return torch.compile(lambda x, w: torch.func.functional_call(layer, {"weight": w}, x))


def _liger(name: str, *options: Any) -> Function:
    """Return Liger's function of that name.

    It is imported when it is called, so that a missing Liger is a row that says so.
    """

    def run(*tensors: Tensor) -> Any:
        from liger_kernel.transformers import functional

        result = getattr(functional, f"liger_{name}")(*tensors, *options)
        return result[0] if isinstance(result, tuple) else result

    return run


def with_gradients(inputs: list[Tensor]) -> list[Tensor]:
    """Copies; those of floating point require gradients."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs that need gradients."""
    return [t for t in inputs if t.requires_grad]


def first(out: Any) -> Tensor:
    """The result, or the first of several."""
    return out[0] if isinstance(out, tuple) else out


def runner(
    function: Function, inputs: list[Tensor], direction: str, upstream: Tensor
) -> Callable[[], Any]:
    """Return the function to time.

    It is the forward without gradients, the backward of a forward made now, or both.
    """
    if direction == "fwd":
        plain = [t.detach() for t in inputs]
        return lambda: function(*plain)
    if direction == "both":
        return lambda: torch.autograd.grad(first(function(*inputs)), leaves(inputs), upstream)
    out = first(function(*inputs))
    return lambda: torch.autograd.grad(out, leaves(inputs), upstream, retain_graph=True)


def upstream_of(out: Tensor, direction: str) -> Tensor:
    """The gradient that arrives at a result: random, or what `loss.backward()` passes."""
    if direction == "both":
        return torch.ones_like(out)
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
