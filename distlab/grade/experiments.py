"""What a child process does with a submission: train through its hooks, and note what happens.

Each function gets a `Place` and returns tensors, numbers and strings, which the child saves and the
parent judges. Nothing here decides what is right: a submission may have changed torch's functions
in this process.
"""

import gc
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade.hooks import GATHER, Part, function_of, result_of
from distlab.grade.models import (
    LEARNING_RATE,
    WIDTH,
    Branches,
    PlainLinear,
    Words,
    batch_of,
    loss_of,
    word_loss,
    words_of,
)
from distlab.measure.collectives import CollectiveRecorder

Noted = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A rank on which an experiment runs.

    Attributes:
        module: the submission's module of hooks.
        folder: the copy of the submission.
        part: part that is examined.
        rank, ranks: position of this process, and their number.
        device: device to train on.
    """

    module: ModuleType
    folder: Path
    part: Part
    rank: int
    ranks: int
    device: torch.device

    def hook(self) -> Callable[..., Any]:
        """Return the part's function."""
        return function_of(self.module, self.part.hook)

    def make(self, *arguments: Any, **options: Any) -> Any:
        """Call the part's function, and return what it makes."""
        return result_of(self.module, self.part.hook, *arguments, **options)

    def finish(self, model: Any, optimizer: Any) -> None:
        """Call the hook that a training loop calls after backward."""
        function_of(self.module, self.part.after)(model, optimizer)


def import_hooks(place: Place) -> Noted:
    """Note nothing: `place` has the module of hooks, so its import did not fail."""
    return {}


# -- data parallelism ------------------------------------------------------------------------------


def train_wrapped(
    place: Place,
    form: str,
    bucket_size_mb: float | None,
    backwards: int = 1,
    sets_to_none: bool = True,
    unequal_batches: bool = False,
    in_subgroup: bool = False,
    width: int = WIDTH,
) -> Noted:
    """Train two steps of `Branches` under a data-parallel wrapper.

    Args:
        form: form of the model.
        bucket_size_mb: size for a wrapper with buckets; other wrappers do not get it.
        backwards: number of backwards per step, each followed by the hook that finishes it.
        sets_to_none: form of `zero_grad`.
        unequal_batches: True to give rank r r more examples than rank 0.
        in_subgroup: True to wrap in a group without rank 0. That rank then does not train.
        width: width of the layers. Wide ones fill the buckets that wrappers have by default.
    """
    module = Branches(form, place.rank, is_last=place.rank == place.ranks - 1, width=width)
    module.to(place.device)
    group = None
    if in_subgroup:
        # Every rank must call new_group, also the one that is left out.
        group = dist.new_group(list(range(1, place.ranks)))
        if place.rank == 0:
            return {"is_left_out": True}
    named = dict(module.named_parameters())  # before wrapping, which may rename them
    log: list[str] = []
    recorder = CollectiveRecorder()
    for name, parameter in named.items():
        if parameter.requires_grad:
            _note_gradients(name, parameter, log, recorder)
    model = _wrapped(place, module, bucket_size_mb, group)
    keeps_tensors = width == WIDTH  # those of wide layers would take long to save
    noted: Noted = {"initial": _values(module) if keeps_tensors else {}, "steps": []}
    optimizer = torch.optim.SGD(
        [each for each in module.parameters() if each.requires_grad], lr=LEARNING_RATE
    )
    # Unequal batches tell a mean over ranks from a mean over examples.
    examples = 4 + place.rank if unequal_batches else 4
    for step in range(2):
        before = _values(module) if keeps_tensors else {}
        optimizer.zero_grad(set_to_none=sets_to_none)
        # The log is of one step, and the recorder's calls go on through both.
        log.clear()
        first_call = len(recorder.calls)
        with recorder:
            for number in range(backwards):
                inputs, targets = batch_of(place.rank, step * backwards + number, examples)
                # The course's training loop calls this hook before each forward of a wrapper with
                # buckets.
                if place.part.before:
                    function_of(place.module, place.part.before)(model, optimizer)
                outputs = model(inputs.to(place.device))
                loss_of(outputs, targets.to(place.device)).backward()
                log.append("backward ends")
                place.finish(model, optimizer)
        gradients = {}
        for name, parameter in named.items() if keeps_tensors else ():
            gradients[name] = None if parameter.grad is None else parameter.grad.detach().clone()
        # The parent reads files with weights_only, which admits no objects of the recorder's class.
        calls = [
            (call.op, call.bytes, str(call.dtype), call.numel)
            for call in recorder.calls[first_call:]
        ]
        noted["steps"].append(
            {
                # The parent computes the expected gradients from these parameters.
                "before": before,
                "gradients": gradients,
                "calls": calls,
                "log": _relative(log, first_call),
            }
        )
        optimizer.step()
    noted["final"] = _values(module) if keeps_tensors else {}
    return noted


