"""Model and optimizer as named shards: the one form in which every strategy's state is stored.

Each tensor is flattened, and this rank holds a contiguous part of it: all of it under data
parallelism, a shard under ZeRO or FSDP. Names: `model/<parameter>` and
`optimizer/<state>/<parameter>`, e.g. `optimizer/exp_avg/blocks.0.norm.weight`. The random
generators of each rank are also stored.
"""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.checkpoint.files import DTYPES
from distlab.parallel.local_optimizer import stepped
from distlab.parallel.model import ParallelModel
from distlab.parallel.shard import NOTED_RANK, Shard, local_part, plain_name, whole

# How a step is computed, not what it computes: a checkpoint does not carry these over.
NOT_STORED = {"params", "foreach", "fused", "capturable", "differentiable", "placement", NOTED_RANK}


def model_state(model: ParallelModel) -> list[Shard]:
    """Every parameter and persistent buffer."""
    held = [
        model.located(shard).like(f"model/{shard.name}", shard.tensor) for shard in model.shards()
    ]
    return held + [
        whole(f"model/{name}", buffer) for name, buffer in _persistent_buffers(model.module)
    ]


def refuse_unstorable_model(model: ParallelModel) -> None:
    """Raise ValueError for a parameter or a persistent buffer that a checkpoint cannot hold.

    The message names it.
    """
    try:
        held = model_state(model)
    except ValueError as error:
        raise ValueError(
            f"checkpoints cannot hold this model as its strategy shards it: {error}. Choose another "
            "strategy or layout"
        ) from None
    refuse_dtypes(held)
    for shard in held:
        _ = shard.values  # raises for elements that are not contiguous in memory


def refuse_dtypes(shards: Sequence[Shard]) -> None:
    """Raise ValueError for the first tensor of a dtype that checkpoints do not hold.

    The message names it.
    """
    for shard in shards:
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(
                f"'{shard.name.removeprefix('model/')}' has dtype {dtype}, which checkpoints do not "
                f"hold. They hold {', '.join(DTYPES)}. Register a buffer that can be computed again "
                "with persistent=False, or store complex numbers by torch.view_as_real"
            )


def optimizer_state(model: ParallelModel, optimizer: Optimizer) -> list[Shard]:
    """Return every tensor of the optimizer's state on this rank, with scalars such as Adam's step.

    Raises:
        ValueError: state that is not a tensor, or a tensor that a checkpoint cannot hold; the
            message names it.
    """
    found = []
    for shard in map(model.located, stepped(model, optimizer)):
        for kind, value in optimizer.state.get(shard.tensor, {}).items():
            key = f"optimizer/{kind}/{shard.name}"
            if not isinstance(value, Tensor):
                raise ValueError(f"{key} is a {type(value).__name__}; only tensors are stored")
            per_element = value.ndim > 0 and value.shape == shard.tensor.shape
            if not per_element and value.numel() != 1:
                raise ValueError(
                    f"{key} has shape {tuple(value.shape)}, and its parameter "
                    f"{tuple(shard.tensor.shape)}: checkpoints hold optimizer state of one number "
                    "for each element, or of one number"
                )
            if per_element:
                found.append(shard.like(key, value))
            elif shard.is_first:  # one number for the whole
                found.append(Shard(key, value.shape, 0, value, shard.replicated, shard.copies))
    return found


