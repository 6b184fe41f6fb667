"""AdamW over many parameters in one launch.

Mathematics, per element, at step t (Loshchilov & Hutter 2019, Algorithm 2):
    p ← p·(1 − lr·λ)
    m ← β₁·m + (1 − β₁)·g
    v ← β₂·v + (1 − β₂)·g²
    p ← p − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + eps)

Shapes: any list of parameters p with their gradients g, and moments m and v. Parameters and
gradients are fp32, fp16 or bf16. Moments and arithmetic are fp32.
Bytes: 7 tensors, since p, m and v are read and written and g is read. The plain form takes a dozen
passes. FLOPs: about 15 per element.

How it works. One grid covers all parameters, so that a model of a thousand small tensors costs one
launch instead of thousands. A table of addresses and sizes is in device memory. Each program looks
up which BLOCK elements of which parameter it owns.

Precision. fp32 holds few digits of 1 − β for a β close to 1. So 1 − β is computed on the host in
double precision, and the kernel moves the average from the old value by (1 − β)·(new − old), which
does not contain β. For β up to 0.5, it moves from the new value by β·(old − new) for the same
reason. Squares beyond the range of fp32 count as its largest number.
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

BLOCK = 2048  # elements per program
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of m and v in an optimizer's state
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _moving_average(old, new, weight):
    """Return β·old + (1 − β)·new.

    weight is 1 − β, by which old moves towards new, or −β, by which new moves back towards old.
    `factors` chooses the one that keeps more digits.
    """
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
    """Update the first BLOCK elements at the pointers, or with MASKED the first `left` elements.

    The numbers from `decay` to `root_correction2` are those that `factors` returns.
    """
    offsets = tl.arange(0, BLOCK)
    # The compiler knows that offsets ≥ 0 always holds, so loads without MASKED stay 16 bytes wide.
    inside = offsets < left if MASKED else offsets >= 0
    # Elements that are cut off are undefined here. They are computed with and never stored.
    p = tl.load(p_ptr + offsets, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=inside)
    v = tl.load(v_ptr + offsets, mask=inside)
    # The decay is decoupled: it changes p itself and never enters the moments. That is the W of
    # AdamW.
    p = p - p * decay
    m = _moving_average(m, g, weight1)
    # g² may overflow. With v = ∞ the difference ∞ − ∞ would be NaN from then on.
    v = _moving_average(tl.minimum(v, LARGEST), tl.minimum(g * g, LARGEST), weight2)
    # rate has the factor 1/(1 − β₁ᵗ) and root_correction2 is √(1 − β₂ᵗ): both moments start at 0
    # and would be too small in the first steps.
    p = p - rate * (m / (tl.sqrt(v) / root_correction2 + eps))
    # p is rounded to its own dtype. The moments stay fp32: a bf16 number cannot change by 0.1 % of
    # itself, which is 1 − β₂ for β₂ = 0.999.
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
    """Update BLOCK elements of one parameter per program.

    addresses: (P, 4) int64, for each of P parameters the addresses of p, g, m and v.
    sizes: (P) int64, number of elements of each parameter.
    owner: for each program the index of its parameter.
    first: for each program the first of its elements.
    PARAMETER, GRADIENT: element types, which must be the same for all parameters.
    ALIGNMENT: number of bytes that divides all addresses.
    """
    owner = tl.load(owner_ptr + tl.program_id(0)).to(tl.int64)
    first = tl.load(first_ptr + tl.program_id(0))
    # Elements from this program's first one to the end of the parameter.
    left = tl.load(sizes_ptr + owner) - first
    # The table holds plain integers: make them pointers again. The compiler cannot know their
    # alignment, and loads 16 bytes at a time only if `multiple_of` promises it.
    addresses_ptr += owner * 4
    p_ptr = tl.load(addresses_ptr).to(tl.pointer_type(PARAMETER)) + first
    p_ptr = tl.multiple_of(p_ptr, ALIGNMENT)
    g_ptr = tl.load(addresses_ptr + 1).to(tl.pointer_type(GRADIENT)) + first
    g_ptr = tl.multiple_of(g_ptr, ALIGNMENT)
    m_ptr = tl.load(addresses_ptr + 2).to(tl.pointer_type(tl.float32)) + first
    m_ptr = tl.multiple_of(m_ptr, ALIGNMENT)
    v_ptr = tl.load(addresses_ptr + 3).to(tl.pointer_type(tl.float32)) + first
    v_ptr = tl.multiple_of(v_ptr, ALIGNMENT)
    # Only the last program of a parameter has fewer than BLOCK elements and pays for a mask.
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
            False,  # MASKED
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
            True,  # MASKED
            BLOCK,
        )


def _tables(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables that say which elements each program owns.

    Args:
        sizes: number of elements of each of P parameters.
        device: device of the parameters.

    Returns:
        sizes: (P) int64.
        owner: int32, for each program the index of its parameter.
        first: int64, for each program the first of its elements.
    """
    # For example, sizes 5000 and 100 with BLOCK = 2048: counts are 3 and 1, owner is 0 0 0 1, and
    # first is 0 2048 4096 0.
    counts = torch.tensor([cdiv(size, BLOCK) for size in sizes])  # programs per parameter
    owner = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    # The number of a program minus the number of its parameter's first program, in blocks.
    first_program = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    first = (torch.arange(len(owner)) - first_program) * BLOCK
    return torch.tensor(sizes).to(device), owner.to(device), first.to(device)


