"""Model and optimizer as named shards, the form in which the state of every strategy is stored.

Each tensor is flattened, and this rank has a contiguous part of it: all of it under data
parallelism, a shard under ZeRO or FSDP. The names are `model/<parameter>` and
`optimizer/<state>/<parameter>`, for example `optimizer/exp_avg/blocks.0.norm.weight`. The random
generators of each rank are also stored.
"""

import math
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

# Options that change how a step is computed and not its result. A run that resumes has its own.
NOT_STORED = {"params", "foreach", "fused", "capturable", "differentiable", "placement", NOTED_RANK}


def model_state(model: ParallelModel) -> list[Shard]:
    """Return this rank's shards of every parameter, and every persistent buffer."""
    held = []
    for shard in model.shards():
        held.append(model.located(shard).like(f"model/{shard.name}", shard.tensor))
    for name, buffer in _persistent_buffers(model.module):
        # Every rank holds all of a buffer. `portion` then lets each rank store a part.
        held.append(whole(f"model/{name}", buffer))
    return held


def refuse_unstorable_model(model: ParallelModel) -> None:
    """Check that a checkpoint can hold every parameter and every persistent buffer.

    Raises:
        ValueError: it cannot. The message names the first one.
    """
    try:
        held = model_state(model)
    except ValueError as error:
        raise ValueError(
            f"checkpoints cannot hold this model as its strategy shards it: {error}. Choose "
            "another strategy or layout"
        ) from None
    refuse_dtypes(held)
    for shard in held:
        _ = shard.values  # raises for elements that are not contiguous in memory


def refuse_dtypes(shards: Sequence[Shard]) -> None:
    """Check that all tensors have dtypes that checkpoints hold.

    Raises:
        ValueError: a tensor has another dtype. The message names the first one.
    """
    for shard in shards:
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(
                f"'{shard.name.removeprefix('model/')}' has dtype {dtype}, which checkpoints do "
                f"not hold. They hold {', '.join(DTYPES)}. Register a buffer that can be computed "
                "again with persistent=False, or store complex numbers by torch.view_as_real"
            )


def optimizer_state(model: ParallelModel, optimizer: Optimizer) -> list[Shard]:
    """Return every tensor of the optimizer's state on this rank, with scalars such as Adam's step.

    Raises:
        ValueError: state that is not a tensor, or a tensor that a checkpoint cannot hold. The
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
            elif shard.is_first:  # one number for the whole parameter: its first shard stores it
                found.append(Shard(key, value.shape, 0, value, shard.replicated, shard.copies))
    return found


def empty_optimizer_state(
    model: ParallelModel,
    optimizer: Optimizer,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> tuple[dict[Tensor, dict[str, Tensor]], list[Shard]]:
    """Return empty state tensors for the parameters this rank steps, and shards to fill them.

    Args:
        model: wrapped model.
        optimizer: optimizer of its parameters.
        stored: name of every stored tensor → (shape, dtype).

    Returns:
        (tensor that the optimizer steps → kind of state → empty tensor, shards of these tensors).
    """
    kinds_of: dict[str, list[str]] = {}  # parameter → kinds of its state
    numbers = set()  # kinds that are one number, such as Adam's step
    for key, (shape, _) in stored.items():
        if not key.startswith("optimizer/"):
            continue
        _, kind, name = key.split("/", 2)
        kinds_of.setdefault(name, []).append(kind)
        if shape == ():
            numbers.add(kind)
    state: dict[Tensor, dict[str, Tensor]] = {}
    found = []
    for shard in map(model.located, stepped(model, optimizer)):
        kinds = kinds_of.get(shard.name, [])
        if shard.shape.numel() == 0 and not numbers.issubset(kinds):
            # Older checkpoints do not have the step of a parameter without elements. It starts
            # from the beginning.
            continue
        for kind in kinds:
            key = f"optimizer/{kind}/{shard.name}"
            shape, dtype = stored[key]
            # A parameter of shape () has state of one number too, which is stored whole.
            if shape == tuple(shard.shape) and len(shape) > 0:
                value = torch.empty_like(shard.tensor, dtype=dtype, requires_grad=False)
                found.append(shard.like(key, value))
            else:
                # On the CPU: `load_state_dict` moves it to the device it belongs to.
                value = torch.empty(shape, dtype=dtype)
                found.append(whole(key, value))
            state.setdefault(shard.tensor, {})[kind] = value
    return state, found


def group_options(model: ParallelModel, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Gather the optimizer's groups: options and names of parameters, of all stages of a pipeline.

    A collective. Every rank takes part in it before any rank raises.

    Raises:
        ValueError: a group holds a tensor that is not a parameter of the model.
    """
    name_of = {}  # id of a parameter → name
    for name, parameter in model.module.named_parameters():
        name_of[id(parameter)] = plain_name(name)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in NOT_STORED}
        names = [name_of.get(id(parameter)) for parameter in group["params"]]
        # Before the check, because a rank that raised first would leave the others in this
        # collective.
        held = model.of_all_stages(names)
        if None in held:
            raise ValueError(
                f"parameter group {number} of the optimizer holds a tensor that is not a parameter "
                "of the model, and checkpoints store parameters by name: make it a parameter of "
                "the module that is wrapped"
            )
        groups.append(options | {"params": held})
    return groups


