"""The package `distlab.parallel` imports a strategy when its name is used, and nothing before."""

import ast
import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import distlab.comm
import distlab.parallel
from tests.commands import python

STRATEGY_MODULES = {
    "naive",
    "flat",
    "overlap",
    "bucketed",
    "copy_engine",
    "local",
    "sharded_optimizer",
    "torch_peers",
    "zero",
    "fsdp",
    "fsdp.fsdp",
}
STATEMENTS = [
    "import distlab.parallel.naive",
    "from distlab.parallel.naive import NaiveDDP",
    "from distlab.parallel import NaiveDDP",
    "import distlab.parallel; distlab.parallel.NaiveDDP",
]
NOTHING = "import distlab.parallel; dir(distlab.parallel)"
BUILD = "import distlab.parallel.build"
# A new interpreter imports torch once, for a second, and forks for each statement.
PRINT_LOADED = """
import json, os, sys, torch
for statement in {statements!r}:
    if os.fork() == 0:
        exec(statement)
        print(json.dumps([statement, list(sys.modules)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""
PACKAGES = ("distlab", "kernels", "experiments")


@pytest.fixture(scope="module")
def loaded():
    """Return statement → modules of our packages that an interpreter has after it alone."""
    done = python("-c", PRINT_LOADED.format(statements=[*STATEMENTS, NOTHING, BUILD]))
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        statement, modules = json.loads(line)
        found[statement] = {each for each in modules if each.partition(".")[0] in PACKAGES}
    return found


def of_the_package(modules):
    """Return the modules of distlab.parallel, by their last name."""
    found = {each for each in modules if each.startswith("distlab.parallel")}
    return {each.removeprefix("distlab.parallel.") for each in found}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_one_strategy_loads_neither_the_registry_nor_another_strategy(statement, loaded):
    names = of_the_package(loaded[statement])
    assert "naive" in names
    assert not names & ({"registry", "build", *STRATEGY_MODULES} - {"naive"})


def test_one_strategy_loads_at_most_a_dozen_files(loaded):
    files = loaded["import distlab.parallel.naive"]
    assert "distlab.parallel.naive" in files and len(files) <= 12, files


def imports_of(path, modules):
    """Return the modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                submodule = f"{node.module}.{each.name}"
                found.add(submodule if submodule in modules else node.module)
    return found & modules.keys()


def circle(graph):
    """Return modules that import each other in a circle; an empty list if there are none."""
    finished = set()

    def follow(module, on_the_way):
        if module in on_the_way:
            return on_the_way[on_the_way.index(module) :]
        if module in finished:
            return []
        for imported in graph[module]:
            found = follow(imported, [*on_the_way, module])
            if found:
                return found
        finished.add(module)
        return []

    for module in graph:
        found = follow(module, [])
        if found:
            return found
    return []


def test_no_file_of_the_package_is_part_of_an_import_circle():
    """Also not under TYPE_CHECKING or inside a function: a reader follows those imports as well."""
    root = Path(distlab.parallel.__file__).parents[2]
    modules = {}
    for path in sorted(root.glob("distlab/parallel/**/*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    graph = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    assert len(graph) > 20 and graph["distlab.parallel.naive"] == {"distlab.parallel.ddp"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c"]
    assert circle(graph) == []


def test_the_package_alone_loads_nothing_of_it(loaded):
    assert of_the_package(loaded[NOTHING]) == {"distlab.parallel"}


def test_build_loads_neither_the_registry_nor_the_strategies(loaded):
    assert not of_the_package(loaded[BUILD]) & {"registry", *STRATEGY_MODULES}


def registry_imports(source):
    """Return the imports of a module that load the registry: its own name, or a name of the
    package.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.endswith(".registry")]
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            names = [f"{package}.{each.name}" for each in node.names]
            if package.endswith(".registry"):
                found += names
            elif package == "distlab.parallel":
                exported = {"registry", "*", *distlab.parallel._DEFINED_IN}
                found += [name for name in names if name.rpartition(".")[2] in exported]
    return found


def test_no_file_of_the_package_imports_the_registry():
    """Also not under TYPE_CHECKING or inside a function, where it would be a circle later."""
    folder = Path(distlab.parallel.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        assert not registry_imports(path.read_text(encoding="utf-8")), path
    assert registry_imports("from distlab.parallel import get_strategy")
    assert registry_imports("from distlab.parallel.registry import STRATEGIES")
    assert registry_imports("def f():\n    import distlab.parallel.registry")
    assert not registry_imports("from distlab.parallel import agreement, order")


def test_every_exported_name_is_what_its_module_defines():
    for name in distlab.parallel.__all__:
        module = importlib.import_module(distlab.parallel._DEFINED_IN[name])
        value = getattr(module, name)
        assert getattr(distlab.parallel, name) is value, name
        if name != "STRATEGIES":  # a dictionary does not know its module
            assert value.__module__ == module.__name__, name


def test_editors_and_the_site_read_the_same_names():
    """The stubs, which are Python's own text, against the names that are exported."""
    assert names_of_stub(distlab.parallel) == distlab.parallel._DEFINED_IN
    assert names_of_stub(distlab.comm) == dict.fromkeys(
        distlab.comm.__all__, "distlab.comm.context"
    )


def names_of_stub(package):
    """Return name → module of a package's stub."""
    stub = Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    modules = {}
    for node in imports:
        for alias in node.names:
            modules[alias.asname] = node.module
    return modules


def test_a_star_import_gives_every_exported_name():
    names = {}
    exec("from distlab.parallel import *", names)
    assert {*distlab.parallel.__all__} <= names.keys()


def test_dir_lists_the_exported_names():
    assert {*distlab.parallel.__all__, "__all__", "__getattr__"} <= {*dir(distlab.parallel)}


def test_another_name_is_an_attribute_error_and_a_submodule_can_be_imported():
    with pytest.raises(AttributeError, match=r"'distlab\.parallel' has no attribute 'NaiveDPP'"):
        _ = distlab.parallel.NaiveDPP
    with pytest.raises(ImportError, match="NaiveDPP"):
        exec("from distlab.parallel import NaiveDPP")
    for module in pkgutil.iter_modules(distlab.parallel.__path__):
        exec(f"from distlab.parallel import {module.name}")
