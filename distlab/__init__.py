"""Hand-written data parallelism and sharding, and the instruments that measure them."""

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__version__ = "0.1.0"

KERNELS = Path(__file__).parents[1] / "kernels"  # in a clone and in an installation


class KernelsFinder:
    """Finder of `kernels.NAME` if `import kernels` gives another package, such as Hugging Face's.

    Python asks it last, so it decides nothing where our folder is part of that package already
    (setup.py says when).
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Return where our module of this name is stored; None for any other."""
        parent, _, _ = name.rpartition(".")
        # Only submodules: the package `kernels` itself was found by another finder.
        return PathFinder.find_spec(name, [str(KERNELS)]) if parent == "kernels" else None


def foreign_kernels() -> str | None:
    """Return a sentence that says what hides our package `kernels`. None if nothing does.

    It is a file `kernels.py`, or a folder `kernels` with a module of the same name as one of ours.
    A folder without such a module hides nothing, because `KernelsFinder` then finds ours.
    """
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        return None
    # A package has locations to search, and a single file has none.
    if spec.submodule_search_locations is None:
        return (
            f"`import kernels` finds the file {spec.origin}, and not the package of distlab in "
            f"{KERNELS}: rename that file, or run from another folder"
        )
    ours = _module_names(KERNELS)
    for folder in map(Path, spec.submodule_search_locations):
        # An entry need not be a folder: an editable installation leaves a mark of setuptools here.
        if not folder.is_dir():
            continue
        if folder.samefile(KERNELS):
            return None  # Python searches our folder before the remaining ones
        # The first module that both folders have is enough to tell which of them is hidden.
        hidden = sorted(ours & _module_names(folder))
        if hidden:
            return (
                f"`import kernels.{hidden[0]}` finds the module in {folder}, and not that of "
                f"distlab in {KERNELS} (in all {len(hidden)} modules): rename the folder {folder}, "
                "or run from another folder"
            )
    return None


def _module_names(folder: Path) -> set[str]:
    """Return the names of the modules and packages in a folder."""
    modules = {file.stem for file in folder.glob("*.py") if file.stem != "__init__"}
    return modules | {file.parent.name for file in folder.glob("*/__init__.py")}


# By name: a module that is reloaded makes another class, and finders would pile up.
if not any(getattr(finder, "__name__", "") == KernelsFinder.__name__ for finder in sys.meta_path):
    sys.meta_path.append(KernelsFinder)
if another := foreign_kernels():
    warnings.warn(another, RuntimeWarning, stacklevel=2)


class Picture:
    """A picture of a run, which a notebook shows if it is the last value of a cell."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Rows(list):
    """Rows of a run, a dictionary each.

    Attributes:
        folder: holds the run's records, pictures and page.
    """

    def __init__(self, rows: list[dict], folder: Path) -> None:
        super().__init__(rows)
        self.folder = folder

    def picture(self, name: str) -> Picture:
        """Return a picture of the run by its file's name, such as `step_time.png`.

        Raises:
            FileNotFoundError: the run has no such picture; the message lists those it has.
        """
        # The name may contain folders, but it must lead to a file within the run.
        path = self.folder / name
        if not path.is_file():
            found = ", ".join(sorted(each.name for each in self.folder.glob("*.png")))
            raise FileNotFoundError(
                f"no picture {name!r} in {self.folder}; it has {found or 'none'}"
            )
        return Picture(path)


def run(experiment: str, **options: object) -> Rows:
    """Run an experiment as `distlab run` does, and return its rows.

    A row has the variant, its options and its metrics.

        rows = distlab.run("ddp_bench", strategies=["flat", "bucketed"], batch=4)
        pandas.DataFrame(rows)
        rows.picture("step_time.png")  # in a notebook

    Args:
        options: options of the command line, with `_` for `-`. A list stands for several values,
            True for an option without a value, and False for none of it.

    Raises:
        RuntimeError: the run failed, or a row is wrong. The message is that of the command.
    """
    # These imports are postponed, because `import distlab` should be quick.
    import json
    import subprocess
    import sys

    from distlab.command import COMMAND
    from distlab.report.record import read_json

    words = [sys.executable, str(COMMAND), "run", experiment, "--json"]
    for name, value in options.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        # A list becomes several words after the option, and True becomes none.
        words += map(
            str, value if isinstance(value, list | tuple) else [] if value is True else [value]
        )
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"distlab run {experiment} ended with exit code {done.returncode}:\n{done.stderr}"
        )
    # The line of JSON is the last one, and names the run's folder.
    folder = Path(json.loads(done.stdout.splitlines()[-1])["out"])
    rows = [
        {"variant": record.variant, **record.config, **record.metrics}
        for record in read_json(folder / "records.json")
    ]
    return Rows(rows, folder)
