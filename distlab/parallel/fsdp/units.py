"""Which parameters are gathered together: one unit for each block of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from distlab.parallel.fsdp.entry import Entry


@dataclass
class UnitPlan:
    """A unit: the module whose forward needs these parameters gathered."""

    name: str
    module: nn.Module
    entries: list[Entry]


def plan_units(module: nn.Module, entries: Sequence[Entry]) -> list[UnitPlan]:
    """Group the sharded parameters into units, in registration order.

    A parameter below an `nn.ModuleList` belongs to the child of the outermost one; elsewhere to the
    module that owns it (to the outermost module that owns a matrix itself, if such modules are
    nested, because `nn.MultiheadAttention`, say, reads its child's weight without calling the
    child). Modules without a forward, such as `nn.ParameterList`, are never called: their
    parameters belong to the module around them. Parameters owned by the root, and those tied across
    units, form the root's unit, gathered for the whole forward.
    """
    sharded = [entry for entry in entries if entry.is_sharded]
    paths = {name: _walk(module, name) for entry in sharded for name in entry.names}
    owning = {id(steps[_last_called(steps)][1]) for steps in paths.values()}
    plans: dict[int, UnitPlan] = {}
    for entry in sharded:
        units = [_unit_of(paths[name], owning) for name in entry.names]
        together = len({id(unit) for _, unit in units}) == 1
        path, unit = units[0] if together else ("", module)
        plans.setdefault(id(unit), UnitPlan(path or "(root)", unit, [])).entries.append(entry)
    return list(plans.values())


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; containers such as `nn.ModuleList` and `nn.ParameterDict` have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _last_called(steps: Sequence[tuple[str, nn.Module]]) -> int:
    """The innermost module with a forward; the root if there is none."""
    return max((i for i, (_, module) in enumerate(steps) if is_called(module)), default=0)


def _unit_of(steps: Sequence[tuple[str, nn.Module]], owning: set[int]) -> tuple[str, nn.Module]:
    """(path, module) of the unit that holds a parameter, of the modules on the way to it."""
    below = next(
        (i + 1 for i, (_, m) in enumerate(steps) if isinstance(m, nn.ModuleList)), len(steps)
    )
    called = [i for i in range(1, len(steps)) if is_called(steps[i][1])]
    children = [i for i in called if i >= below]
    owners = [i for i in called if id(steps[i][1]) in owning]
    return steps[next(iter([*children, *owners]), 0)]


def _walk(root: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules on the way from the root to the owner of the parameter called `name`."""
    parts = name.split(".")
    paths = [".".join(parts[:depth]) for depth in range(len(parts))]
    return [(path, root.get_submodule(path)) for path in paths]
