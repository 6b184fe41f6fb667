"""Whether an optimizer works element by element: tried out on small tensors, because neither name nor class says it.

A strategy that shards parameters gives each rank's optimizer a part of them. That is right if the update of every
element depends on that element's gradients and state alone (SGD, Adam, AdamW). An optimizer that looks at a whole
tensor, at its rows, or at all tensors together (Muon, Adafactor, LAMB, L-BFGS, a norm that is clipped inside `step`)
gives another result on parts, without an error.

So a tensor is stepped whole, and in parts by one optimizer each, as ranks do; then the results are compared. What
begins only after more than `STEPS` steps, or above the size of these tensors, is not seen.
"""

import inspect
import math
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.parallel.base import LocalOptimizer, options_of

STEPS = 3
LR = 0.01  # where the optimizer's is zero, as at the start of a warm-up
VECTOR, MATRIX = (150,), (130, 136)  # past 128, below which some optimizers treat a matrix like a vector
# Parts may differ from the whole by this share of the largest update, and by rounding. On a CPU torch's element-wise
# optimizers do not differ by a bit; Adafactor does by 0.4, Muon by 0.8 and L-BFGS by 3 of the largest update.
TOLERANCE, ROUNDING = 1e-3, 1e-6

Make = Callable[[nn.Parameter], Optimizer]
# Where tensors are cut: between rows, between columns, or (None) within a row of the flattened elements.
RUNS, ROWS, COLUMNS = None, 0, 1


class CannotTry(Exception):
    """An optimizer could not be rebuilt, or could not step even a whole tensor; the message says why."""


def is_elementwise(optimizer_cls: type[Optimizer], options: dict[str, Any], device: torch.device) -> bool:
    """Whether stepping parts of flattened tensors gives the same result as stepping whole vectors and matrices.

    Args:
        optimizer_cls, options: as `optimizer_cls(parameters, **options)`; one that raises is not element-wise.
        device: where to try it out.
    """
    try:
        return parts_equal_whole(
            lambda parameter: optimizer_cls([parameter], **options),
            device,
            [(VECTOR, RUNS), (MATRIX, RUNS)],
        )
    except CannotTry:
        return False


# How many groups an optimizer had when it was tried out.
_checked: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would give another result on a rank's rows of matrices than on whole matrices.

    Tried once for each optimizer, and again when a group has been added, with the options of every group that holds a
    matrix: on an optimizer like this one, which shares neither state nor parameters with it. One that works row by
    row is refused too. One that cannot be tried gets a UserWarning.

    Raises:
        ValueError: it is not element-wise, or it shards optimizer states itself.
    """
    if _checked.get(optimizer) == len(optimizer.param_groups):
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, LocalOptimizer):
        raise ValueError(
            f"{name} divides whole parameters among the ranks, and these are sharded already: give the wrapper's "
            "parameters to the optimizer itself"
        )
    distinct: dict[str, tuple[dict[str, Any], torch.device]] = {}
    for group in optimizer.param_groups:
        matrix = next((parameter for parameter in group["params"] if parameter.ndim >= 2), None)
        if matrix is not None:
            options = options_of(group)
            key = {k: v for k, v in options.items() if k not in ("lr", "initial_lr", "param_names")}
            distinct.setdefault(repr((key, matrix.device)), (options, matrix.device))
    for options, device in distinct.values():
        try:
            elementwise = _try_out_like(optimizer, options, device)
        except CannotTry as reason:
            warnings.warn(
                f"{name} could not be tried out ({reason}): it is right only if it works element by element, because "
                "it steps this rank's rows of matrices",
                stacklevel=2,
            )
            continue
        if not elementwise:
            raise ValueError(
                f"{name} is not element-wise: on this rank's rows of a matrix it gives another result than on the "
                "whole; use SGD, Adam, AdamW or another optimizer that treats every element by itself, or keep "
                "parameters whole: a data-parallel wrapper with ShardedOptimizer"
            )
    _checked[optimizer] = len(optimizer.param_groups)


def parts_equal_whole(
    make: Make, device: torch.device, trials: Iterable[tuple[tuple[int, ...], int | None]]
) -> bool:
    """Whether parts, each stepped by an optimizer of its own, end where the whole tensor does.

    Args:
        make: an optimizer of one given parameter, with no state yet.
        trials: shapes of tensors, and where to cut each into parts.

    Raises:
        CannotTry: `make` fails, or the whole tensor cannot be stepped or does not move.
    """
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for shape, cut in trials:
            start = _waves(shape, 0.0, device)
            start.view(-1)[::3] = 0  # where rounding is small even beside the smallest update
            gradients = [_waves(shape, 1.0 + step, device) for step in range(STEPS)]
            try:
                whole = _stepped(make, start, gradients)
            except Exception as error:
                raise CannotTry(f"{type(error).__name__}: {error}") from error
            if not whole.isfinite().all() or torch.equal(whole, start):
                raise CannotTry("its steps leave a parameter unchanged, or not finite")
            parts = [_cut(tensor, cut) for tensor in (whole, start, *gradients)]
            for expected, begin, *theirs in zip(*parts, strict=True):
                try:
                    part = _stepped(make, begin, theirs)
                except Exception:
                    return False  # it takes whole tensors only
                if not _alike(part, expected, begin):
                    return False
    return True


def _stepped(make: Make, start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """The parameter's values after a step with each gradient."""
    parameter = nn.Parameter(start.clone(memory_format=torch.contiguous_format))
    optimizer = make(parameter)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"] = torch.where(group["lr"] == 0, LR, group["lr"])
        elif group.get("lr") == 0:
            group["lr"] = LR
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's wrapper, which calls hooks that are meant for real steps
        step = step.__wrapped__
    required = [p for p in inspect.signature(step).parameters.values() if p.default is p.empty and p.kind < 2]
    closure = [lambda: torch.ones((), device=start.device)] if len(required) > 1 else []
    for gradient in gradients:
        parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        step(optimizer, *closure)
    return parameter.detach()


