"""The hook functions that a submission may have, and how a child process finds them.

A course's suite asks for functions of fixed names in `tests/adapters.py`. Their names differ
between years. A `Part` is what is examined as one thing, with the names of its functions.
"""

import dis
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ADAPTERS = Path("tests", "adapters.py")  # in a submission's folder, where `--adapters` is not given


@dataclass(frozen=True)
class Part:
    """A part of an assignment.

    Attributes:
        name: name in the report and for `--only`.
        kind: examination that it gets: `ddp`, `optimizer`, `fsdp`, `attention` or `rmsnorm`.
        hook: function without which the part is not handed in.
        after: function that is called after backward, for wrappers.
        before: function that is called before forward, if the part has one.
        years: years whose suite asks for it.
    """

    name: str
    kind: str
    hook: str
    after: str = ""
    before: str = ""
    years: tuple[int, ...] = (2024, 2025, 2026)


PARTS = (
    Part(
        name="ddp-individual",
        kind="ddp",
        hook="get_ddp_individual_parameters",
        after="ddp_individual_parameters_on_after_backward",
        years=(2024, 2025),
    ),
    Part(
        name="ddp-bucketed",
        kind="ddp",
        hook="get_ddp_bucketed",
        after="ddp_bucketed_on_after_backward",
        before="ddp_bucketed_on_train_batch_start",
        years=(2024, 2025),
    ),
    Part(name="ddp", kind="ddp", hook="get_ddp", after="ddp_on_after_backward", years=(2026,)),
    Part(name="sharded-optimizer", kind="optimizer", hook="get_sharded_optimizer"),
    Part(name="fsdp", kind="fsdp", hook="get_fsdp", after="fsdp_on_after_backward", years=(2026,)),
    Part(
        name="attention-pytorch",
        kind="attention",
        hook="get_flashattention_autograd_function_pytorch",
        years=(2025, 2026),
    ),
    Part(
        name="attention-triton",
        kind="attention",
        hook="get_flashattention_autograd_function_triton",
        years=(2025, 2026),
    ),
    Part(
        name="rmsnorm-pytorch",
        kind="rmsnorm",
        hook="get_rmsnorm_autograd_function_pytorch",
        years=(2024,),
    ),
    Part(
        name="rmsnorm-triton",
        kind="rmsnorm",
        hook="get_rmsnorm_autograd_function_triton",
        years=(2024,),
    ),
)
GATHER = "fsdp_gather_full_params"
PART_NAMES = tuple(part.name for part in PARTS)


class NotHandedIn(Exception):
    """Raised in a child where a hook function is missing, or is a stub."""


def is_left_out(error: NotImplementedError, folder: Path) -> bool:
    """Return whether a `raise` of the submission made this, so that the work is not handed in.

    torch raises the same class where an operator or a module's forward is missing. That is a
    mistake of a submission that was handed in, also where a line of the submission calls the
    operator: C++ has no frame of its own.

    Args:
        error: error that was raised while the submission ran, with its traceback.
        folder: the copy of the submission.
    """
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    code = innermost.tb_frame.f_code
    is_raise = code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    # Generated code has names such as `<string>`, which would count as files of the current folder.
    path = Path(code.co_filename)
    return is_raise and path.exists() and path.resolve().is_relative_to(folder.resolve())


def chosen(names: tuple[str, ...], year: int | None) -> list[Part]:
    """Return the parts to examine.

    Args:
        names: names of parts, or beginnings of such: `ddp` means all three forms. Empty: all.
        year: year of the suite; None for all years.

    Raises:
        ValueError: a name fits no part.
    """
    found = list(PARTS)
    if year is not None:
        found = [part for part in found if year in part.years]
    for name in names:
        if not any(part.name.startswith(name) for part in PARTS):
            raise ValueError(f"--only {name}: allowed are {', '.join(PART_NAMES)}")
    if names:
        found = [part for part in found if part.name.startswith(names)]
    return found


def load(folder: Path, adapters: str) -> ModuleType:
    """Import a submission's hooks. A child process calls this, and no other process may.

    Args:
        folder: the copy of the submission.
        adapters: name of a module in the folder; empty for `tests/adapters.py`.
    """
    sys.path.insert(0, str(folder))
    for each in sorted(folder.iterdir()):
        # In the course's own layout, packages lie in folders such as cs336-basics/cs336_basics.
        if each.is_dir() and (each / "pyproject.toml").is_file():
            sys.path.insert(1, str(each))
    if adapters:
        return importlib.import_module(adapters)
    # The lab has a package `tests` of its own, which an import of `tests.adapters` would find.
    package = ModuleType("tests")
    package.__path__ = [str(folder / ADAPTERS.parent)]
    sys.modules["tests"] = package
    return importlib.import_module(f"tests.{ADAPTERS.stem}")


def function_of(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a hook function.

    Raises:
        NotHandedIn: there is none of that name.
    """
    found = getattr(module, name, None)
    if not callable(found):
        raise NotHandedIn(f"there is no function {name}")
    return found


def result_of(module: ModuleType, name: str, *arguments: Any, **options: Any) -> Any:
    """Call a hook function and return its result.

    Raises:
        NotHandedIn: there is none of that name, or it returns None, as a stub of `...` does.
    """
    result = function_of(module, name)(*arguments, **options)
    if result is None:
        raise NotHandedIn(f"{name} returns None")
    return result
