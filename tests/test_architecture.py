"""Who may import whom, held against the syntax tree of every file.

The layers, outer to inner: launch → experiments → examples → distlab → kernels; a layer imports
those further in. Experiments do not import each other; what some share begins with an underscore.
Inside distlab only the edges below. Imports inside functions and under TYPE_CHECKING count like any
other. Besides: only `STREAM_MAKERS` make CUDA streams, one module reads the rank's environment
variables, and outside `distlab.parallel` nothing in distlab asks for a strategy by its name: what
others must know of one is a field of its entry in `STRATEGIES`. A new package in distlab needs an
entry in `ALLOWED`: decide there what it may know.
"""

import ast
import re
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from distlab.parallel import STRATEGIES
from tests.commands import python

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("launch", "experiments", "examples", "distlab", "kernels")

# Unit of distlab → what it may import of distlab (and kernels), besides itself and what stands in
# COMMON.
COMMON = "cli_errors files options precision hardware text"
ALLOWED = {
    **dict.fromkeys(("files", "options", "precision", "hardware", "text"), ""),
    "cli_errors": "text",
    "comm": "",
    "report": "measure.interleaved",
    "model": "",
    "parallel": "comm",
    "measure": "comm",
    "theory": "",
    "optim": "parallel",
    "checkpoint": "comm parallel.shard parallel.model parallel.local_optimizer",
    "train": "checkpoint optim parallel model measure comm",
    "bench": "train checkpoint parallel model measure comm",
    "simulate": "train parallel model measure theory comm",
    "check": "bench train parallel comm",
    "kernel_check": "bench",
    "grade": "kernel_check measure comm report",
    "snapshot": "report",
    "trace": "measure report runs compare",
    "runs": "report",
    "compare": "runs report measure",
    "experiment": "checkpoint.lock comm measure.interleaved report runs",
}
ANYTHING = ("testing", "course", "doctor")
OF_ONE_MODULE = {  # may know more than the rest of its package
    "distlab.model.ops": ("kernels",),
    "distlab.comm.copy_engine": ("kernels.average",),
    "distlab.train.step": ("kernels.adamw",),
    "distlab.kernel_check.operations": ("kernels.reference",),
    "distlab.train.run": ("distlab.theory.flops",),
    "distlab.train.memory_budget": ("distlab.theory",),
}
STREAM_MAKERS = ("distlab.comm.collectives", "distlab.comm.copy_engine", "distlab.measure.clock")
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

# Modules that may write a name of `STRATEGIES`, and which.
NAMED = {
    **dict.fromkeys(  # naive attention
        (
            "bench.reference",
            "model.config",
            "model.ops",
            "theory.memory.activations",
            "simulate.estimate",
            "simulate.plan",
            "simulate.step",
        ),
        ("naive",),
    ),
    # parts of a course's assignment, which have these names there
    "grade.hooks": ("sharded-optimizer", "fsdp"),
    "grade.examination": ("fsdp",),
    # rows next to which a submission is timed
    "grade.as_wrapper": ("local", "naive", "overlap", "bucketed", "torch-ddp"),
    "train.config": ("bucketed",),  # the default of an option
    "bench.variant": ("local",),  # likewise
    "train.memory_budget": ("local", "fsdp"),  # likewise, and the advice where a model does not fit
    "simulate.case": ("fsdp",),  # the same advice
    # it is a fit to the steps of these four
    "simulate.calibrate": ("local", "naive", "flat", "overlap"),
    "runs": ("local",),  # the row that others are compared with
}


def violations(module, source, *, is_package=False):
    """What a module breaks, a line of text each.

    A package's `__init__` goes by the package's name.
    """
    tree = ast.parse(source)
    found = []
    for line, target in _imports(tree, module, is_package):
        reason = _forbidden(module, target)
        if reason:
            found.append(f"{module}:{line} imports {target}: {reason}")
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and module.startswith("distlab")
            and module not in STREAM_MAKERS
        ):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("Stream", "ExternalStream"):
                found.append(
                    f"{module}:{node.lineno} makes a stream: only {' and '.join(STREAM_MAKERS)} may"
                )
        if (
            module != RANK_READER
            and isinstance(node, ast.Constant)
            and node.value in RANK_VARIABLES
        ):
            found.append(
                f"{module}:{node.lineno} asks for {node.value}: only {RANK_READER} may, take a "
                "RankContext"
            )
    return found


