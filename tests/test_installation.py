"""distlab in a fresh environment, with Hugging Face's package `kernels` next to it and without.

A distribution of the same name with a few files stands in for theirs, so nothing is downloaded. It
has what matters: a package with names of its own in `__init__.py`, and a list of its files for pip.
"""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT

pytest.importorskip("setuptools")  # which builds; and pip, which installs
pytest.importorskip("pip")

SOURCES = (
    "distlab",
    "kernels",
    "launch",
    "experiments",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
THEIR_FILES = {
    "kernels/__init__.py": "import importlib.metadata\n__version__ = "
    "importlib.metadata.version('kernels')\nfrom kernels.load import get_kernel\n",
    "kernels/load.py": "def get_kernel(): return 'theirs'\n",
    "kernels/layer/__init__.py": "from ..load import get_kernel\n",
    "kernels-0.17.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n",
    "kernels-0.17.2.dist-info/WHEEL": (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ),
}
OURS_WORKS = """
import kernels.cost, kernels.nn
from importlib.util import find_spec
import distlab.comm
assert find_spec("kernels.rmsnorm") and find_spec("kernels.flash_attention")
assert find_spec("distlab.parallel")
"""
THEIRS_WORKS = """
from kernels import get_kernel
import kernels.layer
assert get_kernel() == kernels.layer.get_kernel() == "theirs" and kernels.__version__ == "0.17.2"
"""
# An interpreter imports torch once, for a second, and forks for each order.
IN_BOTH_ORDERS = f"""
import os, torch
for code in {[OURS_WORKS + THEIRS_WORKS, THEIRS_WORKS + OURS_WORKS]!r}:
    if os.fork() == 0:
        exec(code)
        os._exit(0)
    assert os.wait()[1] == 0
"""
OURS_IS_GONE = """
from importlib.util import find_spec
assert find_spec("distlab") is None and find_spec("kernels.cost") is None
"""
NO_WARNING = "import warnings; warnings.simplefilter('error', RuntimeWarning)\n"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the sources, because a build writes next to them."""
    folder = tmp_path_factory.mktemp("clone")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        folder,
        clone,
    )
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    file = tmp_path_factory.mktemp("theirs") / "kernels-0.17.2-py3-none-any.whl"
    record = "kernels-0.17.2.dist-info/RECORD"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in THEIR_FILES.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in [*THEIR_FILES, record]))
    return file


class Environment:
    """A virtual environment that has torch and setuptools from that of the tests, and nothing else
    of it.
    """

    def __init__(self, folder: Path):
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        [packages] = folder.glob("lib/python*/site-packages")
        # The files *.pth in a folder that is added so are not read: no editable installation comes
        # with it.
        (packages / "base.pth").write_text(str(Path(torch.__file__).parents[1]))

    def pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments, "-q")

    def install(self, *what: str | Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-build-isolation", *what)

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "-y", name)

    def check(self, code: str, *paths: Path) -> None:
        """Run code in a new process, with `paths` before the environment's folders."""
        path = f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n"
        run(self.python, "-c", path + NO_WARNING + code, cwd=self.folder)


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_and_their_package_have_no_file_in_common(wheel, theirs):
    files = zipfile.ZipFile(wheel).namelist()
    assert not set(files) & set(zipfile.ZipFile(theirs).namelist())
    expected = {
        f"kernels/{file.relative_to(ROOT / 'kernels')}" for file in (ROOT / "kernels").rglob("*.py")
    }
    assert expected - set(files) == {"kernels/__init__.py"}
    assert "kernels/flash_attention/tiles.csv" in files
    assert {"distlab/comm/__init__.pyi", "distlab/parallel/__init__.pyi"} <= set(files)
    # A user's environment may have a package called launch or experiments: ours are inside of
    # distlab.
    assert {file.partition("/")[0] for file in files if ".dist-info" not in file} == {
        "distlab",
        "kernels",
    }
    commands = {
        "distlab/commands/launch/train.py",
        "distlab/commands/experiments/lessons/ir/__init__.py",
    }
    assert commands <= set(files), commands - set(files)


@pytest.mark.commands  # four environments and four runs of pip
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
@pytest.mark.parametrize("ours_first", [False, True], ids=["theirs first", "ours first"])
def test_both_packages_work_in_one_environment(
    clone, wheel, theirs, tmp_path, editable, ours_first
):
    """Until one is uninstalled, after which the other works."""
    environment = Environment(tmp_path / "environment")
    ours = ["-e", clone] if editable else [wheel]
    if ours_first:
        environment.install(*ours)
        environment.check(OURS_WORKS)
        environment.install(theirs)
    else:
        environment.install(theirs)
        environment.install(*ours)
    environment.check(OURS_WORKS + THEIRS_WORKS)
    environment.check(THEIRS_WORKS + OURS_WORKS)
    if ours_first:
        environment.uninstall("distlab")
        environment.check(THEIRS_WORKS + OURS_IS_GONE)
    else:
        environment.uninstall("kernels")
        environment.check(OURS_WORKS)


def test_both_packages_work_in_a_clone_on_the_path(clone, theirs, tmp_path):
    environment = Environment(tmp_path / "environment")
    environment.check(OURS_WORKS, clone)
    environment.install(theirs)
    environment.check(IN_BOTH_ORDERS, clone)


@pytest.fixture(scope="module")
def both_installed(wheel, theirs, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("both") / "environment")
    environment.install(theirs, wheel)
    return environment


def test_a_clone_on_the_path_comes_before_an_installation(clone, both_installed):
    its_own = f"assert kernels.cost.__file__ == {str(clone / 'kernels' / 'cost.py')!r}\n"
    both_installed.check(OURS_WORKS + its_own + THEIRS_WORKS, clone)


@pytest.mark.parametrize("in_front", [True, False], ids=["theirs in front", "ours in front"])
def test_both_packages_work_in_two_folders_of_the_path(wheel, theirs, tmp_path, in_front):
    """An environment over that of the system, say."""
    folders = tmp_path / "theirs", tmp_path / "ours"
    for folder, file in zip(folders, (theirs, wheel), strict=True):
        zipfile.ZipFile(file).extractall(folder)
    environment = Environment(tmp_path / "environment")
    environment.check(
        "import distlab\n" + OURS_WORKS + THEIRS_WORKS, *folders[:: 1 if in_front else -1]
    )


def test_the_kernels_are_loaded_once(both_installed):
    """Also by the strategies' own imports, which come second here."""
    both_installed.check(
        "import kernels.rmsnorm as first\n"
        "from distlab.model import ops\nfrom distlab.parallel import BucketedDDP\n"
        "import kernels.rmsnorm as second, sys\nassert first is second\n"
        "files = [module.__file__ for name, module in sys.modules.items() if "
        "name.endswith('.rmsnorm')]\nassert len(files) == 1, files\n"
    )
