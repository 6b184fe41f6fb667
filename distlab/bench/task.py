"""A training task: a model, its data and its loss.

The model is the lab's Transformer, or a user's model that a factory builds.

A factory is a function without arguments, named `package.module:function`, that returns three
things:

    def build():
        model = ResNet(...)                 # any nn.Module, on the CPU

        def batch(size, generator):         # a batch of `size` examples, in any form
            images = torch.randn(size, 3, 32, 32, generator=generator)
            return images, torch.randint(10, (size,), generator=generator)

        def loss(model, batch):             # the module under a strategy → a scalar, a mean
            images, labels = batch
            return F.cross_entropy(model(images), labels)

        return model, batch, loss

Where batches have different numbers of tokens that count, `loss` returns (sum, count): the sum of
the losses, and that number. The gradient of a step is then that of the mean over all tokens.

The lab seeds torch before it calls the factory, and `generator` by rank and step; tensors of a
batch are put on the device. `loss` must call the model that it is given, through which gradients
are synchronised.
"""

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distlab.cli_errors import is_out_of_memory
from distlab.comm import RankContext, collectives
from distlab.model.config import ModelChanges, ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.options import Options, option
from distlab.parallel import Strategy
from distlab.parallel.layout import Axes
from distlab.train.data import SyntheticTokens
from distlab.train.step import Loss, LossFunction, loss_in_head, mean_loss, next_token_loss

BATCHES = 4  # number of different batches of a benchmark, which are used one after the other
# Folders whose files are not the user's: those of this repository's packages, of Python and of
# installed packages.
NOT_THE_USERS = (
    Path(__file__).parents[1],
    Path(__file__).parents[2] / "experiments",
    Path(__file__).parents[2] / "launch",
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
)


@dataclass(frozen=True)
class Task:
    """A training task, to time a strategy or to compare it with one process.

    Args:
        build: function `build(seed, device)` that returns the model.
        batches: function `batches(rank, step, device)` that returns the micro-batches of one rank
            in one step.
        loss_fn: loss function, see `TrainStep`.
        lr: learning rate of SGD, where parameters are compared.
    """

    build: Callable[[int, torch.device], nn.Module]
    batches: Callable[[int, int, torch.device], list[Any]]
    loss_fn: LossFunction = next_token_loss
    lr: float = 0.1