def strategies_named(module, source):
    """The names of strategies that a module of distlab writes and may not, a line of text each."""
    package, _, rest = module.partition(".")
    if package != "distlab" or rest.split(".")[0] == "parallel":
        return []
    return [
        f"{module}:{node.lineno} writes {node.value!r}: ask a field of the strategy's entry in "
        "STRATEGIES"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in STRATEGIES.keys() - NAMED.get(rest, ())
    ]


def _forbidden(module, target):
    """Why `module` may not import `target`, or None."""
    layer, to = module.split(".")[0], target.split(".")[0]
    if module == "kernels":
        return (
            None
            if to in sys.stdlib_module_names
            else "kernels/__init__ imports Python's own modules only"
        )
    if layer == "kernels":
        known = to in ("kernels", "torch", "triton") or to in sys.stdlib_module_names
        return None if known else "kernels imports torch and triton only"
    if to == "tests":
        return "tests are nobody's library"
    if to not in LAYERS:
        return None  # third-party
    if LAYERS.index(to) < LAYERS.index(layer):
        return f"{layer} lies further in than {to}"
    if layer == to == "experiments" and "." in module and target != "experiments":
        same = module.split(".")[1] == target.split(".")[1] or target.split(".")[1].startswith("_")
        return None if same else "experiments do not import each other; share through distlab"
    return _forbidden_in_distlab(module, target) if layer == "distlab" else None


def _forbidden_in_distlab(module, target):
    if module == "distlab":
        # by `distlab.run`, when it is called
        if target in ("distlab.command", "distlab.report.record"):
            return None
        return "distlab/__init__ imports no part of the library, so that each part can be had alone"
    unit = module.split(".")[1]
    if unit in ANYTHING:
        return None
    if unit not in ALLOWED:
        return f"distlab.{unit} has no entry in ALLOWED"
    allowed = [f"distlab.{name}" for name in (unit, *f"{COMMON} {ALLOWED[unit]}".split())]
    allowed += [*OF_ONE_MODULE.get(module, ()), *(["kernels.cost"] if unit == "theory" else [])]
    if unit in COMMON.split():
        allowed = [f"distlab.{name}" for name in (unit, *ALLOWED[unit].split())]
    if target == "distlab" or any(
        target == entry or target.startswith(f"{entry}.") for entry in allowed
    ):
        return None
    return f"{unit} may import {', '.join(sorted(allowed)) or 'no sibling'}"


def _imports(tree, module, is_package):
    """(line, dotted target) of every import; `from a import b` gives `a.b` where a is a layer."""
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
                deeper = base in LAYERS and not alias.name.startswith("__")
                yield node.lineno, f"{base}.{alias.name}" if deeper else base
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (
                (node.lineno, str(each.value))
                for each in node.args[:1]
                if isinstance(each, ast.Constant)
            )


def _modules():
    """Yield (dotted name, path) of every module of the layers."""
    paths = []
    for layer in LAYERS:
        paths += (ROOT / layer).rglob("*.py")
    for path in sorted(paths):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_imports_follow_the_design():
    modules = dict(_modules())
    assert {
        "launch",
        "experiments",
        "examples.train",
        "distlab.comm.context",
        "kernels.cost",
    } <= modules.keys()
    found = []
    for module, path in modules.items():
        is_package = path.name == "__init__.py"
        found += violations(module, path.read_text(), is_package=is_package)
    assert not found, "\n".join(found)


def test_no_strategy_is_known_by_its_name():
    named = []
    for module, path in _modules():
        named += strategies_named(module, path.read_text())
    assert not named, "\n".join(named)
    assert strategies_named("distlab.theory.volume", "x = strategy == 'zero1'")
    assert strategies_named("distlab.train.config", "TRAINABLE = ('bucketed', 'fsdp')")
    assert not strategies_named("distlab.train.config", "strategy = 'bucketed'")
    assert not strategies_named("distlab.parallel", "Strategy('zero1')")