def empty_optimizer_state(
    model: ParallelModel,
    optimizer: Optimizer,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
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
    optimizer_keys = [key for key in stored if key.startswith("optimizer/")]
    # Kinds that are one number, such as Adam's step.
    numbers = {key.split("/", 2)[1] for key in optimizer_keys if stored[key][0] == ()}
    state = {}
    found = []
    for shard in map(model.located, stepped(model, optimizer)):
        if shard.shape.numel() == 0 and not numbers <= set(kinds.get(shard.name, ())):
            # Older checkpoints left out the step of a parameter without elements: it starts anew.
            continue
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
    """Gather the optimizer's groups: options and names of parameters, of all stages of a pipeline.

    A collective. Every rank takes part in it before any rank raises.

    Raises:
        ValueError: a group holds a tensor that is not a parameter of the model.
    """
    names = {id(p): plain_name(name) for name, p in model.module.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in NOT_STORED}
        held = model.of_all_stages([names.get(id(parameter)) for parameter in group["params"]])
        if None in held:
            raise ValueError(
                f"parameter group {number} of the optimizer holds a tensor that is not a parameter of "
                "the model, and checkpoints store parameters by name: make it a parameter of the "
                "module that is wrapped"
            )
        groups.append(options | {"params": held})
    return groups


def frozen_names(model: ParallelModel) -> set[str]:
    """Gather the names of the parameters that are not trained, of all stages of a pipeline.

    A collective.
    """
    named = model.module.named_parameters()
    return set(model.of_all_stages([plain_name(name) for name, p in named if not p.requires_grad]))


def stored_options(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    frozen: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return the stored options of each group, in the types of this optimizer's.

    Args:
        saved_groups: stored result of `group_options`, as JSON gives it back.
        groups: result of `group_options` now.
        frozen: names of the parameters that are not trained here. No optimizer steps them, so it
            does not matter whether they are in a group: some strategies give their optimizer all
            parameters, others the trained ones.

    Raises:
        ValueError: groups that hold other parameters, or options that are missing or of another
            type.
    """
    options = []
    for number, (saved, group) in enumerate(_pair_groups(saved_groups, groups, frozen)):
        if saved is None:  # it holds nothing that is trained, and the checkpoint has no such group
            options.append({})
            continue
        restored = {}
        for name in sorted(saved.keys() | group.keys()):
            if name == "params":
                continue
            live = storable(group[name], _option(name, number)) if name in group else None
            if name not in saved or name not in group or _kind(saved[name]) != _kind(live):
                there, here = (repr(g[name]) if name in g else "missing" for g in (saved, group))
                raise ValueError(
                    f"the stored optimizer's option '{name}' is {there}, and {here} here"
                )
            restored[name] = _restored(saved[name], group[name])
        options.append(restored)
    return options


def _pair_groups(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    frozen: Collection[str],
) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any]]]:
    """Return the stored group of each group.

    It is None for a group without trained parameters that the checkpoint lacks.

    Raises:
        ValueError: a trained parameter is in another group there, or in none.
    """

    def trained(some: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the numbers of the groups with trained parameters."""
        return [number for number, group in enumerate(some) if set(group["params"]) - set(frozen)]

    def places(some: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return for each parameter the number of its group among those with trained parameters."""
        found = {}
        for place, number in enumerate(trained(some)):
            found |= dict.fromkeys(some[number]["params"], place)
        return found

    places_there, places_here = places(saved_groups), places(groups)
    for name in sorted((places_there.keys() | places_here.keys()) - set(frozen)):
        if name not in places_there:
            raise ValueError(
                f"the stored optimizer's groups do not hold '{name}', which this optimizer steps: "
                "the parameter was frozen, or given to no optimizer, when the checkpoint was "
                "written. Freeze it here as well"
            )
        if name not in places_here:
            raise ValueError(
                f"the stored optimizer's groups hold '{name}', and this optimizer's do not, though "
                "the parameter is trained here: give it to the optimizer, or freeze it"
            )
        if places_there[name] != places_here[name]:
            there = trained(saved_groups)[places_there[name]]
            here = trained(groups)[places_here[name]]
            raise ValueError(
                f"'{name}' is in parameter group {there} of the stored optimizer, and in group "
                f"{here} of this one: make the same groups"
            )
    partner = dict(zip(trained(groups), trained(saved_groups), strict=True))
    others_here = [number for number in range(len(groups)) if number not in partner]
    others_there = [number for number in range(len(saved_groups)) if number not in partner.values()]
    if len(others_here) == len(others_there):
        partner |= dict(zip(others_here, others_there, strict=True))
    return [
        (saved_groups[partner[n]] if n in partner else None, group)
        for n, group in enumerate(groups)
    ]


def storable_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups as JSON holds them.

    Raises:
        ValueError: an option that JSON cannot hold; the message names it.
    """
    return [
        {name: storable(value, _option(name, number)) for name, value in group.items()}
        for number, group in enumerate(groups)
    ]


def _option(name: str, number: int) -> str:
    return f"option '{name}' of the optimizer's parameter group {number}"


def storable(value: Any, what: str) -> Any:
    """Return an option as JSON holds it.

    A tensor or NumPy array of one number becomes a number, and a tuple becomes a list.

    `_restored` gives it back the type that the option has in the optimizer that loads it.

    Args:
        value: an option of a parameter group, or a part of one.
        what: name of it in the message.

    Raises:
        ValueError: a value that JSON cannot hold.
    """
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return local_part(value.detach()).item()
    if isinstance(value, np.generic) and not isinstance(value, np.complexfloating):
        return storable(value.item(), what)
    if isinstance(value, (list, tuple)):
        return [storable(item, what) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: storable(item, what) for key, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):  # a number of a class of its own is stored as the number
        if isinstance(value, plain):
            return plain(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ValueError(
        f"{what} has a value of type {type(value).__name__}{shape}, which a checkpoint cannot store: "
        "use numbers, text, None, 0-dimensional tensors of real numbers, and lists, tuples or "
        "dictionaries of these"
    )


def _restored(saved: Any, live: Any) -> Any:
    """Return a stored option in the type of the live one, whose kind is the same."""
    if isinstance(live, (list, tuple)):
        items = [_restored(item, other) for item, other in zip(saved, live, strict=True)]
        # A named tuple's class takes its items one by one.
        return live._make(items) if hasattr(live, "_make") else type(live)(items)
    if isinstance(live, dict):
        return {key: _restored(item, live[key]) for key, item in saved.items()}
    if isinstance(live, Tensor):
        # 0.5 does not fit into a tensor of integers: it keeps its value and loses the dtype.
        keeps_dtype = live.is_floating_point() or not isinstance(saved, float)
        return torch.tensor(saved, dtype=live.dtype if keeps_dtype else None, device=live.device)
    if type(live) in (bool, int, float, str, type(None)):
        return saved  # 1 may stand for 1.0
    if isinstance(live, (int, np.integer)) and isinstance(saved, float):
        return saved
    return type(live)(saved)


def refuse_unstorable(extra: Any, what: str = "extra") -> None:
    """Raise ValueError for data that JSON would not give back as it is.

    These are tuples, tensors and keys that are not text.

    Args:
        extra: data to be stored.
        what: name of it in the message.
    """
    if type(extra) is dict:
        for key, value in extra.items():
            if type(key) is not str:
                raise ValueError(
                    f"{what} has the key {key!r} of type {type(key).__name__}: use text for keys"
                )
            refuse_unstorable(value, f"{what}[{key!r}]")
    elif type(extra) is list:
        for number, value in enumerate(extra):
            refuse_unstorable(value, f"{what}[{number}]")
    elif type(extra) not in (bool, int, float, str, type(None)):
        raise ValueError(
            f"{what} has a value of type {type(extra).__name__}, which a checkpoint would not give "
            "back as it is: use numbers, text, None, and lists or dictionaries of these"
        )


def _kind(value: Any) -> Any:
    """Return the properties that a stored option must share with a live one, in JSON's form.

    1 may stand for 1.0.
    """
    if isinstance(value, list):
        return [_kind(item) for item in value]
    if isinstance(value, dict):
        return {key: _kind(item) for key, item in value.items()}
    return (
        "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)
    )


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
    """Return copies of all states: Python's, NumPy's legacy one, torch's on the CPU and the GPU."""
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
        ValueError: a value that is not the state of a generator.
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
            random.setstate(
                (int(version), tuple(map(int, words)), None if gauss != gauss else gauss)
            )
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