def synthetic_task(shape: ModelConfig, batch: int, seed: int = 0) -> Task:
    """Return the Transformer on synthetic tokens, with `batch` sequences per rank and step."""

    def build(seed: int, device: torch.device) -> nn.Module:
        return TransformerLM(shape, device=device, seed=seed)

    def batches(rank: int, step: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        tokens = SyntheticTokens(
            shape.vocab_size, batch, shape.context_length, seed=seed, rank=rank, device=device
        )
        return [tokens.batch(step)]

    return Task(build, batches, loss_in_head)


def shared_batches(task: Task, axes: Axes, context: RankContext, step: int) -> list[Any]:
    """Return a rank's micro-batches of a step.

    Ranks that share a model have the sequences of all of them, or parts of these.
    """
    ranks = axes.layout.ranks
    if ranks == 1:  # there may be no process group, and none is needed
        return task.batches(context.rank, step, context.device)
    first = axes.batch_rank * ranks
    of_members = [
        task.batches(member, step, context.device) for member in range(first, first + ranks)
    ]
    shared = []
    # Concatenated along the batch. `axes.share` then takes the part of this rank, if ranks share a
    # sequence.
    for batches in zip(*of_members, strict=True):  # one micro-batch of each member
        tensors = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        shared.append(axes.share(tensors))
    return shared


@dataclass(frozen=True)
class OwnModel(Options):
    """The option of benchmarks that can step a user's model.

    Raises ValueError for a name of another form.
    """

    factory: str | None = option(
        None, "your own model: package.module:function, see docs/learn/own_model.md", flag="--model"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factory is not None:
            check_name(self.factory)
            if getattr(self, "compile", "off") == "blocks":
                # The default on GPUs is for the lab's blocks. `check_given` refuses it if it was
                # asked for.
                object.__setattr__(self, "compile", "off")

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for options of the lab's Transformer given together with `--model`."""
        of_ours = (
            "size",
            *(each.name for each in fields(ModelChanges) if each.name != "compile"),
            "checkpointing",
        )
        if given.get("factory") and given.get("compile") == "blocks":
            raise ValueError(
                "--compile blocks is for the lab's Transformer; with --model give model or off"
            )
        idle = [name for name in of_ours if name in given]
        if given.get("factory") and idle:
            raise ValueError(
                f"--{idle[0].replace('_', '-')} is of the lab's Transformer, and --model gives "
                "another model: leave one of them out"
            )


def check_name(name: str, flag: str = "--model") -> None:
    """Raise ValueError unless this, given by `flag`, has the form `package.module:function`."""
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise ValueError(
            f"{flag} {name}: give package.module:function, such as my_package.my_module:build"
        )
    if module.endswith(".py"):
        named = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ValueError(f"{flag} {name}: give the module, not its file: {named}:{function}")


@lru_cache(maxsize=8)
def factory_of(name: str, flag: str = "--model") -> Callable[..., Any]:
    """Return the function with this name, which was given by `flag`.

    Its module is first looked up in the working directory.

    Raises:
        ValueError: the module cannot be imported, or has no such function.
    """
    check_name(name, flag)
    module, _, function = name.partition(":")
    # As `python -m` does, so that the user's module is found without an installation.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with blamed(name, f"the import of {module}", flag):
        found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"{flag} {name}: {module} has no function {function!r}")
    return found


def source_of(factory: Callable[..., Any]) -> str:
    """Return the file in which a factory is written, or that of a module that imports it."""
    module = inspect.unwrap(factory).__module__
    return sys.modules[module].__file__ or ""


def made(name: str, seed: int = 0) -> tuple[nn.Module, Callable[..., Any], LossFunction]:
    """Module, batch and loss of a factory, from torch's generator seeded.

    Raises:
        ValueError: the factory failed, or returned something else.
    """
    factory = factory_of(name)
    torch.manual_seed(seed)
    with blamed(name, f"{name.partition(':')[2]}()"):
        found = factory()
    good = isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], nn.Module)
    if not good or not all(map(callable, found[1:])):
        kinds = ", ".join(
            type(each).__name__ for each in (found if isinstance(found, tuple) else (found,))
        )
        raise ValueError(
            f"--model {name}: build() must return (module, batch, loss): an nn.Module, batch(size, "
            f"generator) and loss(model, batch); it returned {kinds}"
        )
    if not any(parameter.requires_grad for parameter in found[0].parameters()):
        raise ValueError(f"--model {name}: the module has no parameter to train")
    return found


def seed_generators(seed: int) -> None:
    """Seed torch's generators of the CPU, and of the GPUs if this process has begun to use them.

    `torch.manual_seed` takes a millisecond without a GPU: for each kind of accelerator it notes the
    stack of the call, in case that one is used later. A small step would be measured with it.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def own_task(name: str, batch_size: int, seed: int = 0) -> Task:
    """Return a user's model as a task, with one micro-batch per step.

    Dropout draws what (rank, step) say, on ranks as in the one process that they are held against.
    """
    _, batch, loss = made(name, seed)

    def batches(rank: int, step: int, device: torch.device) -> list[Any]:
        # One number from three. SeedSequence mixes them, so that neighbouring steps do not draw
        # related numbers.
        key = int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])
        examples = batch(batch_size, torch.Generator().manual_seed(key))
        return [
            (key, tree_map(lambda each: each.to(device) if hasattr(each, "to") else each, examples))
        ]

    def loss_fn(model: nn.Module, keyed: tuple[int, Any]) -> Loss:
        key, examples = keyed
        # Before every call of the loss, so that dropout on a rank and in the reference draws
        # equally.
        seed_generators(key)
        return loss(model, examples)

    return Task(lambda seed, device: made(name, seed)[0].to(device), batches, loss_fn, lr=1e-2)


@lru_cache(maxsize=8)
def num_parameters(name: str) -> int:
    """Trainable parameters of a user's model."""
    return sum(
        parameter.numel() for parameter in made(name)[0].parameters() if parameter.requires_grad
    )


