"""State dicts: the whole state of a model, and the state of an optimizer that steps shards.

The first part serves `ParallelModel.full_state_dict()` and `load_full_state_dict()`. Names are the
module's own, as in its `state_dict()` before wrapping: without `module.` and without the
`_orig_mod.` of compiled blocks.

The second part serves torch's optimizers over the shards of `FSDP`. Their `state_dict()` holds this
rank's part of everything, and torch's `load_state_dict` does not compare shapes. Another rank's
part would train on silently, and the whole state would fail in the next step. The hooks here write
the rank into a state dict and into each of its groups, and check all shapes when one is loaded. An
optimizer without hooks is one that has not stepped yet and that `Strategy.build` did not make. The
state that it has loaded is checked before its first step, by the rank in its groups.

Checkpoints do not use this file. They store shards by name and can be read at any number of ranks
(`distlab.checkpoint`).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel.shard import (
    NOTED_RANK,
    Cut,
    Loader,
    part_of_whole,
    plain_name,
    spread_of,
    whole_shape,
)
from distlab.parallel.tensor_parallel import gather_cuts

# -- 1. The whole state of a model ----------------------------------------------------------------

PREFIX = "module."  # beginning of each name in the state dict of a wrapper
EXTRA_STATE = "_extra_state"  # torch's name for the result of `get_extra_state()`
SHOWN = 5  # largest number of names in a message


class Entry(NamedTuple):
    """One name of a module's state dict.

    Attributes:
        name: name in the state dict.
        owner: submodule that has the tensor or state.
        attribute: name in that submodule.
        kind: `parameter`, `buffer` or `extra` (the result of `get_extra_state()`).
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
    """Yield the entries of `module.state_dict()` in its order.

    A tied tensor has an entry for each of its names.
    """
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
    """Return the loaders of persistent buffers and extra state, which are whole on every rank."""
    loaders = []
    names_of_buffers: dict[int, list[str]] = {}  # by identity: a tied buffer is loaded once
    for entry in entries_of(module):
        if entry.kind == "buffer":
            buffer = entry.owner._buffers[entry.attribute]
            if id(buffer) in names_of_buffers:
                names_of_buffers[id(buffer)].append(entry.name)
            else:
                names_of_buffers[id(buffer)] = [entry.name]
                # The loader shares this list, which gets the buffer's other names.
                loaders.append(Loader(names_of_buffers[id(buffer)], buffer.shape, buffer.copy_))
        elif entry.kind == "extra":
            loaders.append(Loader([entry.name], None, entry.owner.set_extra_state))
    return loaders


def by_own_names(state_dict: Mapping[str, Any], expected: set[str]) -> dict[str, Any]:
    """Return a state dict under the module's own names.

    Args:
        state_dict: state dict of the module, of a wrapper, or of a compiled module or wrapper.
        expected: the module's own names.
    """
    named = {plain_name(name): value for name, value in state_dict.items()}
    has_prefix = bool(named) and all(name.startswith(PREFIX) for name in named)
    # A module may have a child called `module`. Then some names are expected with the prefix.
    is_of_wrapper = has_prefix and not expected & named.keys()
    if not is_of_wrapper:
        return named
    return {name.removeprefix(PREFIX): value for name, value in named.items()}


def refuse_other_state(
    given: Mapping[str, Any], expected: Sequence[tuple[Sequence[str], torch.Size | None]]
) -> None:
    """Compare a state dict with the state that a module needs, before anything is overwritten.

    Args:
        given: state dict under the module's own names.
        expected: names and shape of each tensor. One of several names is enough.

    Raises:
        ValueError: names that are missing or unexpected, other shapes, or tensors that are not
            whole.
    """
    missing = []
    known: set[str] = set()
    wrong_values = []
    for names, shape in expected:
        known.update(names)
        if not any(name in given for name in names):
            missing.append(repr(names[0]))
        if shape is None:
            continue
        for name in names:
            if name not in given:
                continue
            difference = _difference(given[name], shape)
            if difference is not None:
                wrong_values.append(f"'{name}' {difference}")
    unexpected = [repr(name) for name in given if name not in known]
    faults = []
    if missing:
        faults.append(f"it lacks {_listed(missing)}")
    if unexpected:
        faults.append(f"the model has no {_listed(unexpected)}")
    if wrong_values:
        faults.append(_listed(wrong_values))
    if faults:
        raise ValueError(
            f"this state dict is not the model's whole state: {'; '.join(faults)}. Nothing was "
            "loaded. Give what full_state_dict() returns, or the state dict of the module before "
            "it was wrapped. One rank's part of a sharded model is not its whole state"
        )


