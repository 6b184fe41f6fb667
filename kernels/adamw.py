"""AdamW over many parameters in one launch.

Math, per element (Loshchilov & Hutter 2019, Algorithm 2), t the step:
    p ← p·(1 − lr·λ),  m ← m + (g − m)(1 − β₁),  v ← β₂·v + (1 − β₂)·g²,
    p ← p − (lr/(1 − β₁ᵗ))·m / (√v/√(1 − β₂ᵗ) + eps).

Shapes: any list of parameters with their gradients and two fp32 moments. Bytes: 7 tensors (p, m, v
read and written, g read) instead of the dozen passes of the plain form. FLOPs: about 15 per
element. Nothing is saved. Arithmetic and moments in fp32, parameters and gradients fp32, fp16 or
bf16. Of a β close to 1, fp32 keeps few digits of 1 − β: it is formed on the host, and m moves by (1
− β)(g − m), where β does not appear. (Of a β up to 0.5 the like is true with g in the place of m.)
Squares beyond fp32 count as its largest number.

One grid covers all parameters: a table of addresses and sizes lies in device memory, and each
program looks up which BLOCK elements of which parameter are its own. So a model of a thousand small
tensors costs one launch instead of thousands.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from numbers import Real

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import cdiv, tl, triton
from ._rows import DTYPES, store_rounded
from .cost import Cost

BLOCK = 2048  # elements of a program
MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _moving_average(old, new, weight):
    """β·old + (1 − β)·new: from old where weight is 1 − β, from new where it is −β, so that neither cancels."""
    return tl.where(weight > 0, old, new) + (new - old) * weight


@triton.jit
def _update_block(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    left,
    decay,
    weight1,
    weight2,
    eps,
    rate,
    root_correction2,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first BLOCK elements at the pointers, or `left` of them with MASKED."""
    offsets = tl.arange(0, BLOCK)
    # the latter is known to hold, and loads stay 16 bytes wide
    inside = offsets < left if MASKED else offsets >= 0
    p = tl.load(p_ptr + offsets, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=inside)
    v = tl.load(v_ptr + offsets, mask=inside)
    p = p - p * decay
    m = _moving_average(m, g, weight1)
    # ∞ − ∞ would be NaN
    v = _moving_average(tl.minimum(v, LARGEST), tl.minimum(g * g, LARGEST), weight2)
    p = p - rate * (m / (tl.sqrt(v) / root_correction2 + eps))
    store_rounded(p_ptr + offsets, p, inside)
    tl.store(m_ptr + offsets, m, mask=inside)
    tl.store(v_ptr + offsets, v, mask=inside)


