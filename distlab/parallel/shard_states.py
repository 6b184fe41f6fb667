"""State dicts of an optimizer that steps shards: each rank's own, or its part of the whole state.

An optimizer of torch over the shards of `FSDP` saves this rank's part of everything, and torch's
`load_state_dict` compares no shapes: another rank's part trains on silently, and the whole state
fails in the next step. The hooks here note the rank in a state dict, and in each of its groups, and
look at every shape when one is loaded. An optimizer that has not stepped yet has no hooks, unless
`Strategy.build` made it. What it has loaded is checked before its first step, by the note in its
groups. Checkpoints do not need all this: they are written by name and read at any rank
(`distlab.checkpoint`).
"""

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from distlab.parallel.shard import NOTED_RANK, spread_of, view_like, whole_shape

# Module state, as torch has no way to ask an optimizer for its hooks.
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_states(optimizer: Optimizer) -> None:
    """Let state dicts of an optimizer name their rank, and be checked when they are loaded."""
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    optimizer.register_state_dict_post_hook(_note_rank)
    optimizer.register_load_state_dict_pre_hook(own_part)


def own_part(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with this rank's part of each parameter's state.

    Args:
        optimizer: steps shards, or whole parameters.
        state_dict: of this rank, or the whole state, as an unsharded optimizer over the same
            parameters saves it.

    Raises:
        ValueError: it is another rank's, or was saved by another number of ranks, or a shape is
            that of neither the shard nor the whole parameter.
    """
    _refuse_other_place(state_dict.get(NOTED_RANK), _place(optimizer))
    state = dict(state_dict["state"])
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        for number, parameter in zip(saved["params"], group["params"], strict=False):
            if number in state and spread_of(parameter) is not None:
                state[number] = {
                    name: _part_of(value, parameter, f"{name} of parameter {number}")
                    for name, value in state[number].items()
                }
    groups = [
        {key: value for key, value in group.items() if key != NOTED_RANK}
        for group in state_dict["param_groups"]
    ]
    return state_dict | {"state": state, "param_groups": groups}


def check_loaded(optimizer: Optimizer) -> None:
    """Check before a step what an optimizer without hooks has loaded.

    Raises:
        ValueError: the state is another rank's, or one rank's where parameters are whole.
    """
    saved_by = next(
        (group[NOTED_RANK] for group in optimizer.param_groups if NOTED_RANK in group), None
    )
    if saved_by is not None:
        _refuse_other_place(saved_by, _place(optimizer))
        for group in optimizer.param_groups:
            group.pop(NOTED_RANK, None)


def take_parts(optimizer: Optimizer) -> None:
    """Replace whole state that an optimizer without hooks has loaded by this rank's part of it.

    Raises:
        ValueError: a shape is that of neither the shard nor the whole parameter.
    """
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if parameter in optimizer.state and spread_of(parameter) is not None:
                state = optimizer.state[parameter]
                for name, value in state.items():
                    state[name] = _part_of(value, parameter, f"{name} of parameter {number}")


def _refuse_other_place(saved_by: dict[str, int] | None, mine: dict[str, int] | None) -> None:
    if mine is None:
        refuse_shards({NOTED_RANK: saved_by})
    elif saved_by is not None and saved_by != mine:
        raise ValueError(
            f"this optimizer state holds the shards of rank {saved_by['rank']} of {saved_by['ranks']}, "
            f"and this is rank {mine['rank']} of {mine['ranks']}: load on each rank what it has saved, "
            "or use distlab's Checkpointer, which can be read at any rank"
        )


def refuse_shards(state_dict: dict[str, Any]) -> None:
    """Check that a state dict is whole, for an optimizer whose parameters are whole.

    Raises:
        ValueError: it holds the shards of one of several ranks.
    """
    saved_by = state_dict.get(NOTED_RANK)
    if saved_by is not None and saved_by["ranks"] > 1:
        raise ValueError(
            f"this optimizer state holds the shards of rank {saved_by['rank']} of {saved_by['ranks']}, and this "
            "optimizer needs the whole state: use distlab's Checkpointer, which any strategy can read"
        )


def refuse_other_shapes(state: dict[str, Any], name: str, parameter: Tensor) -> None:
    """Raise ValueError for state that is not one number, and not in the shape of its parameter."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
            raise ValueError(
                f"the saved {key} of '{name}' has shape {tuple(value.shape)}, and the parameter "
                f"{tuple(parameter.shape)}: load the state of the same parameters in the same order"
            )


def _part_of(value: Any, parameter: Tensor, what: str) -> Any:
    """Return this rank's part of a state tensor.

    What is not one number per element is kept as it is.
    """
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape == parameter.shape:
        return value
    spread, shape = spread_of(parameter), whole_shape(parameter)
    if value.shape == shape:
        rank = spread.group.rank()
        first = sum(spread.counts[:rank])
        # In the order in which the shards follow one another.
        in_memory = value.new_empty(value.numel())
        view_like(in_memory, spread.like).copy_(value)
        return view_like(in_memory[first : first + parameter.numel()].clone(), parameter)
    if value.numel() == 1:
        return value
    raise ValueError(
        f"this optimizer state has {what} in shape {tuple(value.shape)}. The parameter has shape "
        f"{tuple(shape)}, and this rank's part of it {tuple(parameter.shape)}: load the state of the same "
        "parameters in the same order"
    )


def _place(optimizer: Optimizer) -> dict[str, int] | None:
    """Return which of how many ranks this one is among those that share the parameters.

    Return None if this rank has all of every parameter.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            spread = spread_of(parameter)
            if spread is not None:
                return {"rank": spread.group.rank(), "ranks": spread.group.size()}
    return None


def _note_rank(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    place = _place(optimizer)
    if place is None or place["ranks"] == 1:
        return state_dict
    groups = [group | {NOTED_RANK: place} for group in state_dict["param_groups"]]
    return state_dict | {NOTED_RANK: place, "param_groups": groups}
