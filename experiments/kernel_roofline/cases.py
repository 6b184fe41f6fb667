"""The rows: every operation at its sizes, with its variants, its least traffic and what its naive form is."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cost import Cost

VARIANTS = ("ours", "naive", "builtin", "compile", "template", "liger")
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one size.

    Args:
        name: of the operation.
        shape: what the table shows, and what `inputs` and `cost` are called with.
        dtype: torch's name of it.
        directions: "fwd", "bwd" or "both".
        inputs: shape, dtype, device → tensors; those of floating point get gradients.
        variants: name → function of the inputs; "compile" and "template" are made from `plain`.
        cost: direction → least FLOPs and bytes.
        compute: bound by arithmetic: the share of cuBLAS counts, not that of the copy.
        moves: direction → bytes that our form moves over the least, where it knowingly moves more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    directions: tuple[str, ...]
    inputs: Callable[[tuple[int, ...], torch.dtype, str], list[Tensor]]
    variants: dict[str, Function]
    cost: Callable[[str], Cost]
    compute: bool = False
    moves: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} {'×'.join(map(str, self.shape))}"

    @property
    def plain(self) -> Function | None:
        """What torch.compile is given, and what is right in float64: the naive form, or torch's own."""
        return None if self.name == "adamw" else self.variants.get("naive", self.variants.get("builtin"))

    def has(self, variant: str) -> bool:
        """Whether there is such a row: torch.compile takes what is plain, its templates are for single matmuls."""
        made = {"compile": self.plain is not None, "template": self.name in ("matmul", "matmul_gelu")}
        return variant in self.variants or made.get(variant, False)


