"""The available experiments, by the names of their files."""

import importlib
from pathlib import Path
from types import ModuleType

from distlab.options import did_you_mean

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
LESSONS = EXPERIMENTS / "lessons"


def experiments() -> dict[str, Path]:
    """Return name → file of every experiment. Lessons are in their own folder."""
    found = {}
    for folder in (EXPERIMENTS, LESSONS):
        found |= {path.stem: path for path in folder.glob("*.py") if not path.stem.startswith("_")}
        found |= {
            path.parent.name: path
            for path in folder.glob("*/__init__.py")
            if path.parent != LESSONS
        }
    return dict(sorted(found.items()))


def require_clone() -> None:
    """Refuse a command that needs files which an installed package does not have.

    Raises:
        ValueError: this is not a clone of the repository.
    """
    if not (ROOT / "records").is_dir():
        raise ValueError(
            "this needs a clone of the repository: an installed package has no records/"
        )


def load(name: str) -> ModuleType:
    """Import the module of an experiment.

    Raises:
        ValueError: there is none of that name; the message lists those that exist.
    """
    known = experiments()
    if name not in known:
        raise ValueError(
            f"experiment {name!r} is unknown{did_you_mean(name, known)}; `distlab list` shows all"
        )
    path = known[name].parent if known[name].stem == "__init__" else known[name].with_suffix("")
    return importlib.import_module(".".join(path.relative_to(ROOT).parts))