def refusal(strategy: Strategy, unused: Sequence[frozenset[str]]) -> str | None:
    """Return why a strategy does not admit a model, in one sentence. None if it does.

    Args:
        unused: names of parameters without a gradient, see `examined`.
    """
    ever = frozenset().union(*unused)
    if not ever or strategy.may_leave_unused:
        return None
    some = f"{min(ever)!r}" + (f" and {len(ever) - 1} more parameters" if len(ever) > 1 else "")
    # Units are gathered in an order that all ranks must share. A fixed set of unused parameters
    # does not change it.
    if strategy.casts_parameters:
        if len(set(unused)) == 1:
            return None
        return (
            f"{strategy.name} gathers the same units on every rank, and {some} are used by some "
            "batches only"
        )
    return (
        f"{strategy.name} waits for a gradient of every parameter, and {some} get none from "
        "some batches"
    )


def examined(name: str, task: Task, context: RankContext, seed: int = 0) -> list[frozenset[str]]:
    """Try the model on every batch of this rank, before anything is timed; call it on every rank.

    Returns:
        For each batch of each rank, the parameters without a gradient.

    Raises:
        ValueError: the user's code failed, with its place, or the loss is not a scalar with a
            gradient, or one seed gives different batches.
    """
    module = task.build(seed, context.device)
    trainable = {key: value for key, value in module.named_parameters() if value.requires_grad}
    unused = []
    for step in range(BATCHES):
        # None and not zeros: a parameter that the batch does not use must keep no gradient.
        module.zero_grad(set_to_none=True)
        with blamed(name, "batch(size, generator)"):
            (batch,) = task.batches(context.rank, step, context.device)
            # The generator is seeded by rank and step, so a second call has one of the same seed.
            (again,) = task.batches(context.rank, step, context.device)
        # A comparison with one process draws each batch again there.
        if not _same_tensors(batch, again):
            raise ValueError(
                f"--model {name}: batch(size, generator) returned different batches for one seed: "
                "draw with generator=generator"
            )
        with blamed(name, "loss(model, batch)"):
            loss = mean_loss(task.loss_fn(module, batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else type(loss).__name__
            )
            raise ValueError(
                f"--model {name}: loss(model, batch) must return a scalar tensor with a gradient, "
                f"or such a sum and a count, not {what}"
            )
        with blamed(name, "backward of the loss"):
            loss.backward()
        unused.append(frozenset(key for key, value in trainable.items() if value.grad is None))
    everyone = collectives.gather_objects(unused, context.group)
    return [each for rank in everyone for each in rank]


def _same_tensors(first: Any, second: Any) -> bool:
    """Return True if two batches hold the same dense tensors. Other objects are not compared."""
    ours = [each for each in tree_leaves(first) if isinstance(each, Tensor)]
    theirs = [each for each in tree_leaves(second) if isinstance(each, Tensor)]
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        # Sparse and nested tensors have no elementwise comparison.
        if one.layout != torch.strided or other.layout != torch.strided:
            continue
        if one.shape != other.shape:
            return False
        # A NaN differs from itself, and may be the same one in both.
        if ((one != other) & (one == one)).any():
            return False
    return True


@contextmanager
def blamed(name: str, what: str, flag: str = "--model") -> Iterator[None]:
    """Turn an error of the user's code into one line that says where it was raised."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # The last line of the stack that is in a file of the user's, and not in Python, torch or
        # the lab.
        places = [
            f" at {Path(each.filename).name}:{each.lineno}"
            for each in traceback.extract_tb(error.__traceback__)
            if Path(each.filename).is_file()
            and not any(map(Path(each.filename).is_relative_to, NOT_THE_USERS))
        ]
        said = (str(error).strip().splitlines() or [""])[0]
        place = places[-1] if places else ""
        raise ValueError(
            f"{flag} {name}: {what} failed{place} ({type(error).__name__}: {said})"
        ) from error