class Table:
    """Collects the cases; small ones for the smoke test."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.rows: list[Case] = []

    def add(self, name: str, shape: tuple[int, ...], tiny: tuple[int, ...], dtype: str, inputs: Function,
            cost: Function, directions: tuple[str, ...] = ("fwd", "bwd"), compute: bool = False,
            moves: Mapping[str, float] | None = None, **variants: Function) -> None:
        """One row; `tiny` is its shape in the smoke test, cost a function of shape, dtype and `backward`."""
        shape = tiny if self.small else shape
        if any((row.name, row.shape) == (name, shape) for row in self.rows):
            return  # two sizes that are one in the smoke test
        dtype = "float32" if self.small else dtype
        torch_dtype = getattr(torch, dtype)

        def of(direction: str) -> Cost:
            if direction == "both":
                return cost(shape, torch_dtype) + cost(shape, torch_dtype, backward=True)
            return cost(shape, torch_dtype, **({"backward": True} if direction == "bwd" else {}))

        self.rows.append(Case(name, shape, dtype, directions, inputs, variants, of, compute, moves or {}))


def cases(small: bool = False) -> list[Case]:
    """Every row of the table."""
    table = Table(small)
    for part in (_element_wise, _rows, _fused_norms, _model_parts, _matmuls, _losses):
        part(table)
    return table.rows


# Kernels are imported inside the functions: importing them decides how they run.
NORM, TINY = (8192, 4096), (4, 64)
MANY_ROWS = (65536, 4096)  # so large that starting and ending a kernel do not show


def _element_wise(table: Table) -> None:
    from kernels import adamw, dropout, elementwise, reference

    table.add("add", (8192, 8192), TINY, "bfloat16", two, lambda s, d: elementwise.add_cost(s, d), ("fwd",),
              ours=elementwise.add, naive=reference.add)
    table.add("gelu", (8192, 11008), TINY, "bfloat16", one, elementwise.cost, ours=elementwise.gelu,
              naive=reference.gelu, builtin=lambda x: F.gelu(x, approximate="tanh"))
    table.add("add_gelu", (8192, 8192), TINY, "bfloat16", two, lambda s, d: elementwise.add_cost(s, d), ("fwd",),
              moves={"fwd": 5 / 3}, ours=lambda x, y: elementwise.gelu(elementwise.add(x, y)),
              naive=lambda x, y: reference.gelu(x + y), builtin=lambda x, y: F.gelu(x + y, approximate="tanh"))
    table.add("dropout", (8192, 8192), TINY, "bfloat16", one, dropout.cost, ours=lambda x: dropout.dropout(x, 0.1),
              builtin=lambda x: F.dropout(x, 0.1))
    table.add("adamw", (2**27,), (200,), "float32", lambda s, d, device: draw(s)(s, d, device),
              lambda s, d: adamw.cost(s[0], d), ("fwd",), ours=_stepping(adamw.AdamW),
              naive=_stepping(torch.optim.AdamW, foreach=False), builtin=_stepping(torch.optim.AdamW, fused=True))


def _stepping(optimizer_class: type, **options: Any) -> Function:
    """A step of an optimizer over the input cut into 64 parameters, which are made at the first call."""
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


def _rows(table: Table) -> None:
    from kernels import layernorm, reference, rmsnorm, softmax, weighted_sum

    for shape in (NORM, MANY_ROWS):
        table.add("weighted_sum", shape, TINY, "bfloat16", rows_and_weight, weighted_sum.cost,
                  ours=weighted_sum.weighted_sum, naive=reference.weighted_sum, builtin=lambda x, w: x @ w)
    for shape in (NORM, (32768, 1024), (1024, 32768), (256, 200000)):
        twice = {"fwd": 3 / 2, "bwd": 5 / 3} if shape[1] > softmax.HALF_TILE_BACKWARD else {}  # what is read, twice
        table.add("softmax", shape, (4, shape[1] // 16), "float32", one, softmax.cost, moves=twice,
                  ours=softmax.softmax, naive=reference.softmax, builtin=lambda x: F.softmax(x, -1),
                  liger=_liger("softmax"))
    for shape in (NORM, MANY_ROWS):
        table.add("layer_norm", shape, TINY, "bfloat16", row_weight_and_bias, layernorm.cost,
                  ours=layernorm.layer_norm, naive=reference.layer_norm,
                  builtin=lambda x, w, b: F.layer_norm(x, w.shape, w, b), liger=_liger("layer_norm", 1e-5))
        table.add("rms_norm", shape, TINY, "bfloat16", rows_and_weight, rmsnorm.cost, ours=rmsnorm.rms_norm,
                  naive=reference.rms_norm, builtin=lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
                  liger=_liger("rms_norm", 1e-5))


def _fused_norms(table: Table) -> None:
    from kernels import reference, rmsnorm
    from kernels._rows import Launch, forced

    for name, activation in (("add_rms_norm", None), ("add_rms_norm_silu", "silu")):
        table.add(name, NORM, TINY, "bfloat16", two_and_weight,
                  # what is timed backward is the gradient of y alone: none arrives for the sum
                  lambda s, d, backward=False: rmsnorm.cost(s, d, residual=not backward, backward=backward),
                  ours=lambda x, r, w, a=activation: rmsnorm.add_rms_norm(x, r, w, 1e-5, a),
                  naive=lambda x, r, w, a=activation: reference.add_rms_norm(x, r, w, 1e-5, a))

    def spilling(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with forced(rmsnorm=Launch(block=64 if table.small else 16384, warps=2)):
            return rmsnorm.add_rms_norm(x, r, w, 1e-5, "silu")

    table.add("spilling_add_rms_norm_silu", (2048, 16384), TINY, "bfloat16", two_and_weight,
              lambda s, d: rmsnorm.cost(s, d, residual=True), ("fwd",), ours=spilling,
              naive=lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5, "silu"))


def _model_parts(table: Table) -> None:
    from kernels import reference, rope, swiglu

    def with_tables(function: Function) -> Function:
        tables: dict = {}

        def run(x: Tensor) -> Tensor:
            if x.is_meta or x.device not in tables:
                length, width = x.shape[-2:]
                angles = torch.arange(length, device=x.device)[:, None] * torch.logspace(0, -4, width // 2,
                                                                                         device=x.device)
                tables[x.device] = (torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1))
            return function(x, *tables[x.device])

        return run

    table.add("rope", (4, 32, 4096, 128), (2, 2, 8, 16), "bfloat16", one, lambda s, d, **_: rope.cost(s, d),
              ours=with_tables(rope.rope), naive=with_tables(reference.rope))
    table.add("swiglu", (8192, 11008), TINY, "bfloat16", two, swiglu.cost, ours=swiglu.swiglu, naive=reference.swiglu,
              builtin=lambda g, u: F.silu(g) * u, liger=_liger("swiglu"))


def _matmuls(table: Table) -> None:
    from kernels import dropout, matmul, reference

    def operands(shape, dtype, device):
        m, k, n = shape
        return draw((m, k), (k, n))(shape, dtype, device)

    for size in (4096, 8192):
        table.add("matmul", (size,) * 3, (40, 24, 33), "bfloat16", operands, matmul.cost, ("fwd",), True,
                  ours=matmul.matmul, builtin=torch.matmul)
        table.add("matmul_gelu", (size,) * 3, (40, 24, 33), "bfloat16", operands, matmul.cost, ("fwd",), True,
                  ours=lambda a, b: matmul.matmul(a, b, epilogue="gelu"), naive=lambda a, b: reference.gelu(a @ b),
                  builtin=lambda a, b: F.gelu(a @ b, approximate="tanh"))

    def layer_inputs(shape, dtype, device):
        n, d, f = shape
        return draw((n, d), (f, d), (f,))(shape, dtype, device)

    def layer_cost(shape, dtype, backward=False):
        n, _, f = shape
        return matmul.cost(shape, dtype, backward=backward) + dropout.cost((n, f), dtype, gelu=True, backward=backward)

    table.add("linear_gelu_dropout", (8192, 4096, 11008), (8, 16, 24), "bfloat16", layer_inputs, layer_cost,
              compute=True, ours=lambda x, w, b: dropout.linear_gelu_dropout(x, w, b, 0.1),
              builtin=lambda x, w, b: F.dropout(F.gelu(F.linear(x, w, b), approximate="tanh"), 0.1))


def _losses(table: Table) -> None:
    from kernels import cross_entropy, linear_cross_entropy, reference

    def loss_inputs(shape, dtype, device):
        logits = draw(shape)(shape, dtype, device)[0]
        return [logits, torch.arange(shape[0], device=device) * 7919 % shape[1]]

    table.add("cross_entropy", (2048, 151936), (8, 500), "bfloat16", loss_inputs, cross_entropy.cost, ("both",),
              ours=cross_entropy.cross_entropy, naive=reference.cross_entropy,
              builtin=lambda z, t: F.cross_entropy(z.float(), t), liger=_liger("cross_entropy"))

    def layer_inputs(shape, dtype, device):
        n, d, v = shape
        x, w = draw((n, d), (v, d))(shape, dtype, device)
        return [x, w * 0.02, torch.arange(n, device=device) * 7919 % v]

    def layer_cost(shape, dtype, backward=False):
        return Cost(0, 0) if backward else linear_cross_entropy.cost(shape, dtype)

    def in_chunks(chunk_bytes: int) -> Function:
        return lambda x, w, t: linear_cross_entropy.linear_cross_entropy(x, w, t, chunk_bytes=chunk_bytes)

    table.add("linear_cross_entropy", (8192, 4096, 151936), (8, 16, 100), "bfloat16", layer_inputs, layer_cost,
              ("both",), True, ours=in_chunks(linear_cross_entropy.CHUNK_BYTES),
              builtin=lambda x, w, t: F.cross_entropy((x @ w.T).float(), t),
              liger=_liger("fused_linear_cross_entropy"))
    table.add("linear_cross_entropy_256_rows", (8192, 4096, 151936), (8, 16, 100), "bfloat16", layer_inputs,
              layer_cost, ("both",), True, ours=in_chunks(400 if table.small else 80 * 2**20),  # as small as Liger's
              liger=_liger("fused_linear_cross_entropy"))


def _liger(name: str, *options: Any) -> Function:
    """Liger's function of that name; imported when it is called, so that its absence is a row that says so."""

    def run(*tensors: Tensor) -> Any:
        from liger_kernel.transformers import functional

        result = getattr(functional, f"liger_{name}")(*tensors, *options)
        return result[0] if isinstance(result, tuple) else result

    return run


