"""State dicts of an optimizer that steps shards: each rank's own, or its part of the whole state.

An optimizer of torch over the shards of `FSDP` saves this rank's part of everything, and torch's
`load_state_dict` compares no shapes: another rank's part trains on silently, and the whole state
fails in the next step. The hooks here note the rank in a state dict and look at every shape when
one is loaded. Checkpoints do not need them: they are written by name and read at any rank
(`distlab.checkpoint`).
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from distlab.parallel.buckets import view_like
from distlab.parallel.shard import spread_of, whole_shape

KEY = "shards"  # of a state dict: whose it is


def watch_states(optimizer: Optimizer) -> None:
    """Let state dicts of an optimizer name their rank, and be checked when they are loaded."""
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
    saved_by, mine = state_dict.get(KEY), _place(optimizer)
    if saved_by is not None and mine is not None and saved_by != mine:
        raise ValueError(
            f"this optimizer state holds the shards of rank {saved_by['rank']} of {saved_by['ranks']}, "
            f"and this is rank {mine['rank']} of {mine['ranks']}: load on each rank what it has saved, "
            "or use distlab's Checkpointer, which can be read at any rank"
        )
    state = dict(state_dict["state"])
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        for number, parameter in zip(saved["params"], group["params"], strict=False):
            if number in state and spread_of(parameter) is not None:
                state[number] = {
                    name: _part_of(value, parameter, f"{name} of parameter {number}")
                    for name, value in state[number].items()
                }
    return state_dict | {"state": state}


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
    return state_dict if place is None else state_dict | {KEY: place}
