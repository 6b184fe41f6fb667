"""Model and optimizer as named runs of elements: the one form in which every strategy's state is stored.

Each tensor is flattened, and this rank holds a contiguous run of it: all of it under data parallelism, a piece
under ZeRO or FSDP. A run is named by the parameter's own name and by where it starts in the unpadded whole, so
what one strategy wrote at one world size another reads at another, without anybody gathering anything.

Keys: `model/<parameter>` and `optimizer/<state>/<parameter>`, e.g. `optimizer/exp_avg/blocks.0.norm.weight`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.parallel.ownership import Owned

# How a step is computed, not what it computes: a checkpoint does not carry these over.
NOT_STORED = {"params", "foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class Run:
    """A contiguous run of elements of one stored tensor.

    Attributes:
        key: of the stored tensor.
        start: first element within the flattened whole.
        values: `(n,)`, a view of the live memory on its device.
        shape: of the whole tensor.
        replicated: every rank holds these very elements.
    """

    key: str
    start: int
    values: Tensor
    shape: tuple[int, ...]
    replicated: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()

    def share(self, rank: int, world_size: int) -> "Run":
        """What this rank writes: an N-th of what all ranks hold alike, and all of what it alone holds."""
        if not self.replicated:
            return self
        count = self.values.numel()
        first, last = rank * count // world_size, (rank + 1) * count // world_size
        return replace(self, start=self.start + first, values=self.values[first:last], replicated=False)


class Layout:
    """Where the state of a wrapped model and its optimizer lies on this rank.

    Args:
        wrapper: of `distlab.parallel`.
        optimizer: that steps it.
    """

    def __init__(self, wrapper: nn.Module, optimizer: Optimizer):
        self.wrapper = wrapper
        self.optimizer = optimizer

    def settle(self) -> None:
        """Wait until parameters are whole (ZeRO gathers them under the next forward) and buffers are alike.

        FSDP2 leaves its root gathered after a forward without backward: then the module's parameters are not those
        that the optimizer steps.
        """
        for module in self.wrapper.module.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        if any(True for _ in self.wrapper.module.buffers()):
            self.wrapper.sync_buffers()

    def model(self) -> list[Run]:
        """Every parameter and persistent buffer.

        Raises:
            ValueError: one that is not contiguous in memory.
        """
        runs = [_run(f"model/{held.name}", held, held.parameter) for held in held_by(self.wrapper)]
        for name, buffer in _persistent_buffers(self.wrapper.module):
            runs.append(Run(f"model/{name}", 0, flat(buffer, name), tuple(buffer.shape), replicated=True))
        return runs

    def optimizer_state(self) -> list[Run]:
        """Every tensor of the optimizer's state that this rank holds, scalars such as Adam's step included.

        Raises ValueError for state that is no tensor, which could not be stored.
        """
        runs = []
        for owned in stepped_by(self.wrapper, self.optimizer):
            for kind, value in self.optimizer.state.get(owned.parameter, {}).items():
                key = f"optimizer/{kind}/{owned.name}"
                if not isinstance(value, Tensor):
                    raise ValueError(f"{key} is a {type(value).__name__}; only tensors are stored")
                if value.ndim > 0 and value.shape == owned.parameter.shape:
                    runs.append(_run(key, owned, value))
                elif owned.start == 0 and flat(owned.parameter).numel() > 0:  # one number for the whole
                    runs.append(Run(key, 0, flat(value, key), tuple(value.shape), owned.replicated))
        return runs

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: options, and the names of their parameters."""
        names = {id(p): plain_name(name) for name, p in self.wrapper.module.named_parameters()}
        return [
            {key: value for key, value in group.items() if key not in NOT_STORED}
            | {"params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def room_for_state(
        self, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> tuple[dict[nn.Parameter, dict[str, Tensor]], list[Run]]:
        """Empty state tensors for what this rank steps, and the runs that fill them.

        Args:
            stored: every stored key → (shape, dtype).
        """
        kinds: dict[str, list[str]] = {}
        for key in stored:
            if key.startswith("optimizer/"):
                _, kind, name = key.split("/", 2)
                kinds.setdefault(name, []).append(kind)
        state: dict[nn.Parameter, dict[str, Tensor]] = {}
        runs = []
        for owned in stepped_by(self.wrapper, self.optimizer):
            for kind in kinds.get(owned.name, ()):
                key = f"optimizer/{kind}/{owned.name}"
                shape, dtype = stored[key]
                if shape == tuple(owned.shape) and len(shape) > 0:
                    value = torch.empty_like(owned.parameter, dtype=dtype, requires_grad=False)
                    runs.append(_run(key, owned, value))
                else:
                    value = torch.empty(shape, dtype=dtype)  # load_state_dict puts it where it belongs
                    runs.append(Run(key, 0, flat(value, key), shape))
                state.setdefault(owned.parameter, {})[kind] = value
        return state, runs

    def options(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The stored options of each group, in the types of this optimizer's.

        Args:
            saved_groups: what `groups` gave, out of JSON.

        Raises:
            ValueError: groups that hold other parameters, or options that are missing or of another type.
        """
        groups = self.groups()
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

    def load_state(
        self, options: Sequence[Mapping[str, Any]], state: dict[nn.Parameter, dict[str, Tensor]]
    ) -> None:
        """Give the optimizer the options of each group and the filled state of `room_for_state`."""
        if hasattr(self.optimizer, "load_owned"):
            self.optimizer.load_owned(options, state)
            return
        loaded: dict[str, Any] = {"state": {}, "param_groups": []}
        count = 0
        for group, changed in zip(self.optimizer.param_groups, options, strict=True):
            numbers = list(range(count, count + len(group["params"])))
            count += len(numbers)
            loaded["param_groups"].append({**group, **changed, "params": numbers})
            for number, parameter in zip(numbers, group["params"], strict=True):
                if parameter in state:
                    loaded["state"][number] = state[parameter]
        self.optimizer.load_state_dict(loaded)


def _kind(value: Any) -> Any:
    """What a stored option must share with a live one: JSON has one list for tuples, and 1 may stand for 1.0."""
    if isinstance(value, (list, tuple)):
        return [_kind(item) for item in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)


def held_by(wrapper: nn.Module) -> list[Owned]:
    """What this rank holds of every parameter of the wrapped model."""
    if hasattr(wrapper, "owned"):
        return [replace(owned, name=plain_name(owned.name)) for owned in wrapper.owned()]
    return [
        Owned(plain_name(name), parameter.shape, parameter, *_place(parameter))
        for name, parameter in wrapper.module.named_parameters()
    ]


def stepped_by(wrapper: nn.Module, optimizer: Optimizer) -> list[Owned]:
    """What this rank's optimizer steps, for every strategy alike."""
    if hasattr(optimizer, "owned"):
        return [replace(owned, name=plain_name(owned.name)) for owned in optimizer.owned()]
    held = [owned for owned in held_by(wrapper) if owned.parameter.requires_grad]
    if hasattr(optimizer, "owns"):  # parameters are on all ranks, their state is on the owner alone
        return [replace(owned, replicated=False) for owned in held if optimizer.owns(owned.parameter)]
    return held


def plain_name(name: str) -> str:
    """The parameter's name without what `torch.compile` of a block puts into it."""
    return name.replace("_orig_mod.", "")


def flat(tensor: Tensor, name: str = "a tensor") -> Tensor:
    """This rank's memory of a tensor as `(n,)`, a view.

    Raises:
        ValueError: it is not contiguous.
    """
    local = tensor.detach()
    if _is_dtensor(local):
        local = local.to_local()
    if not local.is_contiguous():
        raise ValueError(f"'{name}' is not contiguous in memory; checkpoints hold tensors in row-major order")
    return local.view(-1)


def _run(key: str, owned: Owned, value: Tensor) -> Run:
    return Run(key, owned.start, flat(value, key), tuple(owned.shape), owned.replicated)


def _place(parameter: Tensor) -> tuple[int, bool]:
    """(first element, replicated) of a parameter that is whole, or a DTensor cut along its first dimension."""
    if not _is_dtensor(parameter):
        return 0, True
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # takes a second

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if any(offset[1:]) or not all(p.is_replicate() or p.is_shard(0) for p in parameter.placements):
        raise ValueError(f"placements {parameter.placements}: only cuts along the first dimension are stored")
    row = torch.Size(parameter.shape[1:]).numel()
    replicated = all(p.is_replicate() for p in parameter.placements)
    return (offset[0] * row if offset else 0), replicated


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield plain_name(f"{path}.{name}" if path else name), buffer