def draw(*shapes: tuple[int, ...]) -> Callable[..., list[Tensor]]:
    """Normal inputs of these shapes; on the meta device nothing is drawn."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        if device == "meta":
            return [torch.empty(size, dtype=dtype, device=device) for size in shapes]
        generator = torch.Generator(device).manual_seed(len(shape) + sum(shape))
        return [torch.randn(size, generator=generator, device=device).to(dtype) for size in shapes]

    return make


def one(shape, dtype, device):
    """[x]"""
    return draw(shape)(shape, dtype, device)


def two(shape, dtype, device):
    """[x, y], alike."""
    return draw(shape, shape)(shape, dtype, device)


def rows_and_weight(shape, dtype, device):
    """[x (N, D), weight (D) around 1]"""
    x, w = draw(shape, shape[1:])(shape, dtype, device)
    return [x, 1 + 0.1 * w]


def row_weight_and_bias(shape, dtype, device):
    """[x (N, D), weight (D), bias (D)]"""
    x, w, b = draw(shape, shape[1:], shape[1:])(shape, dtype, device)
    return [x, 1 + 0.1 * w, 0.1 * b]


def two_and_weight(shape, dtype, device):
    """[x, residual (N, D), weight (D)]"""
    return [*two(shape, dtype, device), rows_and_weight(shape, dtype, device)[1]]


def with_gradients(inputs: list[Tensor]) -> list[Tensor]:
    """Copies; those of floating point require gradients."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    """Those that ask for gradients."""
    return [t for t in inputs if t.requires_grad]


def first(out: Any) -> Tensor:
    """The result, or the first of several."""
    return out[0] if isinstance(out, tuple) else out


def runner(function: Function, inputs: list[Tensor], direction: str, upstream: Tensor) -> Callable[[], Any]:
    """What is timed: the forward without gradients, or the backward of a forward made now, or both."""
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