@triton.jit
def adamw_kernel(
    addresses_ptr,
    sizes_ptr,
    owner_ptr,
    first_ptr,
    decay,
    weight1,
    weight2,
    eps,
    rate,
    root_correction2,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of the parameter that this program owns; addresses is (parameters, 4): p, g, m, v."""
    owner = tl.load(owner_ptr + tl.program_id(0)).to(tl.int64)
    first = tl.load(first_ptr + tl.program_id(0))
    left = tl.load(sizes_ptr + owner) - first
    addresses_ptr += owner * 4
    # A number from memory says nothing about its divisors: loads of 16 bytes need the promise.
    p_ptr = tl.multiple_of(tl.load(addresses_ptr).to(tl.pointer_type(PARAMETER)) + first, ALIGNMENT)
    g_ptr = tl.multiple_of(
        tl.load(addresses_ptr + 1).to(tl.pointer_type(GRADIENT)) + first, ALIGNMENT
    )
    m_ptr = tl.multiple_of(
        tl.load(addresses_ptr + 2).to(tl.pointer_type(tl.float32)) + first, ALIGNMENT
    )
    v_ptr = tl.multiple_of(
        tl.load(addresses_ptr + 3).to(tl.pointer_type(tl.float32)) + first, ALIGNMENT
    )
    if left >= BLOCK:
        _update_block(
            p_ptr,
            g_ptr,
            m_ptr,
            v_ptr,
            left,
            decay,
            weight1,
            weight2,
            eps,
            rate,
            root_correction2,
            False,
            BLOCK,
        )
    else:
        _update_block(
            p_ptr,
            g_ptr,
            m_ptr,
            v_ptr,
            left,
            decay,
            weight1,
            weight2,
            eps,
            rate,
            root_correction2,
            True,
            BLOCK,
        )


def _tables(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """sizes (P), and per program its parameter and its first element."""
    counts = torch.tensor([cdiv(size, BLOCK) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    start = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    first = (torch.arange(len(owner)) - start) * BLOCK
    return torch.tensor(sizes).to(device), owner.to(device), first.to(device)


class Addresses:
    """The kernel's table of addresses in device memory, sent again only when a tensor has moved."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._table, self.aligned = torch.empty(0), False

    def of(self, columns: list[list[Tensor]]) -> Tensor:
        """(P, 4) int64: the addresses of P parameters, gradients and moments; `aligned` says if to 16 bytes."""
        rows = [t.data_ptr() for column in columns for t in column]
        device = columns[0][0].device
        if rows != self._rows or device != self._table.device:
            table = torch.tensor(rows, dtype=torch.int64).view(4, -1).T.contiguous()
            table = table.pin_memory() if device.type == "cuda" else table
            self._rows, self._table = rows, table.to(device, non_blocking=True)
            self.aligned = all(address % 16 == 0 for address in rows)
        return self._table


def factors(
    step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> list[float]:
    """What the kernel multiplies by, from `decay` to `root_correction2`, in double precision; they are passed in fp32.

    step counts from 1; the rest are AdamW's options.
    """
    lr, first, second = map(float, (lr, *betas))
    weights = (1 - beta if beta > 0.5 else -beta for beta in (first, second))
    return [
        lr * float(weight_decay),
        *weights,
        float(eps),
        lr / (1 - first**step),
        math.sqrt(1 - second**step),
    ]


def launch_adamw(
    columns: list[list[Tensor]], addresses: Addresses, step: int, tables: dict, **options: float
) -> None:
    """Update parameters and moments in place.

    `columns` are the lists of parameters, gradients, first and second moments, all of one device
    and one pair of dtypes, contiguous, not empty; `tables` keeps what `_tables` makes; options as
    for `factors`.
    """
    parameters, gradients, *_ = columns
    key = tuple(p.numel() for p in parameters), parameters[0].device
    if key not in tables:
        tables[key] = _tables(*key)
    sizes, owner, begin = tables[key]
    _dispatch.launch(
        adamw_kernel,
        (len(owner),),
        addresses.of(columns),
        sizes,
        owner,
        begin,
        *factors(step, **options),
        PARAMETER=_TYPES[parameters[0].dtype],
        GRADIENT=_TYPES[gradients[0].dtype],
        ALIGNMENT=16 if addresses.aligned else 1,
        BLOCK=BLOCK,
        num_warps=8,
    )


def _check_options(options: dict) -> None:
    """Raise unless lr, betas, eps and weight_decay are numbers in their ranges."""
    betas = options["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}; allowed: two numbers from 0 to below 1")
    others = [(name, options[name], math.inf) for name in ("lr", "eps", "weight_decay")]
    for name, value, end in (*others, *(("betas", beta, 1) for beta in betas)):
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(
                f"{name} is {value!r}, a {type(value).__name__}; allowed: a Python number"
                + " each" * (name == "betas")
            )
        if not 0 <= value < end:
            raise ValueError(
                f"{name} is {value!r}; allowed: 0 or a number above it and below {end}"
            )


class AdamW(torch.optim.Optimizer):
    """AdamW in one launch per group of equal dtypes, equal to torch's to rounding.

    Args:
        params: parameters or parameter groups: fp32, fp16 or bf16, contiguous.
        lr, betas, eps, weight_decay: as for `torch.optim.AdamW`, numbers; also in a group.

    The state has torch's names (`step`, `exp_avg`, `exp_avg_sq`), with moments in fp32. Where
    Triton cannot run the plain form steps. Step number and options are numbers of the host: a CUDA
    graph would repeat those of its capture.

    Raises:
        TypeError: an option that is no number, such as a tensor.
        ValueError: an option out of range; from `step`, a sparse gradient or a parameter of another
            dtype.
        RuntimeError: from `step`, while a CUDA graph is being captured.
    """

    elementwise = True  # parts of a tensor are stepped as the whole is

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._keep_nothing()

    def add_param_group(self, param_group: dict) -> None:
        """As torch's, which does not look at the options: raises TypeError or ValueError for them."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "AdamW's step number and learning rate are numbers of the host, which a CUDA graph "
                "would repeat: step outside of the graph, or use torch.optim.AdamW(capturable=True)"
            )
        for number, group in enumerate(self.param_groups):
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            _check_options(options)
            rows = [
                (p, p.grad, self._state_of(p))
                for p in group["params"]
                if p.grad is not None and p.numel()
            ]
            if rows:
                torch._foreach_add_([state["step"] for _, _, state in rows], 1)
            alike: dict = defaultdict(list)
            for p, grad, state in rows:
                key = p.device, p.dtype, grad.dtype, int(state["step"])
                alike[key].append((p, grad, state["exp_avg"], state["exp_avg_sq"]))
            for (*types, step), four in alike.items():
                columns = [list(column) for column in zip(*four, strict=True)]
                self._update(columns, step, options, (number, *types))
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, which rounds moments to the parameter's dtype; here they stay in fp32."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, mine, strict=True):
            for name in MOMENTS if key in state_dict["state"] else ():
                self.state[p][name] = state_dict["state"][key][name].to(
                    p.device, torch.float32, copy=True
                )

    def __setstate__(self, state: dict) -> None:
        """For copies and pickles, which hold what torch's optimizers hold."""
        super().__setstate__(state)
        self._keep_nothing()

    def _keep_nothing(self) -> None:
        """Tables that lie on the device from step to step: made again when they are missing."""
        self._tables: dict = {}
        self._addresses: dict = defaultdict(Addresses)

    def _state_of(self, p: Tensor) -> dict:
        if p.dtype not in DTYPES or p.grad.dtype not in DTYPES or p.grad.is_sparse:
            raise ValueError(
                f"a parameter of {p.dtype} with a gradient of {p.grad.dtype}, {p.grad.layout}; allowed: "
                "dense float32, float16, bfloat16"
            )
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {
                name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name in MOMENTS
            }
        for name in MOMENTS:  # a state set from outside may have another dtype
            if state[name].dtype != torch.float32 or not state[name].is_contiguous():
                state[name] = state[name].to(torch.float32).contiguous()
        return state

    def _update(self, columns: list[list[Tensor]], step: int, options: dict, kind: tuple) -> None:
        """Step one kind of parameters: those of one group, device and pair of dtypes, at the same step."""
        parameters = columns[0]
        if _dispatch.runs_triton(parameters[0]) and all(
            p.is_contiguous() and not p.is_neg() for p in parameters
        ):
            columns[1] = [g.resolve_neg().contiguous() for g in columns[1]]
            launch_adamw(columns, self._addresses[kind], step, self._tables, **options)
            return
        for p, g, m, v in zip(*columns, strict=True):
            reference.adamw_(p, g, m, v, step, **options)


def cost(count: int, dtype: torch.dtype, gradient_dtype: torch.dtype | None = None) -> Cost:
    """Least FLOPs and bytes of one step over `count` elements."""
    per_element = 2 * dtype.itemsize + (gradient_dtype or dtype).itemsize + 4 * 4
    return Cost(15 * count, count * per_element)
