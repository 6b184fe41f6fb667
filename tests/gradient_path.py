"""How much code one gradient runs through: `python -m tests.gradient_path [STRATEGY …]`.

Counts, for one weight and the second step on two gloo ranks (backward, finish, step, next forward):
the functions of ours that are entered, how often the next one lies in another file, and the code
tokens of these functions, and the files they are in. `distlab.comm` is one file, and a call into it
one function. Checks, which only read and raise, are counted apart.
"""

import ast
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import distlab
from distlab.comm import RankContext
from distlab.parallel import get_strategy
from distlab.testing import run_ranks
from tests.size import code_tokens

OURS = Path(distlab.__file__).parent
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "zero2", "fsdp")
# which Python 3.12 has inline
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Function(NamedTuple):
    """One that was entered: its file below distlab/, name, first line."""

    file: str
    name: str
    line: int


class Count(NamedTuple):
    functions: int
    changes_of_file: int
    tokens: int
    in_checks: int
    files: int


def walk(context: RankContext, strategy: str) -> list[Function]:
    """On one rank: the functions in the order in which the second step enters them."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    model, optimizer = get_strategy(strategy).build(module, context.group, torch.optim.AdamW)
    batch = torch.randn(4, 8)
    entered: list[Function] = []
    inside_comm = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside_comm
        code: CodeType = frame.f_code
        path = Path(code.co_filename)
        if (
            event not in ("call", "return")
            or OURS not in path.parents
            or code.co_name in COMPREHENSIONS
        ):
            return
        file = path.relative_to(OURS).as_posix()
        in_comm = file.startswith("comm/")
        if event == "call" and not inside_comm:
            entered.append(Function(file, code.co_qualname, code.co_firstlineno))
        inside_comm += in_comm * (1 if event == "call" else -1)

    loss = model(batch).square().mean()
    for step in range(2):
        if step == 1:
            sys.setprofile(profile)
        loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
    sys.setprofile(None)
    return entered


def count(strategy: str) -> Count:
    """Count on rank 0 of two."""
    entered = run_ranks(walk, 2, strategy)[0]
    outside = [function for function in entered if not is_check(function)]
    files = ["comm" if function.file.startswith("comm/") else function.file for function in outside]
    changes = sum(one != other for one, other in pairwise(files))
    all_files = {"comm" if each.file.startswith("comm/") else each.file for each in entered}
    return Count(
        functions=len({*outside}),
        changes_of_file=changes,
        tokens=sum(map(tokens, {*outside})),
        in_checks=len({*entered}) - len({*outside}),
        files=len(all_files),
    )


def is_check(function: Function) -> bool:
    """Return whether a function is in a file of checks."""
    return function.file.endswith("checks.py")


@cache
def tokens(function: Function) -> int:
    """The code tokens of a function, decorators included."""
    text = (OURS / function.file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = getattr(node, "decorator_list", [])
            if min([node.lineno, *(each.lineno for each in decorators)]) == function.line:
                return code_tokens(ast.get_source_segment(text, node)) + sum(
                    code_tokens(ast.get_source_segment(text, each)) + 1 for each in decorators
                )
    raise LookupError(f"{function} is not in its file")


def main(strategies: Sequence[str]) -> None:
    for strategy in strategies or STRATEGIES:
        print(
            strategy,
            *(
                f"{value} {name.replace('_', ' ')}"
                for name, value in count(strategy)._asdict().items()
            ),
        )
        if strategies:
            for function in run_ranks(walk, 2, strategy)[0]:
                print(shown(function))


def shown(function: Function) -> str:
    """Return a line of the walk. Checks are indented, since they do no work."""
    file = function.file.removeprefix("parallel/")
    indent = "    " if is_check(function) else ""
    return f"{indent}{file}:{function.line}  {function.name}"


if __name__ == "__main__":
    main(sys.argv[1:])
