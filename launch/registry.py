"""The experiments, under the headings and in the order of `distlab list`.

To add one, write `experiments/NAME.py` and add its line to `CATALOGUE`. The first line of the
file's docstring is its question. Imports no torch, so that the list is printed at once, and also
where torch is broken.
"""

import importlib
import shutil
import textwrap
from pathlib import Path
from types import ModuleType

from distlab.options import did_you_mean

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"

GPU = "GPU"
RANKS = "ranks"
LEGEND = (
    "GPU: needs one, except for a small preset; ranks: runs on several GPUs, or as processes on a "
    "CPU"
)

# Heading → module under experiments/ → what it needs.
CATALOGUE: dict[str, dict[str, str]] = {
    "start here": {
        "ddp_bench": RANKS,
        "model_benchmark": RANKS,
        "attention_sweep": GPU,
        "kernel_roofline": GPU,
        "plan": "",
        "predict": "",
        "sabotage": "",
    },
    "strategies": {
        "collectives": RANKS,
        "memory_breakdown": RANKS,
        "muon_placements": RANKS,
        "pipeline_schedules": RANKS,
        "train_curves": RANKS,
    },
    "models": {
        "long_context": RANKS,
        "mixed_precision": "",
        "model_comparison": GPU,
    },
    "lessons": {
        "lessons.attention_steps": GPU,
        "lessons.gpu_lessons": GPU,
        "lessons.ir": "",
    },
}


def experiments() -> dict[str, str]:
    """Return name → module of every experiment, in alphabetical order."""
    found = {}
    for modules in CATALOGUE.values():
        for module in modules:
            # A module may be within a package, and its name is the last part: `lessons.ir` is `ir`.
            found[module.rpartition(".")[2]] = f"experiments.{module}"
    return dict(sorted(found.items()))


def listing(width: int) -> str:
    """Return the text of `distlab list`: every experiment with its needs and its question.

    Args:
        width: characters of a line.
    """
    lines = []
    for heading, modules in CATALOGUE.items():
        lines.append(heading)
        for module, needs in modules.items():
            name = module.rpartition(".")[2]
            lines += in_columns(f"  {name:<24} {needs:<5}  ", question_of(module), width)
    return "\n".join([*lines, "", textwrap.fill(LEGEND, width)])


def in_columns(left: str, right: str, width: int) -> list[str]:
    """Return the lines of a row of two columns. The right one goes on below itself.

    Args:
        left: first column, with its indent and padding.
        width: characters of a line.
    """
    # In a narrow terminal the right column goes on further left, so that several words fit.
    indent = " " * (len(left) if len(left) + 24 <= width else 8)
    return textwrap.wrap(left + right, width, subsequent_indent=indent, break_on_hyphens=False)


def terminal_width() -> int:
    """Return the columns of the terminal, or 100 where there is none, as in a pipe."""
    return shutil.get_terminal_size((100, 24)).columns


def question_of(module: str) -> str:
    """Return the first line of the docstring of a module under experiments/."""
    path = EXPERIMENTS.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    # Read as text: importing every experiment would import torch.
    with open(file, encoding="utf-8") as source:
        return source.readline().strip().removeprefix('"""')


def load(name: str) -> ModuleType:
    """Import the module of an experiment.

    Raises:
        ValueError: there is none of that name. The message suggests one that exists.
    """
    known = experiments()
    if name not in known:
        raise ValueError(
            f"experiment {name!r} is unknown{did_you_mean(name, known)}; `distlab list` shows all"
        )
    return importlib.import_module(known[name])


def require_clone() -> None:
    """Refuse a command that needs files which an installed package does not have.

    Raises:
        ValueError: this is not a clone of the repository.
    """
    if not (ROOT / "records").is_dir():
        raise ValueError(
            "this needs a clone of the repository: an installed package has no records/"
        )
