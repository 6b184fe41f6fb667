"""Who may import whom, held against the syntax tree of every file.

The layers, outer to inner: launch → experiments → distlab → kernels; a layer imports those further in. Inside
distlab only the edges below. Imports inside functions and under TYPE_CHECKING count like any other. Two more
rules: one file makes CUDA streams, one file reads the rank's environment variables.

A new package in distlab needs an entry in `ALLOWED_IN_DISTLAB`: decide there what it may know.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("launch", "experiments", "distlab", "kernels")
ANYTHING = frozenset({"*"})

# Unit of distlab → what it may import of distlab and kernels, besides itself. Entries cover what lies below
# them.
ALLOWED_IN_DISTLAB: dict[str, frozenset[str]] = {
    "ending": frozenset(),
    "options": frozenset(),
    "experiment": frozenset({"distlab.comm", "distlab.options", "distlab.report", "distlab.hardware"}),
    "comm": frozenset({"distlab.ending"}),
    "hardware": frozenset(),
    "report": frozenset({"distlab.ending"}),
    "model": frozenset({"distlab.options"}),
    "parallel": frozenset({"distlab.comm"}),
    "measure": frozenset({"distlab.comm", "distlab.ending", "distlab.hardware"}),
    "theory": frozenset({"distlab.hardware", "kernels.cost"}),
    "simulate": frozenset({"distlab.comm", "distlab.parallel", "distlab.measure", "distlab.theory"}),
    "checkpoint": frozenset({"distlab.comm", "distlab.parallel.base", "distlab.parallel.shard"}),
    "train": frozenset(
        {"distlab.checkpoint", "distlab.parallel", "distlab.model", "distlab.measure", "distlab.theory"}
        | {"distlab.hardware", "distlab.comm", "distlab.options", "kernels.adamw"}
    ),
    "bench": frozenset(
        {"distlab.train", "distlab.parallel", "distlab.model", "distlab.measure", "distlab.hardware", "distlab.comm"}
    ),
    "testing": ANYTHING,
    "course": ANYTHING,
    "doctor": ANYTHING,
}
# One module may know more than the rest of its package.
ALLOWED_IN_MODULE = {
    "distlab.model.ops": frozenset({"kernels"}),
    "distlab.comm.copy_engine": frozenset({"kernels"}),
    "distlab.simulate.training": frozenset({"distlab.model", "distlab.train"}),
    "distlab.simulate.estimate": frozenset({"distlab.model", "distlab.hardware", "distlab.options"}),
}

STREAM_MAKER = "distlab.comm.collectives"
CAPTURER = "distlab.measure.clock"  # warms up and captures CUDA graphs beside the current stream
STREAM_CLASSES = {"Stream", "ExternalStream"}
RANK_READER = "distlab.comm.context"
RANK_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What a module breaks, one line of text each.

    Args:
        module: dotted name, e.g. `distlab.parallel.flat`; a package's `__init__` goes by the package's name.
        source: its text.
        is_package: whether it is an `__init__`, which relative imports start from differently.
    """
    tree = ast.parse(source)
    found = []
    for line, target in _imports(tree, module, is_package):
        reason = _forbidden(module, target)
        if reason:
            found.append(f"{module}:{line} imports {target}: {reason}")
    if module.split(".")[0] == "distlab" and module not in (STREAM_MAKER, CAPTURER):
        found += [f"{module}:{line} makes a stream: only {STREAM_MAKER} may" for line in _streams(tree)]
    if module != RANK_READER:
        found += [
            f"{module}:{line} reads {name}: only {RANK_READER} may, take a RankContext"
            for line, name in _rank_variable_reads(tree)
        ]
    return found


