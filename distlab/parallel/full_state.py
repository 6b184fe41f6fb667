"""State dicts of a module whose parameters may be spread over ranks: names, and comparison of what is loaded.

`ParallelModel.full_state_dict()` and `load_full_state_dict()` use it. Names are the module's own,
as in its `state_dict()` before wrapping: without `module.` and without the `_orig_mod.` of blocks
that were compiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.comm import collectives
from distlab.parallel.shard import Cut, Loader, plain_name
from distlab.parallel.tensor_parallel import gather_cuts

PREFIX = "module."  # of names in the state dict of a wrapper
EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state()` returns
SHOWN = 5  # names in a message


class Entry(NamedTuple):
    """One name of a module's state dict.

    Attributes:
        owner: the module that has it.
        attribute: its name there.
        kind: `parameter`, `buffer` or `extra` (what `get_extra_state()` returns).
    """

    name: str
    owner: nn.Module
    attribute: str
    kind: str


@torch.no_grad()
def collect(model: Any) -> dict[str, Any]:
    """Return the whole state of a `ParallelModel`; see its `full_state_dict()`. A collective."""
    parameters = {plain_name(name): value for name, value in model.full_parameters().items()}
    copies: dict[int, Tensor] = {}  # by identity of the original, so that tied tensors stay tied
    buffers: list[Tensor] = []
    state: dict[str, Any] = {}
    for name, owner, attribute, kind in entries_of(model.module):
        if kind == "extra":
            state[name] = owner.get_extra_state()
            continue
        tensor = parameters[name] if kind == "parameter" else owner._buffers[attribute]
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
            if kind == "buffer":
                buffers.append(copies[id(tensor)])
        state[name] = copies[id(tensor)]
    if buffers and model.process_group is not None:
        collectives.broadcast_all(buffers, model.process_group)
    if model.tensor_group is not None:
        state = gather_cuts(state, model.cuts, model.tensor_group)
    if model.pipeline is None:
        return state
    # Ranks exchange pickled objects, which must not hold tensors of one rank's GPU.
    on_host = [(name, _to(value, torch.device("cpu"))) for name, value in state.items()]
    return {name: _to(value, model.device) for name, value in model.of_all_stages(on_host)}


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@torch.no_grad()
def load(model: Any, state_dict: Mapping[str, Any]) -> None:
    """Overwrite the whole state of a `ParallelModel`; see its `load_full_state_dict()`."""
    loaders = [*_whole_loaders(model), *loaders_of_rest(model.module)]
    needed = model.of_all_stages([(loader.names, loader.shape) for loader in loaders])
    given = by_own_names(state_dict, {name for names, _ in needed for name in names})
    refuse_other_state(given, needed)
    for loader in loaders:
        name = next(name for name in loader.names if name in given)
        loader.load(given[name])


def _whole_loaders(model: Any) -> list[Loader]:
    """Return the loaders of parameters, which take this rank's part of those that ranks share."""
    loaders = []
    for names, shape, load_part in model.loaders():
        cut = next((model.cuts[name] for name in names if name in model.cuts), None)
        if cut is None:
            loaders.append(Loader(names, shape, load_part))
        else:
            loaders.append(Loader(names, cut.shape, partial(_load_cut, cut, load_part)))
    return loaders


def _load_cut(cut: Cut, load_part: Callable[[Tensor], Any], value: Tensor) -> None:
    load_part(cut.of(value))


def entries_of(module: nn.Module) -> Iterator[Entry]:
    """Yield what `module.state_dict()` holds, in its order; a tied tensor under each of its names."""
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = plain_name(f"{path}.") if path else ""
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield Entry(prefix + attribute, owner, attribute, "parameter")
        for attribute, buffer in owner._buffers.items():
            if buffer is not None and attribute not in owner._non_persistent_buffers_set:
                yield Entry(prefix + attribute, owner, attribute, "buffer")
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            yield Entry(prefix + EXTRA_STATE, owner, EXTRA_STATE, "extra")


def loaders_of_rest(module: nn.Module) -> list[Loader]:
    """Return the loaders of buffers and extra state, which every rank has whole."""
    names: dict[Any, list[str]] = {}
    load: dict[Any, Callable[[Any], Any]] = {}
    shapes: dict[Any, torch.Size | None] = {}
    for entry in entries_of(module):
        if entry.kind == "buffer":
            buffer = entry.owner._buffers[entry.attribute]
            key, load_it, shape = id(buffer), buffer.copy_, buffer.shape
        elif entry.kind == "extra":
            key, load_it, shape = entry.name, entry.owner.set_extra_state, None
        else:
            continue
        names.setdefault(key, []).append(entry.name)
        load[key], shapes[key] = load_it, shape
    return [Loader(names[key], shapes[key], load[key]) for key in names]


def by_own_names(state_dict: Mapping[str, Any], expected: set[str]) -> dict[str, Any]:
    """Return a state dict under the module's own names.

    Args:
        state_dict: of the module, of a wrapper, or of a compiled one of either.
        expected: the module's own names.
    """
    named = {plain_name(name): value for name, value in state_dict.items()}
    # A module may have a child that is called `module`: then some names are known as they are.
    is_of_wrapper = (
        named and all(name.startswith(PREFIX) for name in named) and not expected & named.keys()
    )
    return (
        {name.removeprefix(PREFIX): value for name, value in named.items()}
        if is_of_wrapper
        else named
    )


def refuse_other_state(
    given: Mapping[str, Any], expected: Sequence[tuple[Sequence[str], torch.Size | None]]
) -> None:
    """Compare a state dict with what a module needs, before anything is overwritten.

    Args:
        given: by the module's own names.
        expected: names and shape of each tensor; one of several names suffices.

    Raises:
        ValueError: names that are missing or unexpected, other shapes, or tensors that are not
            whole.
    """
    missing = [names[0] for names, _ in expected if not any(name in given for name in names)]
    known = {name for names, _ in expected for name in names}
    unexpected = [name for name in given if name not in known]
    others = []
    for names, shape in expected:
        for name in names:
            if shape is not None and name in given and (found := _other_than(given[name], shape)):
                others.append(f"'{name}' {found}")
    faults = []
    if missing:
        faults.append(f"it lacks {_listed([repr(name) for name in missing])}")
    if unexpected:
        faults.append(f"the model has no {_listed([repr(name) for name in unexpected])}")
    if others:
        faults.append(_listed(others))
    if faults:
        raise ValueError(
            f"this state dict is not the model's whole state: {'; '.join(faults)}. Nothing was loaded. Give "
            "what full_state_dict() returns, or the state dict of the module before it was wrapped. What one "
            "rank holds of a sharded model is no whole state"
        )


def _other_than(value: Any, shape: torch.Size) -> str | None:
    """Say how a value is not a whole tensor of this shape."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__} and not a tensor"
    if hasattr(value, "to_local"):
        return "is a DTensor (call its full_tensor() on every rank first)"
    if value.shape != shape:
        return f"has shape {tuple(value.shape)} and the model's {tuple(shape)}"
    return None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
