"""Texts of `distlab list` and `distlab run NAME --help`, read from the sources.

Nothing is imported, because to import torch alone takes longer.
"""

import ast
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distlab.options import shown

# Heading of `distlab list` → experiments, in the list's order.
GROUPS = {
    "start here": "ddp_bench model_benchmark attention_sweep kernel_roofline plan sabotage",
    "strategies": "collectives memory_breakdown muon_placements pipeline_schedules train_curves",
    "models": "long_context mixed_precision model_comparison",
    "scale": "predict scaling simulate_scale",
    "lessons": "attention_steps calculator gpu_lessons ir tutorial_kernels",
}
LEGEND = "GPU: needs one, except for a small preset; ranks: runs on several GPUs, or as processes on a CPU"


class Computed(str):
    """Source text of a value that is known only when the module runs.

    Help must not show it as if it were the value.
    """


class Source:
    """Descriptions in the files of an experiment, read without running them."""

    def __init__(self, path: Path) -> None:
        others = sorted(path.parent.glob("[!_]*.py")) if path.name == "__init__.py" else []
        texts = [each.read_text(encoding="utf-8") for each in (path, *others)]
        self.tree = ast.Module([node for text in texts for node in ast.parse(text).body], [])
        self.question, self.second = [*(ast.get_docstring(self.tree) or "").split("\n\n"), ""][:2]
        assigned = [node for node in self.tree.body if isinstance(node, ast.Assign)]
        self.names = {ast.unparse(node.targets[0]): node.value for node in assigned}
        call = self.names.get("EXPERIMENT")  # a calculator has none
        self.experiment = {word.arg: word.value for word in getattr(call, "keywords", ())}

    def read(self, node: ast.expr) -> Any:
        """Return the value of a literal or name, the arguments of an `option`, else the text."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name) if name in self.names:
                return self.read(self.names[name])
            case ast.Tuple(entries):
                values = tuple(map(self.read, entries))
                if not any(isinstance(value, Computed) for value in values):
                    return values
            case ast.Dict(keys, values):
                return dict(zip(map(self.read, keys), map(self.read, values), strict=True))
            case ast.BinOp(left, ast.BitOr(), right):  # of dicts
                return self.read(left) | self.read(right)
            case ast.Call(ast.Name("option"), arguments, keywords):
                given = {word.arg: self.read(word.value) for word in keywords}
                return given | dict(enumerate(map(self.read, arguments)))
        return Computed(ast.unparse(node))

    def options(self) -> dict[str, str]:
        """Return flag → help of every option that is written in these files."""
        found = {}
        for node in ast.walk(self.tree):
            match node:
                case ast.AnnAssign(ast.Name(name), _, ast.Call(ast.Name("option")) as call):
                    given = self.read(call)
                    flag = name.upper() if "positional" in given else f"--{name}".replace("_", "-")
                    default = "all" if given[0] == given.get("choices") else shown(given[0])
                    bare = str(given[0]) in ("None", "False", "()") or isinstance(
                        given[0], Computed
                    )
                    found[given.get("flag", flag)] = given[1] + ("" if bare else f" [{default}]")
        return found


def listing(files: Mapping[str, Path]) -> str:
    """List every experiment under its heading, with its needs and its question."""
    lines = []
    for heading, names in GROUPS.items():
        lines.append(heading)
        for name in names.split():
            source = Source(files[name])
            ranks = getattr(source.experiment.get("ranks"), "value", "")
            needs = "GPU" if "gpus" in source.experiment else "ranks" if ranks == "many" else ""
            lines.append(f"  {name:<24} {needs:<5}  {source.question}")
    return "\n".join([*lines, "", LEGEND])


def help_of(name: str, path: Path) -> str:
    """Return the help of an experiment: its question, examples, its own options and its presets."""
    source = Source(path)
    examples = f"    distlab run {name}\n    distlab run {name} --preset smoke"
    presets = {
        preset: ", ".join(
            f"{field}: {shown(value)}"
            for field, value in settings.items()
            if not isinstance(value, Computed)
        )
        for preset, settings in source.read(
            source.experiment.get("presets", ast.Dict([], []))
        ).items()
    }
    return f"""{source.question}

{source.second if source.second.startswith(" ") else examples}

options of its own [default]:
{_beside(source.options())}

presets (--preset NAME, --quick; gpu, cpu and NAME-cpu are taken on such a device):
{_beside(presets) or "  none"}

How it works, and options that experiments share (of model, timing, ranks, folder of results):
    distlab run {name} --help all"""


def _beside(rows: Mapping[str, str]) -> str:
    """Format rows of two columns, as wide as the terminal and at most 100 characters."""
    width, indent = min(100, shutil.get_terminal_size((100, 24)).columns), " " * 22
    return "\n".join(
        textwrap.fill(f"  {label:<20}{text}", width, subsequent_indent=indent)
        for label, text in rows.items()
    )