def frozen_names(model: ParallelModel) -> set[str]:
    """Gather the names of the parameters that are not trained, of all stages of a pipeline.

    A collective.
    """
    names = []
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            names.append(plain_name(name))
    return set(model.of_all_stages(names))


def stored_options(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    frozen: Collection[str] = (),
    defaults: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the stored options of each group, in the types of this optimizer's options.

    What a scheduler adds to the groups, such as `initial_lr`, may be missing on one side: the
    scheduler may be built before loading or after.

    Args:
        saved_groups: stored result of `group_options`, as JSON gives it back.
        groups: result of `group_options` now.
        frozen: names of the parameters that are not trained here. No optimizer steps them, so it
            does not matter whether they are in a group: some strategies give their optimizer all
            parameters, others the trained ones.
        defaults: names of the optimizer's own options. Default: all of them.

    Raises:
        ValueError: groups that hold other parameters, or options that are missing or of another
            type.
    """
    options = []
    for number, (saved, group) in enumerate(_pair_groups(saved_groups, groups, frozen)):
        if saved is None:
            # The group has no trained parameter, and the checkpoint does not have it.
            options.append({})
            continue
        restored = {}
        for name in sorted(saved.keys() | group.keys()):
            if name == "params":
                continue
            is_own = defaults is None or name in defaults
            if not is_own and name not in group:
                restored[name] = saved[name]
                continue
            if not is_own and name not in saved:
                continue
            live = None
            if name in group:
                live = storable(group[name], _option(name, number))  # raises if it cannot be stored
            if name not in saved or name not in group or _kind(saved[name]) != _kind(live):
                there = repr(saved[name]) if name in saved else "missing"
                here = repr(group[name]) if name in group else "missing"
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
    """Return pairs of a stored group and a group, in the order of the groups.

    The stored group is None for a group without trained parameters that the checkpoint lacks.

    Raises:
        ValueError: a trained parameter is in another group of the checkpoint, or in none.
    """

    # Groups with trained parameters are compared by their place among those. Other groups may be
    # missing on one side.
    numbers_there = _with_trained_parameters(saved_groups, frozen)
    numbers_here = _with_trained_parameters(groups, frozen)
    places_there = _place_of_each_parameter(saved_groups, numbers_there)
    places_here = _place_of_each_parameter(groups, numbers_here)
    names = places_there.keys() | places_here.keys()
    for name in sorted(names - set(frozen)):
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
            there = numbers_there[places_there[name]]
            here = numbers_here[places_here[name]]
            raise ValueError(
                f"'{name}' is in parameter group {there} of the stored optimizer, and in group "
                f"{here} of this one: make the same groups"
            )
    partner = dict(zip(numbers_here, numbers_there, strict=True))  # number here → number there
    # The other groups are paired in order if both sides have the same number of them.
    others_here = [n for n in range(len(groups)) if n not in numbers_here]
    others_there = [n for n in range(len(saved_groups)) if n not in numbers_there]
    if len(others_here) == len(others_there):
        partner |= dict(zip(others_here, others_there, strict=True))
    pairs: list[tuple[Mapping[str, Any] | None, Mapping[str, Any]]] = []
    for number, group in enumerate(groups):
        saved = saved_groups[partner[number]] if number in partner else None
        pairs.append((saved, group))
    return pairs


def _with_trained_parameters(
    groups: Sequence[Mapping[str, Any]], frozen: Collection[str]
) -> list[int]:
    """Return the numbers of the groups that have a trained parameter."""
    numbers = []
    for number, group in enumerate(groups):
        trained = set(group["params"]) - set(frozen)
        if trained:
            numbers.append(number)
    return numbers


def _place_of_each_parameter(
    groups: Sequence[Mapping[str, Any]], numbers: Sequence[int]
) -> dict[str, int]:
    """Return the place of each parameter's group among the groups with these numbers."""
    place_of = {}
    for place, number in enumerate(numbers):
        for name in groups[number]["params"]:
            place_of[name] = place
    return place_of


def storable_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups in the form in which JSON holds them.

    Raises:
        ValueError: an option that JSON cannot hold. The message names it.
    """
    stored = []
    for number, group in enumerate(groups):
        options = {}
        for name, value in group.items():
            options[name] = storable(value, _option(name, number))
        stored.append(options)
    return stored


def _option(name: str, number: int) -> str:
    """Return the words for an option in an error."""
    return f"option '{name}' of the optimizer's parameter group {number}"


def storable(value: Any, what: str) -> Any:
    """Return an option in the form in which JSON holds it.

    A 0-dimensional tensor or a number of NumPy's becomes a number, and a tuple becomes a list.
    `_restored` gives it the type that the option has in the optimizer that loads it.

    Args:
        value: option of a parameter group, or part of one.
        what: name of the option in the error.

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
    for plain in (int, float, str):  # an instance of a subclass is stored as one of the class
        if isinstance(value, plain):
            return plain(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ValueError(
        f"{what} has a value of type {type(value).__name__}{shape}, which a checkpoint cannot "
        "store: use numbers, text, None, 0-dimensional tensors of real numbers, and lists, tuples "
        "or dictionaries of these"
    )


def _restored(saved: Any, live: Any) -> Any:
    """Return a stored option in the type of the live one.

    Args:
        saved: option as JSON gives it back.
        live: option of this optimizer, of the same kind (`_kind`).
    """
    if isinstance(live, (list, tuple)):
        items = [_restored(item, other) for item, other in zip(saved, live, strict=True)]
        if hasattr(live, "_make"):
            return live._make(items)  # a named tuple, whose class takes its items one by one
        return type(live)(items)
    if isinstance(live, dict):
        return {key: _restored(item, live[key]) for key, item in saved.items()}
    if isinstance(live, Tensor):
        dtype = live.dtype
        if isinstance(saved, float) and not live.is_floating_point():
            dtype = None  # 0.5 does not fit into a tensor of integers: keep the value
        return torch.tensor(saved, dtype=dtype, device=live.device)
    if type(live) in (bool, int, float, str, type(None)):
        return saved  # of another type perhaps: 1 where the live option is 1.0
    if isinstance(live, (int, np.integer)) and isinstance(saved, float):
        return saved  # 0.5 does not fit into a class of integers: keep the value
    # A subclass of a number or of text, such as an enum's member or a NumPy number.
    return type(live)(saved)


def refuse_unstorable(extra: Any, what: str = "extra") -> None:
    """Check that JSON would give data back as it is.

    Args:
        extra: data to be stored.
        what: name of the data in the error.

    Raises:
        ValueError: a value that JSON would change, such as a tuple, a tensor or a key that is not
            text.
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
    """Return the properties that a stored option must share with a live one.

    Args:
        value: option in the form in which JSON holds it.
    """
    if isinstance(value, list):
        return [_kind(item) for item in value]
    if isinstance(value, dict):
        return {key: _kind(item) for key, item in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"  # one kind, because 1 is as good as 1.0
    return type(value)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each buffer that `state_dict()` would contain."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set:
                continue
            full_name = f"{path}.{name}" if path else name
            yield plain_name(full_name), buffer


def seed_rank(seed: int, rank: int) -> None:
    """Seed every generator of this process, with another seed on each rank, for dropout."""
    # Not seed + rank, which would give rank 1 of one run the stream of rank 0 of the next.
    mixed = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)  # also seeds CUDA


def generators() -> dict[str, Tensor]:
    """Return copies of the states of all random generators, as tensors.

    They are Python's, NumPy's legacy generator, and torch's on the CPU and the GPU.
    """
    # In fp64, which holds the Gaussian, and is exact for integers below 2³².
    version, words, gauss = random.getstate()
    # NaN stands for None: no second Gaussian is waiting.
    python = [version, *words, float("nan") if gauss is None else gauss]
    _, keys, position, has_gauss, cached_gauss = np.random.get_state()
    numpy = [*keys.tolist(), position, has_gauss, cached_gauss]
    found = {
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor(numpy, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_generators(saved: Mapping[str, Tensor]) -> None:
    """Set the random generators to the states that `generators` returned.

    Generators that are missing in `saved` keep their states. States of generators that this machine
    does not have are ignored.

    Raises:
        ValueError: a value that is not the state of a generator.
    """
    mine = generators()
    for kind, state in saved.items():
        if kind not in mine:
            continue
        needed = mine[kind]
        if state.shape != needed.shape or state.dtype != needed.dtype:
            raise ValueError(
                f"the stored random generator '{kind}' has {tuple(state.shape)} {state.dtype}, and "
                f"needs {tuple(needed.shape)} {needed.dtype}"
            )
    try:
        if "python" in saved:
            version, *words, gauss = saved["python"].tolist()
            words = tuple(int(word) for word in words)
            random.setstate((int(version), words, None if math.isnan(gauss) else gauss))
        if "numpy" in saved:
            *keys, position, has_gauss, cached_gauss = saved["numpy"].tolist()
            # fp64 held the words, and the generator takes integers of 32 bits.
            key_array = np.array(keys, dtype=np.uint32)
            np.random.set_state(("MT19937", key_array, int(position), int(has_gauss), cached_gauss))
        if "torch" in saved:
            torch.set_rng_state(saved["torch"])
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"a stored random generator cannot be restored: {error}") from None
