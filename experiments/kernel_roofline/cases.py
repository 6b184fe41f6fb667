"""The rows of `kernel_roofline`: a table of sizes, then one function per operation.

An operation's function says everything about it: inputs, our kernel, its peers and the least work.
Nothing is timed here. Next: `Row` in `__init__` measures a row, and `chains` adds chains.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.kernel_check.calls import Call
from kernels import reference  # plain torch
from kernels.cost import Cost

# All other modules of `kernels` are imported inside the operations: the first import decides
# whether kernels are compiled or interpreted (TRITON_INTERPRET).

VARIANTS = (
    "ours",
    "naive",
    "builtin",
    "compile",
    "template",
    "max-autotune",
    "liger",
    "torchao",
    "quack",
    "cce",
    "yours",
)
# Peer → the package that it needs: rows only where it is installed.
OPTIONAL = {"quack": "quack-kernels>=0.6,<0.7", "cce": "cut-cross-entropy>=25.1,<26"}
MODULES = {"quack": "quack", "cce": "cut_cross_entropy"}  # peer → module of this package
NO_BACKWARD = "it has no backward"
Function = Callable[..., Any]
Shape = tuple[int, ...]


def cases(small: bool = False) -> list["Case"]:
    """Return every row of the table.

    Args:
        small: True for the sizes of the smoke test, in fp32. Rows that become equal are merged.
    """
    table = [
        # Element-wise operations.
        Case(make=add, shape=(8192, 8192)),
        Case(make=gelu, shape=(8192, 11008)),
        Case(make=add_gelu, shape=(8192, 8192)),
        Case(make=dropout, shape=(8192, 8192)),
        Case(make=adamw, shape=(2**27,), tiny=(200,), dtype="float32"),
        # Operations along rows: at a common size, and at one so large that starting and ending a
        # kernel do not show.
        Case(make=weighted_sum, shape=(8192, 4096)),
        Case(make=layer_norm, shape=(8192, 4096)),
        Case(make=rms_norm, shape=(8192, 4096)),
        Case(make=layer_norm_one_dtype, shape=(8192, 4096)),
        # These two have no kernel of ours. Inductor tries more launch parameters if asked to.
        Case(make=subtract_mean, shape=(8192, 4096)),
        Case(make=norm_plus_input, shape=(8192, 4096)),
        Case(make=weighted_sum, shape=(65536, 4096)),
        Case(make=layer_norm, shape=(65536, 4096)),
        Case(make=rms_norm, shape=(65536, 4096)),
        Case(make=softmax, shape=(8192, 4096), tiny=(4, 256), dtype="float32"),
        Case(make=softmax, shape=(32768, 1024), dtype="float32"),
        Case(make=softmax, shape=(1024, 32768), tiny=(4, 2048)),
        Case(make=softmax, shape=(256, 200000), tiny=(4, 12500)),
        # Norms with the operations before and after them.
        Case(make=add_rms_norm, shape=(8192, 4096)),
        Case(make=add_rms_norm_silu, shape=(8192, 4096)),
        Case(make=spilling_add_rms_norm_silu, shape=(2048, 16384)),
        # Parts of a Transformer.
        Case(make=rope, shape=(4, 32, 4096, 128), tiny=(2, 2, 8, 16)),
        Case(make=swiglu, shape=(8192, 11008)),
        # Matmuls.
        Case(make=matmul, shape=(4096, 4096, 4096), tiny=(40, 24, 33)),
        Case(make=matmul, shape=(8192, 8192, 8192), tiny=(40, 24, 33)),
        Case(make=matmul_gelu, shape=(4096, 4096, 4096), tiny=(40, 24, 33)),
        Case(make=matmul_gelu, shape=(8192, 8192, 8192), tiny=(40, 24, 33)),
        Case(make=matmul_relu, shape=(4096, 4096, 4096), tiny=(40, 24, 33)),
        Case(make=matmul_leaky_relu, shape=(4096, 4096, 4096), tiny=(40, 24, 33)),
        Case(make=matmul_rms_norm, shape=(65536, 1024, 256), tiny=(40, 24, 33)),
        Case(make=float8_linear, shape=(8192, 4096, 14336), tiny=(16, 32, 48)),
        Case(make=linear_gelu_dropout, shape=(8192, 4096, 11008), tiny=(8, 16, 24)),
        # losses, forward and backward together
        Case(make=cross_entropy, shape=(2048, 151936), tiny=(8, 500)),
        Case(make=linear_cross_entropy, shape=(8192, 4096, 151936), tiny=(8, 16, 100)),
    ]
    if not small:
        return table
    by_label: dict[str, Case] = {}
    for case in table:
        shrunk = case.sized(small=True)
        # One operation has rows of several sizes, which are equal once they are small.
        by_label.setdefault(shrunk.label, shrunk)
    return list(by_label.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Row of the table: one operation at one size.

    Args:
        make: function of shape and dtype that returns the operation. Its name is that of the row.
        shape: sizes of the row.
        tiny: sizes in the smoke test.
        dtype: name of the dtype in torch.
        chain: names of the steps if the row is a chain of operations (see `chains`).
        yours: a user's kernel for the operation.
    """

    make: Callable[[Shape, torch.dtype], "Operation"]
    shape: Shape
    tiny: Shape = (4, 64)
    dtype: str = "bfloat16"
    chain: tuple[str, ...] = ()
    yours: Function | None = None

    @property
    def name(self) -> str:
        """Name of the operation in tables and records."""
        return "+".join(self.chain) or self.make.__name__

    @property
    def label(self) -> str:
        return f"{self.name} {'×'.join(map(str, self.shape))}"

    @functools.cached_property
    def operation(self) -> "Operation":
        """The operation at this size. Made once, because an optimizer keeps its state in it."""
        operation = self.make(self.shape, getattr(torch, self.dtype))
        yours = self.yours
        if isinstance(yours, Call):
            # The user's function itself is timed, and not what finds its arguments.
            dtype = getattr(torch, self.dtype)
            yours = yours.for_sizes([each.draw(dtype, "meta", None) for each in operation.inputs])
        if yours is not None and operation.adapt_yours is not None:
            yours = operation.adapt_yours(yours)
        # A copy is returned, because rows with and without a user's kernel share the operation.
        return dataclasses.replace(operation, yours=yours)

    def sized(self, small: bool) -> "Case":
        """Return this row, or the row of the smoke test."""
        if not small:
            return self
        # fp32 has no rounding to the input's dtype, so the smoke test can use tight tolerances.
        return dataclasses.replace(self, shape=self.tiny, dtype="float32")

    def inputs(self, device: str) -> list[Tensor]:
        """Return the inputs of the operation. On the meta device nothing is drawn."""
        generator = None
        if device != "meta":
            # From the shape alone, so that a resumed run draws the inputs again that its other rows
            # had.
            seed = len(self.shape) + sum(self.shape)
            generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        return [each.draw(dtype, device, generator) for each in self.operation.inputs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation at one size: inputs, variants and the least work.

    A variant is a function of the inputs. `compile`, `template` and `max-autotune` are made from
    the naive form.

    Args:
        inputs: descriptions of the inputs, in order.
        ours: our kernel.
        naive: plain torch, one kernel at a time.
        builtin: torch's own operator.
        liger: Liger Kernel's.
        torchao: torchao's.
        quack: QuACK's.
        cce: that of Apple's Cut Cross-Entropy.
        yours: a user's kernel.
        adapt_yours: function that makes a function of the inputs of a user's kernel, which takes
            the tensors that `distlab kernel --list` shows. None where these are the inputs.
        forward_cost: least FLOPs and bytes of the forward pass.
        backward_cost: least FLOPs and bytes of the backward pass. None if it is not timed.
        compute_bound: True if arithmetic bounds the operation. Its rate is then compared with
            cuBLAS, otherwise with a copy.
        traffic_factor: direction → bytes that our kernel moves over the least bytes, where it
            knowingly moves more.
        templates: True if Inductor has Triton templates for it: it has them for single matmuls.
        is_loss: True if forward and backward are timed together, as a loss is called.
        autotuned: True if Inductor is also asked to try more launch parameters.
        random: True if results are random. They are then not compared with float64.
        stateful: True if the tensors it works on are its own, not its inputs. It is then neither
            compiled, captured in a CUDA graph, compared with float64 nor predicted.
        tolerance: largest error, relative to the largest value. None for that of the dtype.
        exact_dtype: dtype of the results that errors are measured against.
    """

    inputs: list["Normal | ClassIndices"]
    ours: Function | None = None
    naive: Function | None = None
    builtin: Function | None = None
    liger: Function | None = None
    torchao: Function | None = None
    quack: Function | None = None
    cce: Function | None = None
    yours: Function | None = None
    adapt_yours: Callable[[Function], Function] | None = None
    forward_cost: Cost
    backward_cost: Cost | None = None
    compute_bound: bool = False
    traffic_factor: Mapping[str, float] = dataclasses.field(default_factory=dict)
    templates: bool = False
    is_loss: bool = False
    autotuned: bool = False
    random: bool = False
    stateful: bool = False
    tolerance: float | None = None
    exact_dtype: torch.dtype = torch.float64

    @property
    def variants(self) -> dict[str, Function]:
        """Functions by the name of their variant, without those that torch.compile makes."""
        functions = {name: getattr(self, name, None) for name in VARIANTS}
        return {name: function for name, function in functions.items() if function is not None}

    @property
    def directions(self) -> tuple[str, ...]:
        """Names of what is timed: "fwd", "bwd" or "both", the two in one call."""
        if self.backward_cost is None:
            return ("fwd",)
        return ("both",) if self.is_loss else ("fwd", "bwd")

    @property
    def plain(self) -> Function | None:
        """The form for torch.compile and for float64: the naive one, or else torch's own."""
        # A stateful operation changes its own tensors, and a second form would start from other
        # values.
        if self.stateful:
            return None
        return self.naive or self.builtin

    @property
    def main(self) -> Function:
        """Our kernel, or the naive form where there is none."""
        return self.ours or self.naive

    def has(self, variant: str) -> bool:
        """Return whether a variant has a row."""
        # These forms are made from the naive one, so they exist wherever that does.
        if variant == "compile":
            return self.plain is not None
        if variant == "template":
            return self.templates
        if variant == "max-autotune":
            return self.autotuned
        return variant in self.variants

    def cost(self, direction: str) -> Cost:
        """Return the least FLOPs and bytes of a direction."""
        if direction == "fwd":
            return self.forward_cost
        if direction == "bwd":
            return self.backward_cost
        # Each direction reads and writes its own tensors, so the bytes add up.
        return self.forward_cost + self.backward_cost


@dataclasses.dataclass(frozen=True)
class Normal:
    """Input of normally distributed values."""

    shape: Shape
    mean: float = 0.0
    deviation: float = 1.0

    def draw(self, dtype: torch.dtype, device: str, generator: torch.Generator | None) -> Tensor:
        """Return the input. The generator is None on the meta device."""
        # Drawn in fp32 and then rounded, so that all dtypes have the same values but for rounding.
        values = torch.randn(self.shape, generator=generator, device=device).to(dtype)
        # The usual case costs no additional kernel.
        if self.mean == 0.0 and self.deviation == 1.0:
            return values
        return self.mean + self.deviation * values


@dataclasses.dataclass(frozen=True)
class ClassIndices:
    """Input of `count` class indices, spread over all `classes` by a fixed rule."""

    count: int
    classes: int

    def draw(self, dtype: torch.dtype, device: str, generator: torch.Generator | None) -> Tensor:
        """Return the input, in int64. Nothing is random."""
        # 7919 is prime, and so shares no factor with `classes`: the indices repeat only after all
        # classes.
        return torch.arange(self.count, device=device) * 7919 % self.classes


# Element-wise operations


def add(shape: Shape, dtype: torch.dtype) -> Operation:
    """x + y."""
    import kernels.elementwise

    return Operation(
        inputs=[Normal(shape), Normal(shape)],
        ours=kernels.elementwise.add,
        naive=reference.add,
        # torch's own addition is the naive form, so there is no builtin row.
        forward_cost=kernels.elementwise.add_cost(shape, dtype),
    )


def gelu(shape: Shape, dtype: torch.dtype) -> Operation:
    """GeLU by its tanh approximation."""
    import kernels.elementwise

    def builtin(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    return Operation(
        inputs=[Normal(shape)],
        ours=kernels.elementwise.gelu,
        naive=reference.gelu,
        builtin=builtin,
        forward_cost=kernels.elementwise.cost(shape, dtype),
        backward_cost=kernels.elementwise.cost(shape, dtype, backward=True),
    )


def add_gelu(shape: Shape, dtype: torch.dtype) -> Operation:
    """GeLU of x + y. It loses on purpose: ours are two kernels, torch.compile makes one."""
    import kernels.elementwise

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return kernels.elementwise.gelu(kernels.elementwise.add(x, y))

    def naive(x: Tensor, y: Tensor) -> Tensor:
        return reference.gelu(x + y)

    def builtin(x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(x + y, approximate="tanh")

    return Operation(
        inputs=[Normal(shape), Normal(shape)],
        ours=ours,
        naive=naive,
        builtin=builtin,
        # The least work is that of one fused kernel, which reads x and y and writes the result.
        forward_cost=kernels.elementwise.add_cost(shape, dtype),
        traffic_factor={"fwd": 5 / 3},  # the sum is also written, and read again
    )


def dropout(shape: Shape, dtype: torch.dtype) -> Operation:
    """Dropout with probability 0.1."""
    import kernels.dropout

    def ours(x: Tensor) -> Tensor:
        return kernels.dropout.dropout(x, 0.1)

    def builtin(x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)

    return Operation(
        inputs=[Normal(shape)],
        ours=ours,
        builtin=builtin,
        forward_cost=kernels.dropout.cost(shape, dtype),
        backward_cost=kernels.dropout.cost(shape, dtype, backward=True),
        random=True,
    )


def adamw(shape: Shape, dtype: torch.dtype) -> Operation:
    """A step of AdamW over 64 parameters, which together have the shape of the input."""
    import kernels.adamw

    def naive(parameters: list[Tensor]) -> torch.optim.Optimizer:
        # Without foreach torch steps one parameter after the other, one kernel per operation.
        return torch.optim.AdamW(parameters, foreach=False)

    def builtin(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    return Operation(
        inputs=[Normal(shape)],
        ours=OptimizerStep(kernels.adamw.AdamW),
        naive=OptimizerStep(naive),
        builtin=OptimizerStep(builtin),
        forward_cost=kernels.adamw.cost(math.prod(shape), dtype),
        stateful=True,
    )


class OptimizerStep:
    """Step of an optimizer over the input, cut into 64 parameters.

    Parameters, gradients and the optimizer are made at the first call.

    Args:
        make: function of the parameters that returns the optimizer.
    """

    def __init__(self, make: Callable[[list[Tensor]], torch.optim.Optimizer]):
        self.make = make
        self.parameters: list[Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Make a step. Return the first parameter."""
        if self.optimizer is None:
            # The forms differ in how many parameters one launch steps, so there are several.
            for piece in x.detach().chunk(64):
                parameter = piece.clone().requires_grad_()
                # The gradient is not computed: a step reads and writes the same bytes whatever its
                # values are.
                parameter.grad = torch.ones_like(parameter)
                self.parameters.append(parameter)
            self.optimizer = self.make(self.parameters)
        self.optimizer.step()
        return self.parameters[0]


# Operations along the rows of a matrix


def weighted_sum(shape: Shape, dtype: torch.dtype) -> Operation:
    """Weighted sum of each row: x @ weight."""
    import kernels.weighted_sum

    return Operation(
        inputs=[Normal(shape), _weight(shape)],
        ours=kernels.weighted_sum.weighted_sum,
        naive=reference.weighted_sum,
        builtin=torch.matmul,
        forward_cost=kernels.weighted_sum.cost(shape, dtype),
        backward_cost=kernels.weighted_sum.cost(shape, dtype, backward=True),
    )


def _weight(shape: Shape) -> Normal:
    """Return the weight of a row's elements, near 1 as in a trained model."""
    # Zeros would hide a wrong sum.
    return Normal(shape[-1:], mean=1.0, deviation=0.1)


def layer_norm(shape: Shape, dtype: torch.dtype) -> Operation:
    """LayerNorm over the last dimension, with weight and bias."""
    import kernels.layernorm

    def builtin(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias)

    return Operation(
        inputs=[
            Normal(shape),
            _weight(shape),
            Normal(shape[-1:], deviation=0.1),  # bias
        ],
        ours=kernels.layernorm.layer_norm,
        naive=reference.layer_norm,
        builtin=builtin,
        liger=liger("layer_norm", 1e-5),
        forward_cost=kernels.layernorm.cost(shape, dtype),
        backward_cost=kernels.layernorm.cost(shape, dtype, backward=True),
    )


def layer_norm_one_dtype(shape: Shape, dtype: torch.dtype) -> Operation:
    """LayerNorm whose naive form is written operation by operation in the inputs' dtype."""

    def naive(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, correction=0, keepdim=True)
        centred = x - mean
        normalized = centred * torch.rsqrt(variance + 1e-5)
        return torch.addcmul(bias, normalized, weight)

    # Liger and the backward are left out, since their rows would be the same as in layer_norm.
    return dataclasses.replace(
        layer_norm(shape, dtype), naive=naive, liger=None, backward_cost=None
    )


def subtract_mean(shape: Shape, dtype: torch.dtype) -> Operation:
    """Each row minus its mean: a reduction that is broadcast. There is no kernel of ours."""

    def naive(x: Tensor) -> Tensor:
        wide = reference.wide(x)
        return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)

    def builtin(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    return Operation(
        # A mean of 1 makes a kernel visible that forgets to subtract it.
        inputs=[Normal(shape, mean=1.0)],
        naive=naive,
        builtin=builtin,
        forward_cost=_read_and_written(shape, dtype, flops_per_element=2),
        autotuned=True,
    )


def norm_plus_input(shape: Shape, dtype: torch.dtype) -> Operation:
    """RMSNorm of x without a weight, plus x itself. There is no kernel of ours."""

    def naive(x: Tensor) -> Tensor:
        wide = reference.wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale + wide).to(x.dtype)

    def builtin(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-5) + x

    return Operation(
        inputs=[Normal(shape)],
        naive=naive,
        builtin=builtin,
        forward_cost=_read_and_written(shape, dtype, flops_per_element=4),
        autotuned=True,
    )


def _read_and_written(shape: Shape, dtype: torch.dtype, flops_per_element: int) -> Cost:
    """Return the least work of an operation that reads x once and writes a result of its shape."""
    count = math.prod(shape)
    return Cost(flops_per_element * count, 2 * count * dtype.itemsize)


def rms_norm(shape: Shape, dtype: torch.dtype) -> Operation:
    """RMSNorm over the last dimension, with a weight."""
    import kernels.rmsnorm

    def builtin(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-5)

    return Operation(
        inputs=[Normal(shape), _weight(shape)],
        ours=kernels.rmsnorm.rms_norm,
        naive=reference.rms_norm,
        builtin=builtin,
        liger=liger("rms_norm", 1e-5),
        quack=quack_rms_norm,
        forward_cost=kernels.rmsnorm.cost(shape, dtype),
        backward_cost=kernels.rmsnorm.cost(shape, dtype, backward=True),
    )


def softmax(shape: Shape, dtype: torch.dtype) -> Operation:
    """Softmax over the last dimension."""
    import kernels.softmax

    def builtin(x: Tensor) -> Tensor:
        return F.softmax(x, -1)

    traffic_factor = {}
    # Rows this long do not stay on chip: ours reads its inputs twice.
    if shape[-1] > kernels.softmax.HALF_TILE_BACKWARD:
        traffic_factor = {
            "fwd": 3 / 2,  # x twice, y
            "bwd": 5 / 3,  # y and dy twice, dx
        }
    return Operation(
        inputs=[Normal(shape)],
        ours=kernels.softmax.softmax,
        naive=reference.softmax,
        builtin=builtin,
        liger=liger("softmax"),
        quack=quack_softmax,
        forward_cost=kernels.softmax.cost(shape, dtype),
        backward_cost=kernels.softmax.cost(shape, dtype, backward=True),
        traffic_factor=traffic_factor,
    )


# Norms with what precedes and follows them


def add_rms_norm(shape: Shape, dtype: torch.dtype) -> Operation:
    """RMSNorm of x + residual. Ours also returns the sum."""
    import kernels.rmsnorm

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.rmsnorm.add_rms_norm(x, residual, weight, 1e-5)

    def naive(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, residual, weight, 1e-5)

    def builtin(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x + residual, weight.shape, weight, 1e-5)

    return Operation(
        inputs=[Normal(shape), Normal(shape), _weight(shape)],
        ours=ours,
        naive=naive,
        builtin=builtin,
        forward_cost=kernels.rmsnorm.cost(shape, dtype, residual=True),
        # Only the norm's result has a gradient: none arrives for the sum.
        backward_cost=kernels.rmsnorm.cost(shape, dtype, residual=False, backward=True),
    )


def add_rms_norm_silu(shape: Shape, dtype: torch.dtype) -> Operation:
    """SiLU of the RMSNorm of x + residual. Ours also returns the sum."""
    import kernels.rmsnorm

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.rmsnorm.add_rms_norm(x, residual, weight, 1e-5, "silu")

    def naive(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, residual, weight, 1e-5, "silu")

    def builtin(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return F.silu(F.rms_norm(x + residual, weight.shape, weight, 1e-5))

    # SiLU is computed where the norm's result is, and moves no more bytes.
    return dataclasses.replace(add_rms_norm(shape, dtype), ours=ours, naive=naive, builtin=builtin)


def spilling_add_rms_norm_silu(shape: Shape, dtype: torch.dtype) -> Operation:
    """`add_rms_norm_silu` in 2 warps. It loses on purpose: a row does not fit their registers."""
    import kernels.rmsnorm
    from kernels._dispatch import forced
    from kernels._rows import Launch

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with forced(rmsnorm=Launch(block=weight.numel(), warps=2)):
            return kernels.rmsnorm.add_rms_norm(x, residual, weight, 1e-5, "silu")

    return dataclasses.replace(add_rms_norm_silu(shape, dtype), ours=ours, backward_cost=None)


# Parts of a Transformer


def rope(shape: Shape, dtype: torch.dtype) -> Operation:
    """Rotary position embedding of x (B, H, T, D), with fp32 tables of cosines and sines."""
    import kernels.rope

    length, width = shape[-2:]
    tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables_on(device: torch.device) -> tuple[Tensor, Tensor]:
        # Made once, so that no timed call makes them. On the meta device calls are counted instead
        # of timed, and each makes them, so that all counts are equal.
        if device.type == "meta" or device not in tables:
            positions = torch.arange(length, device=device)[:, None]
            # Frequencies fall from 1 to 10⁻⁴, as with the usual base of 10,000.
            angles = positions * torch.logspace(0, -4, width // 2, device=device)
            cosines = torch.cat([angles.cos()] * 2, -1)
            # The first half of the sines is negated, as the kernel expects them.
            sines = torch.cat([-angles.sin(), angles.sin()], -1)
            tables[device] = cosines, sines
        return tables[device]

    def ours(x: Tensor) -> Tensor:
        cosines, sines = tables_on(x.device)
        return kernels.rope.rope(x, cosines, sines)

    def naive(x: Tensor) -> Tensor:
        cosines, sines = tables_on(x.device)
        return reference.rope(x, cosines, sines)

    def adapt_yours(function: Function) -> Function:
        def yours(x: Tensor) -> Tensor:
            cosines, sines = tables_on(x.device)
            return function(x, cosines, sines)

        return yours

    return Operation(
        inputs=[Normal(shape)],
        ours=ours,
        naive=naive,
        adapt_yours=adapt_yours,
        forward_cost=kernels.rope.cost(shape, dtype),
        backward_cost=kernels.rope.cost(shape, dtype),  # the same rotation, backwards
    )


def swiglu(shape: Shape, dtype: torch.dtype) -> Operation:
    """silu(gate) · up."""
    import kernels.swiglu

    def builtin(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    return Operation(
        inputs=[Normal(shape), Normal(shape)],
        ours=kernels.swiglu.swiglu,
        naive=reference.swiglu,
        builtin=builtin,
        liger=liger("swiglu"),
        forward_cost=kernels.swiglu.cost(shape, dtype),
        backward_cost=kernels.swiglu.cost(shape, dtype, backward=True),
    )


# Matmuls: shapes are (M, K, N)


def matmul(shape: Shape, dtype: torch.dtype) -> Operation:
    """a @ b. Torch's own is cuBLAS on a GPU."""
    import kernels.matmul

    m, k, n = shape
    return Operation(
        inputs=[Normal((m, k)), Normal((k, n))],
        # There is no naive form, because a matmul is one operator of torch.
        ours=kernels.matmul.matmul,
        builtin=torch.matmul,
        forward_cost=kernels.matmul.cost(shape, dtype),
        compute_bound=True,
        templates=True,
    )


def matmul_gelu(shape: Shape, dtype: torch.dtype) -> Operation:
    """GeLU of a @ b, in the matmul's epilogue."""
    after = functools.partial(F.gelu, approximate="tanh")
    return _with_epilogue(shape, dtype, "gelu", after, templates=True)


def matmul_relu(shape: Shape, dtype: torch.dtype) -> Operation:
    """ReLU of a @ b, in the matmul's epilogue."""
    return _with_epilogue(shape, dtype, "relu", F.relu)


def matmul_leaky_relu(shape: Shape, dtype: torch.dtype) -> Operation:
    """Leaky ReLU of a @ b, in the matmul's epilogue."""
    return _with_epilogue(shape, dtype, "leaky_relu", F.leaky_relu)


def matmul_rms_norm(shape: Shape, dtype: torch.dtype) -> Operation:
    """RMSNorm of the rows of a @ b, without a weight, in the matmul's epilogue."""

    def after(product: Tensor) -> Tensor:
        return F.rms_norm(product, product.shape[-1:], eps=1e-5)

    return _with_epilogue(shape, dtype, "rms_norm", after)


def _with_epilogue(
    shape: Shape, dtype: torch.dtype, epilogue: str, after: Function, templates: bool = False
) -> Operation:
    """Return a matmul with an operation on its result.

    Args:
        shape, dtype: size of the matmul.
        epilogue: name of the operation in our kernel, which does it before it stores the result.
        after: the operation by torch, in a kernel of its own.
        templates: as in `Operation`.
    """
    import kernels.matmul

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return kernels.matmul.matmul(a, b, epilogue=epilogue)

    def builtin(a: Tensor, b: Tensor) -> Tensor:
        return after(a @ b)

    # The least work is the matmul's: its result is not stored before the operation.
    return dataclasses.replace(
        matmul(shape, dtype), ours=ours, builtin=builtin, templates=templates
    )


def float8_linear(shape: Shape, dtype: torch.dtype) -> Operation:
    """Linear layer without a bias: ours and torchao's in fp8, torch's own in the inputs' dtype."""
    import kernels.float8_linear

    rows, width, features = shape

    def torchao(x: Tensor, weight: Tensor) -> Tensor:
        return _torchao_linear()(x, weight)

    return Operation(
        # 0.02 is a usual deviation of initial weights.
        inputs=[Normal((rows, width)), Normal((features, width), deviation=0.02)],
        ours=kernels.float8_linear.float8_linear,
        builtin=F.linear,
        torchao=torchao,
        forward_cost=kernels.float8_linear.cost(shape, dtype),
        backward_cost=kernels.float8_linear.cost(shape, dtype, backward=True),
        compute_bound=True,
        tolerance=0.1,  # fp8 rounds every factor to three bits, gradients to two
    )


def linear_gelu_dropout(shape: Shape, dtype: torch.dtype) -> Operation:
    """Dropout with probability 0.1 of GeLU of a linear layer with a bias."""
    import kernels.dropout
    import kernels.matmul

    rows, width, features = shape

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return kernels.dropout.linear_gelu_dropout(x, weight, bias, 0.1)

    def naive(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = x @ weight.T
        hidden = reference.gelu(product + bias)
        # The naive form draws its own mask, so its results are random as well.
        kept = torch.rand_like(hidden) >= 0.1
        return hidden * kept / 0.9

    def builtin(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, weight, bias), approximate="tanh")
        return F.dropout(hidden, 0.1)

    def cost(backward: bool) -> Cost:
        # The part after the matmul reads its result and writes another one, which a fused kernel
        # avoids.
        after = kernels.dropout.cost((rows, features), dtype, gelu=True, backward=backward)
        return kernels.matmul.cost(shape, dtype, backward=backward) + after

    return Operation(
        inputs=[Normal((rows, width)), Normal((features, width)), Normal((features,))],
        ours=ours,
        naive=naive,
        builtin=builtin,
        forward_cost=cost(backward=False),
        backward_cost=cost(backward=True),
        compute_bound=True,
        random=True,
    )


# Losses


def cross_entropy(shape: Shape, dtype: torch.dtype) -> Operation:
    """Mean cross-entropy of logits (N, V) and N targets."""
    import kernels.cross_entropy

    rows, vocabulary = shape

    def builtin(logits: Tensor, targets: Tensor) -> Tensor:
        # Losses in bf16 would lose digits, so torch's users widen the logits first.
        return F.cross_entropy(logits.float(), targets)

    return Operation(
        inputs=[Normal(shape), ClassIndices(rows, vocabulary)],
        ours=kernels.cross_entropy.cross_entropy,
        naive=reference.cross_entropy,
        builtin=builtin,
        liger=liger("cross_entropy"),
        quack=quack_cross_entropy,
        forward_cost=kernels.cross_entropy.cost(shape, dtype),
        backward_cost=kernels.cross_entropy.cost(shape, dtype, backward=True),
        is_loss=True,
    )


def linear_cross_entropy(shape: Shape, dtype: torch.dtype) -> Operation:
    """Mean cross-entropy of x (N, D) times a head (V, D), without storing all logits."""
    import kernels.linear_cross_entropy

    rows, width, vocabulary = shape

    def builtin(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T).float(), targets)

    return Operation(
        inputs=[
            Normal((rows, width)),
            Normal((vocabulary, width), deviation=0.02),
            ClassIndices(rows, vocabulary),
        ],
        ours=kernels.linear_cross_entropy.linear_cross_entropy,
        builtin=builtin,
        liger=liger("fused_linear_cross_entropy"),
        cce=cut_cross_entropy,
        # Ours computes the gradients in the forward pass, so the first cost is that of both.
        forward_cost=kernels.linear_cross_entropy.cost(shape, dtype),
        # A cost of zero adds nothing where the two directions are summed.
        backward_cost=Cost(0, 0),
        is_loss=True,
        compute_bound=True,
        # In float64 the logits of the full size do not fit.
        exact_dtype=torch.float32 if math.prod(shape) > 10**9 else torch.float64,
    )


# Peers from other packages, imported when they are called: a missing one is a row that says so.


def liger(name: str, *arguments: Any) -> Function:
    """Return Liger Kernel's function `name`.

    Args:
        name: name without the prefix `liger_`.
        arguments: what it takes after the inputs.
    """

    def run(*inputs: Tensor) -> Any:
        from liger_kernel.transformers import functional

        # The function is looked up in the call, so that a version of Liger without it is a row that
        # says so.
        function = getattr(functional, f"liger_{name}")
        return first(function(*inputs, *arguments))

    return run


@functools.cache
def _torchao_linear() -> Function:
    """Return torchao's linear layer in fp8, by its default recipe and compiled, as its users do."""
    from torchao.float8 import convert_to_float8_training

    # The layer's own weight is replaced at each call, so its size does not matter.
    layer = convert_to_float8_training(torch.nn.Linear(1, 1, bias=False))

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        # `functional_call` puts the case's own weight into the layer, so that it gets a gradient.
        return torch.func.functional_call(layer, {"weight": weight}, x)

    return torch.compile(linear)


def quack_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return QuACK's RMSNorm."""
    import quack

    return quack.rmsnorm(x, weight, eps=1e-5)


def quack_softmax(x: Tensor) -> Tensor:
    """Return QuACK's softmax."""
    import quack

    return quack.softmax(x)


def quack_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return QuACK's mean cross-entropy."""
    import quack

    return quack.cross_entropy(logits, targets)


def cut_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return Cut Cross-Entropy's mean loss."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, weight, targets)


def is_installed(variant: str) -> bool:
    """Return whether the package of an optional peer is installed. It is not imported."""
    return importlib.util.find_spec(MODULES[variant]) is not None


# How a function of the inputs is run, in each direction


def with_gradients(inputs: list[Tensor]) -> list[Tensor]:
    """Return copies of the inputs. Those of floating point require gradients."""
    # A peer may write into its inputs, so each one gets copies.
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs that need gradients."""
    return [t for t in inputs if t.requires_grad]


def first(out: Any) -> Tensor:
    """Return the result, or the first of several."""
    return out[0] if isinstance(out, tuple) else out


def runner(
    function: Function, inputs: list[Tensor], direction: str, upstream: Tensor
) -> Callable[[], Any]:
    """Return the function to time.

    It is the forward without gradients, the backward of a forward made now, or both.
    """
    without_gradients = [t.detach() for t in inputs]
    needed = leaves(inputs)

    def forward() -> Any:
        # Of inputs that need no gradient, so that nothing is saved for a backward that never comes.
        return function(*without_gradients)

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(first(function(*inputs)), needed, upstream)

    if direction == "fwd":
        return forward
    if direction == "both":
        return forward_and_backward
    # The forward runs once here, outside of the timed function.
    out = first(function(*inputs))
    if not out.requires_grad:
        raise ValueError(NO_BACKWARD)

    def backward() -> tuple[Tensor, ...]:
        # The graph is kept, because the same backward is timed again and again.
        return torch.autograd.grad(out, needed, upstream, retain_graph=True)

    return backward


def upstream_of(out: Tensor, direction: str) -> Tensor:
    """Return the gradient of a result: random, or ones as `loss.backward()` passes."""
    if direction == "both":
        # Losses are timed in both directions, and the gradient of a loss itself is 1.
        return torch.ones_like(out)
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