def _difference(value: Any, shape: torch.Size) -> str | None:
    """Return how a value differs from a whole tensor of this shape, or None."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__} and not a tensor"
    if hasattr(value, "to_local"):
        return "is a DTensor (call its full_tensor() on every rank first)"
    if value.shape != shape:
        return f"has shape {tuple(value.shape)} and the model's {tuple(shape)}"
    return None


def _listed(names: Sequence[str]) -> str:
    """Return the first names in one line, and the number of the others."""
    shown = ", ".join(names[:SHOWN])
    rest = len(names) - SHOWN
    return shown if rest <= 0 else f"{shown} and {rest} more"


# -- 2. The state of an optimizer that steps shards -----------------------------------------------

# Optimizers that have the hooks. Module state, because torch has no way to list an optimizer's
# hooks.
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_states(optimizer: Optimizer) -> None:
    """Add hooks to an optimizer: its state dicts name their rank, and are checked when loaded."""
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    optimizer.register_state_dict_post_hook(_note_rank)
    optimizer.register_load_state_dict_pre_hook(own_part)


def own_part(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with this rank's part of each parameter's state.

    Args:
        optimizer: optimizer of shards or of whole parameters.
        state_dict: state of this rank's shards, or the whole state, as an unsharded optimizer of
            the same parameters saves it.

    Raises:
        ValueError: the state of another rank, or of another number of ranks, or a shape that is
            neither the shard's nor the whole parameter's.
    """
    _refuse_other_place(state_dict.get(NOTED_RANK), _place(optimizer))
    state = dict(state_dict["state"])
    # Not strict: torch compares the numbers of groups and of parameters after this hook.
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        for number, parameter in zip(saved["params"], group["params"], strict=False):
            if number in state and spread_of(parameter) is not None:
                state[number] = own_state(state[number], parameter, f"parameter {number}")
    groups = []
    for saved in state_dict["param_groups"]:
        groups.append({key: value for key, value in saved.items() if key != NOTED_RANK})
    return state_dict | {"state": state, "param_groups": groups}


def check_loaded(optimizer: Optimizer) -> None:
    """Check the state that an optimizer without hooks has loaded. Call it before a step.

    Raises:
        ValueError: the state of another rank, or of one rank where parameters are whole.
    """
    noted = [group for group in optimizer.param_groups if NOTED_RANK in group]
    if not noted:
        return
    _refuse_other_place(noted[0][NOTED_RANK], _place(optimizer))
    for group in noted:
        del group[NOTED_RANK]


def take_parts(optimizer: Optimizer) -> None:
    """Replace the whole state that an optimizer without hooks has loaded by this rank's part.

    Raises:
        ValueError: a shape that is neither the shard's nor the whole parameter's.
    """
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if parameter in optimizer.state and spread_of(parameter) is not None:
                state = optimizer.state[parameter]
                state.update(own_state(state, parameter, f"parameter {number}"))


def refuse_shards(state_dict: dict[str, Any]) -> None:
    """Check that a state dict is whole, for an optimizer whose parameters are whole.

    Raises:
        ValueError: it holds the shards of one of several ranks.
    """
    saved_by = state_dict.get(NOTED_RANK)
    if saved_by is not None and saved_by["ranks"] > 1:
        raise ValueError(
            f"this optimizer state holds the shards of rank {saved_by['rank']} of "
            f"{saved_by['ranks']}, and this optimizer needs the whole state: use distlab's "
            "Checkpointer, which any strategy can read"
        )


def refuse_other_shapes(state: dict[str, Any], name: str, parameter: Tensor) -> None:
    """Check that each tensor of a parameter's state has one element or the parameter's shape.

    Raises:
        ValueError: another shape.
    """
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
            raise ValueError(
                f"the saved {key} of '{name}' has shape {tuple(value.shape)}, and the parameter "
                f"{tuple(parameter.shape)}: load the state of the same parameters in the same order"
            )


def own_state(state: Mapping[str, Any], parameter: Tensor, name: str) -> dict[str, Any]:
    """Return this rank's part of the state of one parameter.

    Args:
        state: state of the shard, or of the whole parameter.
        parameter: tensor that the optimizer steps, this rank's shard.
        name: name of the parameter, for error messages.

    Raises:
        ValueError: a shape that is neither the shard's nor the whole parameter's.
    """
    own = {}
    for key, value in state.items():
        # The count of steps is one number on every rank, also on one without an element of a scalar
        # parameter, whose other state is empty there.
        is_count = key == "step"
        own[key] = value if is_count else _part_of(value, parameter, f"{key} of {name}")
    return own


def _part_of(value: Any, parameter: Tensor, what: str) -> Any:
    """Return this rank's part of a state tensor.

    A value that does not have one number per element is returned as it is.
    """
    if not isinstance(value, Tensor):
        return value
    shape = whole_shape(parameter)
    if value.shape == shape:
        return part_of_whole(value, parameter).clone()
    if value.shape == parameter.shape or value.numel() == 1:
        return value
    raise ValueError(
        f"this optimizer state has {what} in shape {tuple(value.shape)}. The parameter has shape "
        f"{tuple(shape)}, and this rank's part of it {tuple(parameter.shape)}: load the state of "
        "the same parameters in the same order"
    )


def _place(optimizer: Optimizer) -> dict[str, int] | None:
    """Return this rank and the number of ranks that share the parameters.

    None if this rank has all of every parameter.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            spread = spread_of(parameter)
            if spread is not None:
                return {"rank": spread.group.rank(), "ranks": spread.group.size()}
    return None


def _refuse_other_place(saved_by: dict[str, int] | None, mine: dict[str, int] | None) -> None:
    """Raise ValueError if shards were saved by another rank.

    Args:
        saved_by: rank and number of ranks in the state dict. None: it holds whole state.
        mine: result of `_place`.
    """
    if mine is None:
        refuse_shards({NOTED_RANK: saved_by})
    elif saved_by is not None and saved_by != mine:
        raise ValueError(
            f"this optimizer state holds the shards of rank {saved_by['rank']} of "
            f"{saved_by['ranks']}, and this is rank {mine['rank']} of {mine['ranks']}: load on "
            "each rank what it has saved, or use distlab's Checkpointer, which can be read at any "
            "rank"
        )


def _note_rank(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with this rank in it and in its groups, if ranks share parameters."""
    place = _place(optimizer)
    if place is None or place["ranks"] == 1:
        return state_dict
    groups = [group | {NOTED_RANK: place} for group in state_dict["param_groups"]]
    return state_dict | {NOTED_RANK: place, "param_groups": groups}