def _alike(part: Tensor, expected: Tensor, start: Tensor) -> bool:
    """Where they started from zero rounding is small even beside the smallest update, so these are seen apart."""
    for chosen in (start == 0, start != 0):
        difference = (part - expected)[chosen].abs().max()
        moved, size = (expected - start)[chosen].abs().max(), start[chosen].abs().max()
        if not difference <= TOLERANCE * moved + ROUNDING * size:
            return False
    return True


def _waves(shape: tuple[int, ...], phase: float, device: torch.device) -> Tensor:
    """Of both signs, larger towards the ends of all dimensions, no two rows or columns alike: `(*shape)` in fp32."""
    numbers = torch.arange(math.prod(shape), dtype=torch.float64, device=device)
    values = torch.sin(0.37 * numbers**1.5 + phase).view(shape)
    for dim, size in enumerate(shape):
        growth = torch.linspace(1.0, 4.0, size, dtype=torch.float64, device=device)
        values = values * growth.view(-1, *(1,) * (len(shape) - dim - 1))
    return values.float()


def _cut(tensor: Tensor, dim: int | None) -> Sequence[Tensor]:
    """In two, see `RUNS`."""
    if dim is None:
        return tensor.view(-1).tensor_split((tensor.numel() * 2 // 5 + 1,))
    return tensor.tensor_split((50 + 10 * dim,), dim)


# -- an optimizer like a given one ---------------------------------------------------------------------------


def _try_out_like(optimizer: Optimizer, options: dict[str, Any], device: torch.device) -> bool:
    """Matrices by rows and by columns, on copies of the optimizer; where it cannot be copied, on new ones."""
    trials = [(MATRIX, ROWS), (MATRIX, COLUMNS)]
    for like in (_copied, _constructed):
        try:
            return parts_equal_whole(lambda parameter: like(optimizer, options, parameter), device, trials)  # noqa: B023
        except CannotTry as error:
            reason = error
    raise reason


def _copied(optimizer: Optimizer, options: dict[str, Any], parameter: nn.Parameter) -> Optimizer:
    """The optimizer's own attributes, without its state, its hooks, and what was put in the place of its `step`."""
    new = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            new.__dict__[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step"):
            new.__dict__[name] = _duplicate(value, optimizer, new)
    new.state = defaultdict(dict)
    new.param_groups = [_duplicate(options, optimizer, new) | {"params": [parameter]}]
    return new


def _constructed(optimizer: Optimizer, options: dict[str, Any], parameter: nn.Parameter) -> Optimizer:
    """By the constructor, with those of its arguments that groups, defaults or attributes of that name hold."""
    options = _duplicate(options, optimizer, optimizer)
    known = vars(optimizer) | optimizer.defaults | options
    _, *arguments = inspect.signature(type(optimizer)).parameters.values()
    given = {}
    for argument in arguments:
        value = known.get(argument.name, known.get(f"_{argument.name}", argument.empty))
        if value is not argument.empty and argument.kind not in (
            argument.VAR_POSITIONAL,
            argument.VAR_KEYWORD,
        ):
            given[argument.name] = _duplicate(value, optimizer, optimizer)
    return type(optimizer)([options | {"params": [parameter]}], **given)


_SHAREABLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, Enum, torch.dtype, torch.device),
    *(types.BuiltinFunctionType, types.ModuleType),
)


def _duplicate(value: Any, optimizer: Optimizer, new: Optimizer) -> Any:
    """A value that `new` may change without `optimizer` noticing.

    Raises:
        CannotTry: it holds tensors of several elements, or something that could be bound to `optimizer`.
    """
    if isinstance(value, _SHAREABLE) or (isinstance(value, types.FunctionType) and value.__closure__ is None):
        return value
    if isinstance(value, types.MethodType) and value.__self__ is optimizer:
        return types.MethodType(value.__func__, new)
    if isinstance(value, Tensor) and value.numel() <= 1 and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if isinstance(value, dict):
        same = copy(value)
        same.update({_duplicate(k, optimizer, new): _duplicate(v, optimizer, new) for k, v in value.items()})
        return same
    if type(value) in (list, tuple, set, frozenset, deque):
        return type(value)(_duplicate(item, optimizer, new) for item in value)
    raise CannotTry(f"it holds a {type(value).__name__} that cannot be copied")
