"""The public API says what it takes, in which shapes and units, and what it refuses.

Checked for every public name of distlab/ and kernels/, from the syntax trees:

- modules, classes, functions and methods have a docstring (a method that only carries on its base class's contract,
  such as `forward`, may leave it to the class);
- a function that raises ValueError or TypeError itself names errors in its docstring or in its class's;
- a public function of kernels/ that takes a Tensor gives a shape, such as `(…, D)`, in its docstring or its module's;
- a parameter whose name carries a unit needs no more; one called `size`, `timeout`, `bandwidth` or `latency` is given
  its unit in the docstring.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import ROOT

# Names people import, which are kept (README and docs use them).
FIXED = {
    "distlab.parallel": "NaiveDDP FlatDDP OverlapDDP BucketedDDP ShardedOptimizer ZeroOptimizer FSDP",
    "kernels.flash_attention": "FlashAttention2 FlashAttention2PyTorch flash_attention",
    "kernels.rmsnorm": "RMSNorm RMSNormPyTorch rms_norm",
    "distlab.testing": "run_ranks",
}
# Of torch's modules and autograd Functions: the class says what goes in and comes out.
CONTRACTS = {"forward", "backward"}
SHAPE = re.compile(r"\([^()]*[A-Z…0-9][^()]*,[^()]*\)|\([A-Z]\)|shape|`\(\w+,?\)`|1-D|scalar|0-dim")
ERRORS = re.compile(r"Rais|rais|[Ee]rror|[Rr]efus")
UNIT = re.compile(r"\b(bytes?|seconds?|s\b|ms|MiB|GiB|per second|elements?|sequences|ranks|tokens|rows|MB)\b")
NEEDS_UNIT = {"size", "timeout", "bandwidth", "latency"}


@dataclass(frozen=True)
class Public:
    """One public definition.

    Attributes:
        name: dotted, from the module on.
        text: its own docstring.
        around: its class's and module's docstrings.
    """

    name: str
    node: ast.AST
    text: str
    around: str
    in_class: bool

    def arguments(self) -> list[ast.arg]:
        if not isinstance(self.node, ast.FunctionDef):
            return []
        return [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]


def public_definitions(module: str, source: str) -> list[Public]:
    """Everything in a module that does not begin with an underscore, nor lies in something that does."""
    tree = ast.parse(source)
    text = ast.get_docstring(tree) or ""
    return [Public(module, tree, text, "", False), *_inside(tree.body, module, text, False)]


def _inside(body: list[ast.stmt], prefix: str, around: str, in_class: bool) -> Iterator[Public]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            yield Public(f"{prefix}.{node.name}", node, text, around, in_class)
            if isinstance(node, ast.ClassDef):
                yield from _inside(node.body, f"{prefix}.{node.name}", f"{text}\n{around}", True)


def lacks(public: Public) -> list[str]:
    """What a definition does not say."""
    name = public.name.rpartition(".")[2]
    is_function = isinstance(public.node, ast.FunctionDef)
    if is_function and public.in_class and (name in CONTRACTS or _overrides(public.name)):
        return []
    found = []
    if not public.text and not _is_kernel(public.node):
        found.append("has no docstring")
    said = f"{public.text}\n{public.around}"
    if is_function and _raises(public.node) and not ERRORS.search(said):
        found.append("raises ValueError or TypeError and does not say so")
    if is_function and public.name.startswith("kernels.") and not _is_kernel(public.node):
        takes_tensor = any(a.annotation and ast.unparse(a.annotation) == "Tensor" for a in public.arguments())
        if takes_tensor and not SHAPE.search(said):
            found.append("takes a Tensor and gives no shape")
    for argument in public.arguments():
        if argument.arg in NEEDS_UNIT and is_number(argument) and not UNIT.search(said):
            found.append(f"does not give the unit of {argument.arg}")
    return found


def is_number(argument: ast.arg) -> bool:
    return argument.annotation is not None and ast.unparse(argument.annotation).startswith(("int", "float"))


def _is_kernel(node: ast.AST) -> bool:
    """Triton kernels are not called by people; their launchers are."""
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)


def _overrides(name: str) -> bool:
    """Whether a method redefines one of a base class, whose docstring is its contract."""
    module, class_name, method = name.rsplit(".", 2)
    try:
        owner = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError):
        return False
    return any(method in vars(base) for base in owner.__mro__[1:])


def _raises(node: ast.FunctionDef) -> bool:
    own = [child for child in ast.walk(node) if isinstance(child, ast.Raise) and child.exc is not None]
    return any(re.match(r"(ValueError|TypeError)\(", ast.unparse(child.exc)) for child in own)


def modules() -> list[Path]:
    found = sorted(path for layer in ("distlab", "kernels") for path in (ROOT / layer).rglob("*.py"))
    return [path for path in found if not path.stem.startswith("_") or path.stem == "__init__"]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_the_public_api_is_documented(path):
    source = path.read_text(encoding="utf-8")
    if not source.strip():
        return
    missing = [f"{p.name} {what}" for p in public_definitions(dotted(path), source) for what in lacks(p)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("module", FIXED)
def test_the_fixed_names_are_there_and_documented(module):
    for name in FIXED[module].split():
        assert getattr(importlib.import_module(module), name).__doc__, name


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ('"""M."""\ndef f(): pass', "no docstring"),
        ('"""M."""\nclass C:\n    """C."""\n    def m(self): pass', "no docstring"),
        ('"""M."""\ndef f(x):\n    """F."""\n    raise ValueError("x")', "does not say so"),
        ('"""M."""\ndef f(x: Tensor):\n    """F."""', "no shape"),
        ('"""M."""\ndef f(bandwidth: float):\n    """F."""', "unit of bandwidth"),
    ],
)
def test_the_check_sees(source, complaint):
    found = [what for public in public_definitions("kernels.m", source) for what in lacks(public)]
    assert any(complaint in what for what in found)