class Addresses:
    """Table of addresses in device memory, copied there again only when a tensor has moved.

    Attributes:
        aligned: whether all addresses in the table are multiples of 16 bytes.
    """

    def __init__(self) -> None:
        self.aligned = False
        self._rows: list[int] = []
        self._table = torch.empty(0)

    def of(self, columns: list[list[Tensor]]) -> Tensor:
        """Return the addresses of P parameters, gradients and two moments as a (P, 4) int64 tensor.

        Args:
            columns: four lists of P tensors: parameters, gradients, first and second moments.
        """
        # Gradients are often new tensors in every step. The allocator then gives them the same
        # addresses in most steps, and the table stays valid.
        rows = [tensor.data_ptr() for column in columns for tensor in column]
        device = columns[0][0].device
        if rows != self._rows or device != self._table.device:
            # Transposed, so that the four addresses that a program reads are next to each other.
            table = torch.tensor(rows, dtype=torch.int64).view(4, -1).T.contiguous()
            if device.type == "cuda":
                # From pageable memory the copy would make the host wait.
                table = table.pin_memory()
            self._rows = rows
            self._table = table.to(device, non_blocking=True)
            self.aligned = all(address % 16 == 0 for address in rows)
        return self._table


def factors(
    step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> list[float]:
    """Return the kernel's numbers from `decay` to `root_correction2`.

    They are computed in double precision. The kernel receives them as fp32.

    Args:
        step: number of this step, from 1.
        lr: learning rate.
        betas: β₁ and β₂.
        eps: number added to the root of the second moment.
        weight_decay: λ.
    """
    lr = float(lr)
    first = float(betas[0])
    second = float(betas[1])
    # In the order of the kernel's arguments: decay, weight1, weight2, eps, rate, root_correction2.
    return [
        lr * float(weight_decay),
        _average_weight(first),
        _average_weight(second),
        float(eps),
        lr / (1 - first**step),
        math.sqrt(1 - second**step),
    ]


def _average_weight(beta: float) -> float:
    """Return the weight that `_moving_average` takes: 1 − β, or −β for β up to 0.5."""
    return 1 - beta if beta > 0.5 else -beta


def launch_adamw(
    columns: list[list[Tensor]],
    addresses: Addresses,
    step: int,
    tables: dict,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update parameters and moments in place.

    Args:
        columns: four lists: parameters, gradients, first and second moments. All tensors are on one
            device, contiguous and not empty. Parameters have one dtype, and so have gradients.
        addresses: table of addresses, kept from step to step.
        step: number of this step, from 1.
        tables: cache of what `_tables` returns, by sizes and device.
        lr: as for `factors`.
        betas: as for `factors`.
        eps: as for `factors`.
        weight_decay: as for `factors`.
    """
    parameters = columns[0]
    gradients = columns[1]
    key = tuple(p.numel() for p in parameters), parameters[0].device
    if key not in tables:
        tables[key] = _tables(*key)
    sizes, owner, first = tables[key]
    _dispatch.launch(
        adamw_kernel,
        (len(owner),),
        addresses.of(columns),
        sizes,
        owner,
        first,
        *factors(step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay),
        PARAMETER=_TYPES[parameters[0].dtype],
        GRADIENT=_TYPES[gradients[0].dtype],
        # Views of a flat buffer may begin anywhere. Then every load is one element wide.
        ALIGNMENT=16 if addresses.aligned else 1,
        BLOCK=BLOCK,
        # 8 elements per thread: two 16-byte loads of fp32, or one of 16 bits.
        num_warps=8,
    )


def _check_options(group: dict) -> None:
    """Raise unless lr, betas, eps and weight_decay of a parameter group are numbers in range.

    Raises:
        TypeError: an option is not a number.
        ValueError: an option is out of range.
    """
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}; allowed: two numbers from 0 to below 1")
    for name in ("lr", "eps", "weight_decay"):
        _check_number(name, group[name], "a Python number", end=math.inf)
    for beta in betas:
        _check_number("betas", beta, "a Python number each", end=1)


def _check_number(name: str, value: object, allowed: str, end: float) -> None:
    """Raise TypeError or ValueError unless value is a number from 0 to below end."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; allowed: {allowed}")
    if not 0 <= value < end:
        raise ValueError(f"{name} is {value!r}; allowed: 0 or a number above it and below {end}")


class AdamW(torch.optim.Optimizer):
    """AdamW in one launch per set of parameters with equal group, dtypes and step.

    The result equals that of `torch.optim.AdamW` up to rounding. The state has torch's names
    (`step`, `exp_avg`, `exp_avg_sq`), and moments are always fp32. Where Triton cannot run, the
    step is computed in plain torch. Step number and options are numbers on the host: a CUDA graph
    would repeat those of its capture.

    Args:
        params: parameters or parameter groups in fp32, fp16 or bf16, contiguous.
        lr: learning rate, also as an option of a group.
        betas: β₁ and β₂, each from 0 to below 1, also as an option of a group.
        eps: number added to the root of the second moment, also as an option of a group.
        weight_decay: λ, also as an option of a group.

    Raises:
        TypeError: an option is not a number but, for example, a tensor.
        ValueError: an option is out of range. From `step`: a gradient is sparse, or a parameter has
            another dtype.
        RuntimeError: from `step`, while a CUDA graph is being captured.
    """

    elementwise = True  # stepping parts of a tensor gives the same as stepping the whole tensor

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._forget_tables()

    def add_param_group(self, param_group: dict) -> None:
        """Add a parameter group, after a check of its options, which torch does not make.

        Raises:
            TypeError, ValueError: as for the class.
        """
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient.

        Args:
            closure: function that computes the loss and the gradients, or None.

        Returns:
            The closure's result, or None without a closure.

        Raises:
            TypeError, ValueError, RuntimeError: as for the class.
        """
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
            _check_options(group)
            # Empty parameters are skipped: they have nothing to update and no program.
            parameters = [p for p in group["params"] if p.grad is not None and p.numel()]
            states = [self._state_of(p) for p in parameters]
            if states:
                torch._foreach_add_([state["step"] for state in states], 1)
            # One launch needs one device, one pair of dtypes, and one step number for the bias
            # corrections. A parameter whose gradient came later counts fewer steps.
            batches: dict = defaultdict(list)
            for p, state in zip(parameters, states, strict=True):
                key = (p.device, p.dtype, p.grad.dtype, int(state["step"]))
                batches[key].append((p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
            for (device, dtype, gradient_dtype, step), rows in batches.items():
                # From one row (p, g, m, v) per parameter to four lists of tensors.
                columns = [list(column) for column in zip(*rows, strict=True)]
                addresses = self._addresses[number, device, dtype, gradient_dtype]
                self._update(columns, step, group, addresses)
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state. Moments stay fp32, where torch rounds them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        # torch matches parameters by their order over all groups, and so does this.
        saved_keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved_keys, parameters, strict=True):
            if key not in state_dict["state"]:
                continue
            for name in MOMENTS:
                saved = state_dict["state"][key][name]
                self.state[p][name] = saved.to(p.device, torch.float32, copy=True)

    def __setstate__(self, state: dict) -> None:
        """Restore a copy or a pickle, which holds only what torch's optimizers hold."""
        super().__setstate__(state)
        self._forget_tables()

    def _forget_tables(self) -> None:
        """Drop the tables that stay on the device from step to step. `step` makes missing ones."""
        self._tables: dict = {}
        self._addresses: dict = defaultdict(Addresses)

    def _state_of(self, p: Tensor) -> dict:
        """Return a parameter's state, made at its first step.

        Raises:
            ValueError: the parameter or its gradient has another dtype, or the gradient is sparse.
        """
        if p.dtype not in DTYPES or p.grad.dtype not in DTYPES or p.grad.is_sparse:
            raise ValueError(
                f"a parameter of {p.dtype} with a gradient of {p.grad.dtype}, {p.grad.layout}; "
                "allowed: dense float32, float16, bfloat16"
            )
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        for name in MOMENTS:  # a state set from outside may have another dtype
            if state[name].dtype != torch.float32 or not state[name].is_contiguous():
                state[name] = state[name].to(torch.float32).contiguous()
        return state

    def _update(
        self, columns: list[list[Tensor]], step: int, group: dict, addresses: Addresses
    ) -> None:
        """Step parameters of one group, device, pair of dtypes and step number.

        Args:
            columns: as for `launch_adamw`, except that tensors need not be contiguous.
            step: number of this step, from 1.
            group: the parameter group, for its options.
            addresses: table of addresses of these parameters.
        """
        parameters = columns[0]
        lr = group["lr"]
        betas = group["betas"]
        eps = group["eps"]
        weight_decay = group["weight_decay"]
        # The kernel reads and writes memory as it is. It can take a copy of a gradient that is not
        # contiguous or has torch's negative bit, but not of a parameter, which it must change.
        # Elsewhere, for example on a CPU, the loop below steps one parameter after the other in
        # plain torch.
        if _dispatch.runs_triton(parameters[0]) and all(
            p.is_contiguous() and not p.is_neg() for p in parameters
        ):
            columns[1] = [gradient.resolve_neg().contiguous() for gradient in columns[1]]
            launch_adamw(
                columns,
                addresses,
                step,
                self._tables,
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
            )
            return
        for p, gradient, first, second in zip(*columns, strict=True):
            reference.adamw_(
                p,
                gradient,
                first,
                second,
                step,
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
            )


def cost(count: int, dtype: torch.dtype, gradient_dtype: torch.dtype | None = None) -> Cost:
    """Return the least work of one step.

    Args:
        count: number of elements of all parameters.
        dtype: dtype of the parameters.
        gradient_dtype: dtype of the gradients, or None if it is that of the parameters.
    """
    if gradient_dtype is None:
        gradient_dtype = dtype
    moment_bytes = 4 * 4  # two fp32 moments, read and written
    bytes_per_element = 2 * dtype.itemsize + gradient_dtype.itemsize + moment_bytes
    return Cost(15 * count, count * bytes_per_element)