def _note_gradients(
    name: str, parameter: nn.Parameter, log: list[str], recorder: CollectiveRecorder
) -> None:
    """Note in a log when a parameter's gradient is complete, and how much was sent by then."""

    def note(_: Tensor) -> None:
        log.append(f"{len(recorder.calls)} {name}")

    # The hook runs when the gradient is complete. A collective that was issued by then overlaps
    # with backward.
    parameter.register_post_accumulate_grad_hook(note)


def _relative(log: list[str], first_call: int) -> list[str]:
    """Return a log whose numbers of calls count from the first call of the step."""
    lines = []
    for line in log:
        number, _, name = line.partition(" ")
        lines.append(f"{int(number) - first_call} {name}" if number.isdigit() else line)
    return lines


def _wrapped(
    place: Place, module: nn.Module, bucket_size_mb: float | None, group: Any = None
) -> Any:
    """Wrap a module as the part's hook does it."""
    arguments: list[Any] = [module]
    if place.part.before:  # buckets
        arguments.append(bucket_size_mb)
    if group is None:
        return place.make(*arguments)
    return place.make(*arguments, **{group_parameter(place.hook()): group})


def group_parameter(hook: Callable[..., Any]) -> str:
    """Return the name under which a function takes a process group; empty if it takes none."""
    try:
        parameters = inspect.signature(hook).parameters
    except (TypeError, ValueError):
        return ""
    for name in ("process_group", "group"):
        if name in parameters:
            return name
    return ""


def takes_group(place: Place) -> Noted:
    """Note whether the part's hook takes a process group."""
    return {"takes_group": bool(group_parameter(place.hook()))}


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters and buffers."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def train_long(place: Place, bucket_size_mb: float | None) -> Noted:
    """Train 50 steps, and count the tensors that are alive after each."""
    module = Branches("plain", seed=place.rank).to(place.device)
    model = _wrapped(place, module, bucket_size_mb)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    alive = []
    for step in range(50):
        # Four batches are repeated: values do not matter here, and the count of steps does.
        inputs, targets = batch_of(place.rank, step % 4)
        optimizer.zero_grad()
        if place.part.before:
            function_of(place.module, place.part.before)(model, optimizer)
        loss_of(model(inputs.to(place.device)), targets.to(place.device)).backward()
        place.finish(model, optimizer)
        optimizer.step()
        # Counting looks at every object of the process, so it is done after every tenth step.
        if step % 10 == 9:
            # Cycles that the collector would free are no leak.
            gc.collect()
            alive.append(sum(1 for each in gc.get_objects() if is_tensor(each)))
    return {"alive": alive}


def is_tensor(value: Any) -> bool:
    """Return whether an object is a tensor, without running code of its class."""
    return issubclass(type(value), Tensor)


# -- sharded optimizer -----------------------------------------------------------------------------

SHAPES = ((24, 16), (24, 16), (16,), (24, 16), (24, 16), (16,), (24, 16), (24, 16))
# Values differ from AdamW's defaults, so that an option that is lost changes the result.
ADAMW = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}