# Names with an underscore that are public, or of Python and Triton.
NOT_TORCHS = {
    *("_asdict", "_make", "_replace", "_fields"),  # of a NamedTuple
    *("_exit", "_ArgumentGroup", "_option_string_actions"),
    *("_init_handles", "_reinterpret", "_convert_to_ir_values"),
}
TORCHS_CLASSES = (nn.Module(), Tensor, dist.ProcessGroup, dist.ProcessGroupGloo._Options)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(sources: list[str]) -> set[str]:
    """Return the private names of torch that sources use.

    A name that is reached from `torch` or `torch.distributed` is given with its path, one of an
    object as `.name`. An object's name counts as torch's if no source defines it, or if one of
    `TORCHS_CLASSES` has it.
    """
    trees = [ast.parse(source) for source in sources]
    own = set()
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    found = set()
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Import):
            found.update(_if_private(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(_if_private(f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            path = ast.unparse(node).split(".")
            if path[0] in ("torch", "dist"):
                root = "torch.distributed" if path[0] == "dist" else "torch"
                found.add(".".join((root, *path[1:])))
            elif path[:-1] not in (["self"], ["cls"]) and node.attr not in NOT_TORCHS:
                is_torchs = any(hasattr(each, node.attr) for each in TORCHS_CLASSES)
                if node.attr not in own or is_torchs:
                    found.add(f".{node.attr}")
    # `torch._C` alone is the beginning of a longer path, which is found as well.
    longest = set()
    for name in found:
        is_beginning = any(other.startswith(f"{name}.") for other in found)
        if name.startswith((".", "torch.")) and not is_beginning:
            longest.add(name)
    return longest


def _if_private(path: str) -> str:
    """Return a path if it has a private part, else an empty text."""
    return path if any(map(_is_private, path.split("."))) else ""


def test_contributing_lists_the_private_names_of_torch():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Private names of torch")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    listed = []
    for row in rows:
        listed += re.findall(r"`([^`]+)`", row.split("|")[1])
    assert len(listed) == len(set(listed))
    assert set(listed) == private_names([path.read_text() for _, path in _modules()])


def test_one_operation_is_three_files():
    """For who takes RMSNorm along.

    Its form for CPUs, long rows, costs and the recorder come when they are used.
    """
    done = python(
        "-c",
        "import kernels.rmsnorm, sys; print(*(x for x in sys.modules if x.startswith('kernels.')))",
    )
    assert sorted(done.stdout.split()) == [
        "kernels._dispatch",
        "kernels._rows",
        "kernels.rmsnorm",
    ], done.stderr


def test_every_folder_of_tests_is_a_package():
    """Else pytest puts the folder itself on the path, and `import experiments` finds
    tests/experiments.
    """
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.mark.parametrize(
    "module, source",
    [
        ("distlab.parallel.flat", "from distlab import model"),
        ("distlab.parallel.fsdp.unit", "from ...model import ops"),
        (
            "distlab.parallel.flat",
            "import importlib\nimportlib.import_module('distlab.train.loop')",
        ),
        ("distlab.model.transformer", "import kernels.rope"),
        ("distlab.report.table", "if TYPE_CHECKING:\n    from distlab.measure import clock"),
        ("distlab.train.loop", "from distlab.report import Record"),
        ("distlab.helpers", "from distlab.comm import context"),
        ("experiments.one", "from experiments.two import run"),
        ("kernels.softmax", "import numpy"),
        ("distlab.parallel.flat", "import torch\ns = torch.cuda.Stream(priority=-1)"),
        ("distlab.train.loop", "import os\nrank = int(os.environ['RANK'])"),
    ],
)
def test_the_checker_sees(module, source):
    assert violations(module, source)


@pytest.mark.parametrize(
    "module, source",
    [
        (
            "distlab.parallel.flat",
            "import torch\nfrom distlab.comm import collectives\nfrom .base import X",
        ),
        ("distlab.model.ops", "def f():\n    from kernels.rope import rope"),
        ("distlab.doctor", "import distlab.train.loop"),
        ("experiments.one.view", "from .config import Config\nfrom distlab.report import Column"),
        ("launch.train", "import os\nos.environ['OMP_NUM_THREADS'] = '1'"),
    ],
)
def test_the_checker_lets_pass(module, source):
    assert not violations(module, source)
