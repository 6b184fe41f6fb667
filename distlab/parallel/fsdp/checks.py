"""What FSDP refuses, with what to do instead."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.parallel.base import is_elementwise
from distlab.parallel.fsdp.flat_param import Entry, FlatParam, UnitPlan, is_called
from distlab.parallel.guards.module import the_device


def check_compute_dtype(dtype: Any) -> None:
    """Raises ValueError for what is neither None nor a floating-point `torch.dtype`."""
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ValueError(
            f"compute_dtype={dtype!r}: give a floating-point torch.dtype such as torch.bfloat16, or None"
        )


def check_still_frozen(params: Sequence[FlatParam]) -> None:
    """Raises ValueError for a shard that was frozen or unfrozen after wrapping, which its unit does not know."""
    for param in params:
        for entry, shard in zip(param.entries, param.shards, strict=True):
            if shard.requires_grad != param.trainable:
                raise ValueError(
                    f"requires_grad of '{entry.name}' changed after wrapping, which would not reach its unit: "
                    "close() this wrapper, change it, and wrap the module again"
                )


def refuse_replaced(owned: Iterable[tuple[str, nn.Module, str, nn.Parameter]]) -> None:
    """Raises RuntimeError for (name, module, attribute, parameter) where that attribute is another parameter now."""
    for name, module, attribute, parameter in owned:
        if module._parameters.get(attribute) is not parameter:
            raise RuntimeError(
                f"FSDP: '{name}' is another parameter than when the module was wrapped (functional_call, a layer "
                "tied or replaced), and forward would not compute with it: close() this wrapper, change the module and "
                "wrap it again; load_full_params() takes other values"
            )


def refuse_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises ValueError for one of these with a hook on its gradient, which is not autograd's to make."""
    for name, parameter in named:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"FSDP: a gradient hook on '{name}' never fires, as forward reads what is gathered of it: remove it, "
                "and see its `.grad` after finish_gradient_synchronization()"
            )


def find_device(
    entries: list[Entry], init_fn: Callable[[nn.Module], Any] | None, device: torch.device | str | None
) -> torch.device:
    """The one device of all parameters, or `device` for a module on meta.

    Raises:
        ValueError: several devices, a module on meta without `init_fn` and `device`, or these for another.
    """
    found = the_device([entry.parameter for entry in entries], "FSDP")
    if found.type == "meta":
        if init_fn is None or device is None:
            raise ValueError(
                "FSDP: the module lies on meta and has no values: give init_fn=… to make them, and device=…"
            )
        return torch.device(device)
    if init_fn is not None or device is not None:
        raise ValueError("FSDP: init_fn and device are for a module built on meta; this one has its values")
    return found


def refuse_uncallable(module: nn.Module) -> None:
    """Raises ValueError for a module without a forward, such as an `nn.ParameterList`: nothing would be gathered."""
    if not is_called(module):
        raise ValueError(
            f"FSDP: {type(module).__name__} has no forward, in which its parameters could be gathered: wrap the "
            "module whose forward reads them"
        )


def refuse_parameters(entries: list[Entry]) -> None:
    """What would be lost without a word when parameters are replaced by shards.

    Raises:
        ValueError: parameters that are shards already, that carry hooks, that a recurrent module keeps in a
            list of its own.
    """
    for entry in entries:
        parameter = entry.parameter
        if getattr(parameter, "made_by_fsdp", False):
            raise ValueError(f"FSDP: '{entry.name}' is wrapped already: call close() on that wrapper first")
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks:
            raise ValueError(
                f"FSDP: '{entry.name}' carries a gradient hook (of a data-parallel wrapper, perhaps), which would "
                "never fire again: remove it, or close() that wrapper, first"
            )
        if any(isinstance(owner, nn.RNNBase) for owner, _ in entry.owners):
            raise ValueError(
                f"FSDP: '{entry.name}' belongs to a torch.nn recurrent module, which computes with a list of "
                "parameters of its own; FSDP serves modules that use their attributes"
            )


def refuse_compiled(module: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """A unit inside a compiled graph would have its hooks traced once instead of run each time.

    Raises:
        ValueError: names the unit. A unit that is itself the result of `torch.compile` is fine.
    """
    for plan in plans:
        for path, outer in module.named_modules():
            around = outer is not plan.module and any(inner is plan.module for inner in outer.modules())
            compiled = "_orig_mod" in outer._modules and around  # what torch.compile returns
            in_place = outer._compiled_call_impl is not None and (around or outer is plan.module)
            if compiled or in_place:
                raise ValueError(
                    f"FSDP: unit '{plan.name}' lies inside the compiled module '{path}': compile the children of "
                    "the nn.ModuleList instead, model.blocks[i] = torch.compile(model.blocks[i]), and wrap then"
                )


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer of matrices, here this rank's rows, that is not known to be element-wise."""
    if is_elementwise(type(optimizer)):
        return
    if any(parameter.ndim >= 2 for group in optimizer.param_groups for parameter in group["params"]):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} is not known to be element-wise, and here it sees this rank's rows of matrices: write "
            f"`elementwise = True` into its class if every element's update depends on that element alone, else keep "
            "parameters whole: a data-parallel wrapper with ShardedOptimizer"
        )