def parameters_of(shapes: tuple[tuple[int, ...], ...]) -> list[nn.Parameter]:
    """Return parameters of these shapes, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Set the gradients of a step, the same on every rank, as after an all-reduce."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            parameter.grad = gradient.to(parameter.device)


def train_optimizer(place: Place, scenario: str) -> Noted:
    """Make steps with the sharded optimizer.

    Args:
        scenario: what is hard, see `run_optimizer`.
    """
    shapes = ((24, 16),) if scenario == "one parameter" else SHAPES
    parameters = parameters_of(shapes)
    for parameter in parameters:
        # `.data` keeps the parameter objects, which the optimizer and the gradients refer to.
        parameter.data = parameter.data.to(place.device)

    def make(params: Any, **options: Any) -> Any:
        return place.make(params, torch.optim.AdamW, **options)

    noted = run_optimizer(scenario, parameters, make)
    optimizer = noted.pop("optimizer")
    noted["state_bytes"] = state_bytes(optimizer, parameters)
    noted["values"] = [each.detach().cpu().clone() for each in parameters]
    return noted


def run_optimizer(scenario: str, parameters: list[nn.Parameter], make: Callable[..., Any]) -> Noted:
    """Make the steps of a scenario. The parent does the same with AdamW itself.

    Args:
        scenario: `steps`, `groups`, `late group`, `scheduler`, `closure`, `round trip`, `frozen` or
            `one parameter`.
        parameters: parameters to train.
        make: optimizer class or function, called as `torch.optim.AdamW` is.
    """
    noted: Noted = {}
    if scenario == "groups":
        # Each group overrides one option, and takes the other from the defaults.
        groups = [
            {"params": parameters[:3], "lr": 0.2},
            {"params": parameters[3:], "weight_decay": 0.0},
        ]
        optimizer = make(groups, **ADAMW)
    elif scenario == "late group":
        optimizer = make(parameters[:4], **ADAMW)
        optimizer.add_param_group({"params": parameters[4:], "lr": 0.2})
    else:
        if scenario == "frozen":
            parameters[1].requires_grad_(False)
        optimizer = make(parameters, **ADAMW)
    scheduler = None
    if scenario == "scheduler":
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)
    for step in range(3):
        optimizer.zero_grad()
        set_gradients(parameters, step)
        # The default argument binds this step's number now, not when the closure is called.
        if scenario == "closure":

            def closure(step: int = step) -> Tensor:
                with torch.enable_grad():
                    set_gradients(parameters, step)
                # The loss differs from step to step, so that an old one is noticed.
                return torch.tensor(float(10 + step))

            loss = optimizer.step(closure)
            noted["loss"] = None if loss is None else float(loss)
        else:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        # After two of three steps the moments are not zero, and the third step needs them.
        if scenario == "round trip" and step == 1:
            state = optimizer.state_dict()
            optimizer = make(parameters, **ADAMW)
            optimizer.load_state_dict(state)
    # The caller takes the optimizer out again, after it has counted the state.
    noted["optimizer"] = optimizer
    return noted


def state_bytes(optimizer: Any, parameters: list[nn.Parameter]) -> int:
    """Return the bytes of floating-point tensors that an optimizer keeps, besides the parameters.

    A sharded optimizer may keep its state in an optimizer of its own. So all that is reachable from
    the object's attributes is counted, once for each storage.
    """
    skipped = set()  # storages, because parameters may be parts of one flat vector
    # Parameters and gradients are not state, although an optimizer refers to them.
    for parameter in parameters:
        skipped.add(parameter.untyped_storage().data_ptr())
        if parameter.grad is not None:
            skipped.add(parameter.grad.untyped_storage().data_ptr())
    storages: dict[int, int] = {}
    seen: set[int] = set()
    # A list takes the place of recursion, because objects of a submission may be nested deeply.
    waiting: list[Any] = [optimizer]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_tensor(value):
            storage = value.untyped_storage()
            # Steps are counted in tensors of one element, which every rank may have.
            if value.numel() > 1 and storage.data_ptr() not in skipped:
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set):
            waiting.extend(value)
        elif isinstance(value, torch.optim.Optimizer):
            waiting.extend([vars(value), value.state])
    return sum(storages.values())


# -- FSDP ------------------------------------------------------------------------------------------


def layers_of_course() -> tuple[type[nn.Module], type[nn.Module]]:
    """Return classes of linear layer and embedding: the course's own, if the submission has them.

    A submission's FSDP may shard layers of those classes alone.
    """
    # The submission's folders are on the path of imports only in a child process.
    try:
        from cs336_basics.model import Embedding, Linear  # type: ignore[import-not-found]
    except ImportError:
        return PlainLinear, nn.Embedding
    return Linear, Embedding


def train_fsdp(
    place: Place, compute_dtype: str = "", is_tied: bool = False, is_frozen: bool = False
) -> Noted:
    """Train two steps of `Words` under FSDP, and note what is held when.

    Args:
        compute_dtype: name of a dtype in torch; empty for none.
        is_tied, is_frozen: as in `Words`.
    """
    linear, embedding = layers_of_course()
    module = Words(place.rank, linear, embedding, is_tied, is_frozen).to(place.device)
    model = _wrapped_fsdp(place, module, compute_dtype)
    gather = function_of(place.module, GATHER)
    # Otherwise this name would keep parameters alive that the wrapper has replaced.
    del module
    held = _Held(model, place.device)
    noted: Noted = {
        "held_bytes": held.bytes_at_rest(),
        "steps": [],
        # Parameters are gathered before the first step and after each, so there are three.
        "full": [_gathered(gather, model)],
    }
    noted["parameters"] = [
        (local_shape(each), str(each.dtype), each.requires_grad) for each in model.parameters()
    ]
    optimizer = torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE
    )
    recorder = CollectiveRecorder()
    for step in range(2):
        optimizer.zero_grad()
        words, targets = words_of(place.rank, step)
        first_call = len(recorder.calls)
        held.start()
        # The recorder is on during forward and backward, and off where the parameters are gathered.
        with recorder:
            logits = model(words.to(place.device))
            after_forward = held.bytes_at_rest()
            calls_of_forward = len(recorder.calls) - first_call
            # Only the forward's peak is judged: backward holds gradients in addition.
            held.stop()
            word_loss(logits, targets.to(place.device)).backward()
            place.finish(model, optimizer)
        after_backward = held.bytes_at_rest()
        gradients = []
        for parameter in model.parameters():
            gradient = parameter.grad
            shape = None if gradient is None else local_shape(gradient)
            dtype = "" if gradient is None else str(gradient.dtype)
            gradients.append((local_shape(parameter), shape, dtype, parameter.requires_grad))
        noted["steps"].append(
            {
                "calls": [(call.op, call.bytes) for call in recorder.calls[first_call:]],
                "calls_of_forward": calls_of_forward,
                "held_in_forward": held.most,
                "held_after_forward": after_forward,
                "held_after_backward": after_backward,
                "gradients": gradients,
                "dtypes": held.dtypes,
            }
        )
        # Their graph would count as held.
        del logits
        optimizer.step()
        noted["full"].append(_gathered(gather, model))
    return noted


def local_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the part of a tensor that this rank has, also of a DTensor."""
    # By the name of the method: the import of DTensor takes a second.
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tuple(tensor.shape)