def _forbidden(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None."""
    layer, target_layer = module.split(".")[0], target.split(".")[0]
    if module == "kernels":
        return "kernels/__init__ imports nothing"
    if layer == "kernels":
        allowed = target_layer in {"kernels", "torch", "triton"} or target_layer in sys.stdlib_module_names
        return None if allowed else "kernels imports torch and triton only"
    if target_layer == "tests":
        return "tests are nobody's library"
    if target_layer not in LAYERS:
        return None  # third-party
    if LAYERS.index(target_layer) < LAYERS.index(layer):
        return f"{layer} lies further in than {target_layer}"
    if layer == target_layer == "experiments" and not _of_one_experiment(module, target):
        return "experiments do not import each other; share through distlab"
    return _forbidden_in_distlab(module, target) if layer == "distlab" else None


def _of_one_experiment(module: str, target: str) -> bool:
    """An experiment may be a package, or a file `x.py` whose pieces lie in `x_pieces/` and do not import it.

    A module whose name begins with an underscore is none: several experiments share it, and it imports none.
    """
    if target == "experiments":
        return True
    mine, other = (name.split(".")[1] if "." in name else "" for name in (module, target))
    return other in (mine, f"{mine}_pieces") or other.startswith("_")


def _forbidden_in_distlab(module: str, target: str) -> str | None:
    if module == "distlab":
        return "distlab/__init__ imports no part of the library, so that each part can be had alone"
    unit = module.split(".")[1]
    if unit not in ALLOWED_IN_DISTLAB:
        return f"distlab.{unit} is not in ALLOWED_IN_DISTLAB"
    allowed = ALLOWED_IN_DISTLAB[unit] | ALLOWED_IN_MODULE.get(module, frozenset())
    if allowed == ANYTHING or target == "distlab" or _lies_in(target, f"distlab.{unit}"):
        return None
    if any(_lies_in(target, entry) for entry in allowed):
        return None
    return f"{unit} may import {', '.join(sorted(allowed)) or 'no sibling'}"


def _lies_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of every import; `from a import b` gives `a.b` where b is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, _imported_name(base, alias.name)
        elif isinstance(node, ast.Call) and _last_name(node.func) in {"import_module", "__import__"}:
            yield from (
                (node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant)
            )


def _imported_name(base: str, name: str) -> str:
    """`from distlab import parallel` names the package, `from distlab import __version__` only the root."""
    return f"{base}.{name}" if base in LAYERS and not name.startswith("__") else base


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _streams(tree: ast.AST) -> Iterator[int]:
    """Lines that call `torch.cuda.Stream(…)`, `torch.Stream(…)` or a class imported under another name."""
    names = set(STREAM_CLASSES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.name in STREAM_CLASSES and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in names:
            yield node.lineno


def _rank_variable_reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Reads of torchrun's variables through `os.environ`, an alias of it, or `os.getenv`; not writes."""
    environ = {"environ"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _last_name(node.value) == "environ":
            environ |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            environ |= {alias.asname for alias in node.names if alias.name == "environ" and alias.asname}
    for node in ast.walk(tree):
        key: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice if _last_name(node.value) in environ else None
        elif isinstance(node, ast.Call) and node.args:
            method = _last_name(node.func)
            on_environ = isinstance(node.func, ast.Attribute) and _last_name(node.func.value) in environ
            if method == "getenv" or (on_environ and method in {"get", "pop", "setdefault"}):
                key = node.args[0]
        elif isinstance(node, ast.Compare) and _last_name(node.comparators[0]) in environ:
            key = node.left
        if isinstance(key, ast.Constant) and key.value in RANK_VARIABLES:
            yield node.lineno, str(key.value)


def _modules() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", _modules(), ids=_dotted)
def test_imports_follow_the_design(path: Path):
    found = violations(_dotted(path), path.read_text(), is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


def test_every_folder_of_tests_is_a_package():
    """Else pytest puts the folder itself on the path, and `import experiments` finds tests/experiments."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_all_layers_were_walked():
    walked = {_dotted(path) for path in _modules()}
    assert {"launch", "experiments", "distlab.comm.context", STREAM_MAKER, "kernels.cost"} <= walked


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("distlab.parallel.flat", "import distlab.model"),
        ("distlab.parallel.flat", "from distlab import model"),
        ("distlab.parallel.flat", "def f():\n    from distlab.measure.clock import x"),
        ("distlab.parallel.flat", "from ..measure import clock"),
        ("distlab.parallel.fsdp.unit", "from ...model import ops"),
        ("distlab.parallel.flat", "from kernels import adamw"),
        ("distlab.parallel.flat", "import importlib\nimportlib.import_module('distlab.train.loop')"),
        ("distlab.model.transformer", "from distlab.comm import RankContext"),
        ("distlab.model.transformer", "import kernels.rope"),
        ("distlab.comm.context", "from distlab.hardware import lookup"),
        ("distlab.hardware", "from distlab import report"),
        ("distlab.hardware", "from . import comm"),
        ("distlab.report.table", "if TYPE_CHECKING:\n    from distlab.measure import clock"),
        ("distlab.theory.gpu", "from kernels import matmul"),
        ("distlab.theory.gpu", "import kernels.matmul"),
        ("distlab.theory.memory.peak", "from distlab.model import ModelConfig"),
        ("distlab.simulate.world", "from distlab.train import step"),
        ("distlab.train.loop", "from distlab.report import Record"),
        ("distlab.train.loop", "import experiments.ddp"),
        ("distlab.testing", "from launch import ddp_bench"),
        ("distlab.testing", "import tests.conftest"),
        ("distlab.helpers", "from distlab.comm import context"),
        ("experiments.one", "from experiments import two"),
        ("experiments.one", "from experiments.two import run"),
        ("experiments.one", "from .two import run"),
        ("experiments.one", "from experiments.two_pieces.checks import examine"),
        ("experiments.one_pieces.checks", "from experiments.one import run"),
        ("experiments.one", "from launch import ddp_bench"),
        ("kernels.softmax", "import numpy"),
        ("kernels.softmax", "from distlab.hardware import lookup"),
        ("distlab.parallel.flat", "import torch\ns = torch.cuda.Stream(priority=-1)"),
        ("distlab.measure.trace.capture", "from torch.cuda import Stream as S\ns = S()"),
        ("distlab.train.loop", "import os\nrank = int(os.environ['RANK'])"),
        ("distlab.train.loop", "import os\nenv = os.environ\nrank = env.get('WORLD_SIZE', 1)"),
        ("launch.train", "import os\nhost = os.getenv('MASTER_ADDR')"),
        ("launch.train", "from os import environ\nhere = 'LOCAL_RANK' in environ"),
    ],
)
def test_the_checker_sees(module: str, source: str):
    assert violations(module, source)


@pytest.mark.parametrize("source", ["import torch", "from kernels.cost import Cost", "from . import cost"])
def test_the_checker_keeps_kernels_empty(source: str):
    assert violations("kernels", source, is_package=True)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("distlab.parallel.flat", "import torch\nfrom distlab.comm import collectives\nfrom .base import X"),
        ("distlab.model.ops", "def f():\n    from kernels.rope import rope"),
        ("distlab.theory.gpu", "from kernels.cost import Cost\nfrom kernels import cost"),
        ("distlab.theory.gpu", "from distlab.hardware import lookup\nfrom distlab import hardware"),
        ("distlab.report.record", "from distlab import __version__"),
        ("distlab.testing", "from distlab.parallel import FlatDDP\nfrom kernels import softmax"),
        ("experiments.one", "from distlab.train import step\nimport kernels.softmax"),
        ("experiments.one", "from experiments.one_pieces.checks import examine"),
        ("experiments.one_pieces.checks", "from .mistakes import MISTAKES"),
        ("experiments.one", "from experiments._shared import inputs"),
        ("launch.bench", "from experiments import one\nfrom distlab.report import Record"),
        ("kernels.softmax", "import math, torch, triton.language as tl\nfrom .cost import Cost"),
        (STREAM_MAKER, "import torch\ns = torch.cuda.Stream()"),
        ("distlab.measure.trace.capture", "import torch\ns = torch.cuda.current_stream()"),
        (RANK_READER, "import os\nos.environ['RANK']"),
        ("distlab.testing", "import os\nos.environ['RANK'] = '0'\nos.environ['HOME']"),
    ],
)
def test_the_checker_lets_pass(module: str, source: str):
    assert violations(module, source) == []
