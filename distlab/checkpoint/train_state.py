"""Model and optimizer as named shards: the one form in which every strategy's state is stored.

Each tensor is flattened, and this rank holds a contiguous part of it: all of it under data parallelism, a shard under
ZeRO or FSDP. Names: `model/<parameter>` and `optimizer/<state>/<parameter>`, e.g.
`optimizer/exp_avg/blocks.0.norm.weight`. Beside them, the random generators of each rank.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.parallel.base import ParallelModel, stepped
from distlab.parallel.shard import Shard, plain_name, whole

# How a step is computed, not what it computes: a checkpoint does not carry these over.
NOT_STORED = {"params", "foreach", "fused", "capturable", "differentiable", "placement"}


def model_state(model: ParallelModel) -> list[Shard]:
    """Every parameter and persistent buffer."""
    held = [model.located(shard).like(f"model/{shard.name}", shard.tensor) for shard in model.shards()]
    return held + [whole(f"model/{name}", buffer) for name, buffer in _persistent_buffers(model.module)]


def optimizer_state(model: ParallelModel, optimizer: Optimizer) -> list[Shard]:
    """Every tensor of the optimizer's state that this rank holds, scalars such as Adam's step included.

    Raises ValueError for state that is no tensor, which could not be stored.
    """
    found = []
    for shard in map(model.located, stepped(model, optimizer)):
        for kind, value in optimizer.state.get(shard.tensor, {}).items():
            key = f"optimizer/{kind}/{shard.name}"
            if not isinstance(value, Tensor):
                raise ValueError(f"{key} is a {type(value).__name__}; only tensors are stored")
            if value.ndim > 0 and value.shape == shard.tensor.shape:
                found.append(shard.like(key, value))
            elif shard.is_first:  # one number for the whole
                found.append(Shard(key, value.shape, 0, value, shard.replicated, shard.copies))
    return found


def empty_optimizer_state(
    model: ParallelModel, optimizer: Optimizer, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[dict[Tensor, dict[str, Tensor]], list[Shard]]:
    """State tensors to be filled for what this rank steps, and the shards that fill them.

    Args:
        stored: every stored name → (shape, dtype).
    """
    kinds = {}  # parameter → kinds of its state
    for key in stored:
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            kinds.setdefault(name, []).append(kind)
    state = {}
    found = []
    for shard in map(model.located, stepped(model, optimizer)):
        for kind in kinds.get(shard.name, ()):
            key = f"optimizer/{kind}/{shard.name}"
            shape, dtype = stored[key]
            if shape == tuple(shard.shape) and len(shape) > 0:
                value = torch.empty_like(shard.tensor, dtype=dtype, requires_grad=False)
                found.append(shard.like(key, value))
            else:
                value = torch.empty(shape, dtype=dtype)  # load_state_dict puts it where it belongs
                found.append(whole(key, value))
            state.setdefault(shard.tensor, {})[kind] = value
    return state, found


def group_options(model: ParallelModel, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Gather the optimizer's groups: options and names of parameters, of all stages of a pipeline. A collective."""
    names = {id(p): plain_name(name) for name, p in model.module.named_parameters()}
    return [
        {key: value for key, value in group.items() if key not in NOT_STORED}
        | {"params": model.of_all_stages([names[id(parameter)] for parameter in group["params"]])}
        for group in optimizer.param_groups
    ]


def stored_options(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the stored options of each group, in the types of this optimizer's.

    Args:
        saved_groups: what `group_options` gave, out of JSON.
        groups: what it gives now.

    Raises:
        ValueError: groups that hold other parameters, or options that are missing or of another type.
    """
    if [sorted(group["params"]) for group in saved_groups] != [sorted(g["params"]) for g in groups]:
        raise ValueError("the stored optimizer's groups hold other parameters than this one's")
    options = []
    for saved, group in zip(saved_groups, groups, strict=True):
        for name in sorted(saved.keys() | group.keys()):
            if name not in saved or name not in group or _kind(saved[name]) != _kind(group[name]):
                there, here = (repr(g[name]) if name in g else "missing" for g in (saved, group))
                raise ValueError(f"the stored optimizer's option '{name}' is {there}, and {here} here")
        options.append({
            name: tuple(value) if isinstance(group[name], tuple) else value
            for name, value in saved.items()
            if name != "params"
        })  # fmt: skip
    return options


def _kind(value: Any) -> Any:
    """What a stored option must share with a live one: JSON has one list for tuples, and 1 may stand for 1.0."""
    if isinstance(value, (list, tuple)):
        return [_kind(item) for item in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield plain_name(f"{path}.{name}" if path else name), buffer


def seed_rank(seed: int, rank: int) -> None:
    """Seed every generator of this process; ranks differ, so that dropout does."""
    mixed = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)  # CUDA's too


def generators() -> dict[str, Tensor]:
    """Copies of all states: Python's, NumPy's legacy one, torch's on the CPU and on the current GPU."""
    version, words, gauss = random.getstate()
    # Integers below 2³² are exact in fp64; NaN stands for "no second Gaussian waiting".
    python = [version, *words, float("nan") if gauss is None else gauss]
    _, keys, position, has_gauss, cached = np.random.get_state()
    found = {
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_generators(saved: Mapping[str, Tensor]) -> None:
    """Invert `generators`; kinds that are missing, or not of this machine, are left as they are.

    Raises:
        ValueError: what is no state of a generator.
    """
    mine = generators()
    for kind, state in saved.items():
        if kind in mine and (state.shape, state.dtype) != (mine[kind].shape, mine[kind].dtype):
            raise ValueError(
                f"the stored random generator '{kind}' has {tuple(state.shape)} {state.dtype}, and needs "
                f"{tuple(mine[kind].shape)} {mine[kind].dtype}"
            )
    try:
        if "python" in saved:
            version, *words, gauss = saved["python"].tolist()
            random.setstate((int(version), tuple(map(int, words)), None if gauss != gauss else gauss))
        if "numpy" in saved:
            *keys, position, has_gauss, cached = saved["numpy"].tolist()
            key_array = np.array(keys, dtype=np.uint32)
            np.random.set_state(("MT19937", key_array, int(position), int(has_gauss), cached))
        if "torch" in saved:
            torch.set_rng_state(saved["torch"])
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"a stored random generator cannot be restored: {error}") from None