def _wrapped_fsdp(place: Place, module: nn.Module, compute_dtype: str) -> Any:
    if not compute_dtype:
        return place.make(module)
    return place.make(module, compute_dtype=getattr(torch, compute_dtype))


def _gathered(gather: Callable[..., Any], model: Any) -> dict[str, Any]:
    """Return all parameters in full, by the submission's own function.

    They are lists of numbers, so that `_Held` does not count them as held.
    """
    return {name: each.detach().float().cpu().tolist() for name, each in gather(model).items()}


def _workspace_bytes(device: torch.device) -> int:
    """Return the bytes of cuBLAS's workspaces, after making them.

    cuBLAS takes one for each thread at its first product, and keeps it: in the forward's thread and
    in the backward's, 64 MiB on an H200.
    """
    before = torch.cuda.memory_allocated(device)
    layer = nn.Linear(64, 64, device=device)
    # Products with and without a bias, in the dtypes that a wrapper may compute in.
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight = layer.weight.to(dtype)
        x = torch.ones(64, 64, device=device, dtype=dtype)
        out = nn.functional.linear(x, weight, layer.bias.to(dtype)) + x @ weight
        out.sum().backward()
    del layer, weight, x, out
    gc.collect()
    return torch.cuda.memory_allocated(device) - before


class _Held:
    """Bytes of parameters that a process holds, and the most of them during a forward.

    On a GPU it is what torch has allocated, without cuBLAS's workspaces. On a CPU every tensor that
    is alive counts, once for each storage, if it is as large as a shard or larger. Activations of
    four examples are smaller than that.
    """

    SMALLEST = 512  # elements; a shard has at least 64 · 48 / 3

    def __init__(self, model: Any, device: torch.device) -> None:
        self.device = device
        self._workspace_bytes = _workspace_bytes(device) if device.type == "cuda" else 0
        self.most = 0
        self.dtypes: list[str] = []
        self.is_on = False
        for layer in model.modules():
            # The layers themselves. Some wrappers have taken their weights away by now.
            if not list(layer.children()):
                layer.register_forward_hook(self._note)

    def _note(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self.is_on:
            self.most = max(self.most, self.bytes())
            self.dtypes.append(str(output.dtype))

    def start(self) -> None:
        """Begin to note."""
        self.most, self.dtypes, self.is_on = 0, [], True

    def stop(self) -> None:
        """End it."""
        self.is_on = False

    def bytes_at_rest(self) -> int:
        """Return the bytes that are held between computations.

        The thread of gloo that ran a collective lets go of its tensors at any moment after the call
        has returned, so the smallest of three counts is taken.
        """
        counts = []
        for _ in range(3):
            counts.append(self.bytes())
            time.sleep(0.02)
        return min(counts)

    def bytes(self) -> int:
        """Return the bytes that are held now."""
        # Tensors in cycles are not held by anything, but still alive.
        gc.collect()
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self._workspace_bytes
        storages = {}
        for each in gc.get_objects():
            # A DTensor has no storage of its own. Its part on this rank is another tensor.
            is_plain = is_tensor(each) and not hasattr(type(each), "to_local")
            if is_plain and each.is_floating_point() and each.numel() >= self.SMALLEST:
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())
