"""What `distlab list` and `distlab run NAME --help` say, read from the sources: to import torch alone takes longer."""

import ast
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distlab.options import shown

# Heading of `distlab list` → experiments, in the list's order.
GROUPS = {
    "start here": ("ddp_bench", "model_benchmark", "attention_sweep", "kernel_roofline", "plan", "sabotage"),
    "strategies": ("allreduce_sweep", "bucket_sweep", "memory_breakdown", "trace_overlap", "train_curves"),
    "kernels": ("attention_memory", "calculator"),
    "models": ("activation_checkpointing", "long_context", "mixed_precision", "model_comparison"),
    "scale": ("predict_published", "predict_steps", "scaling", "scaling_measured", "simulate_scale"),
    "lessons": ("attention_steps", "hardware_effects", "ir", "size_curves", "tuning"),
}
LEGEND = "GPU: needs one, but for a small preset; ranks: runs on several GPUs, or on processes of a CPU"
EXAMPLES = "    distlab run {name} --quick\n    distlab run {name} --nproc 2"
MORE = """How it works, and options that experiments share (of model, timing, ranks, folder of results):
    distlab run {name} --help all"""
DEVICES = {"gpu": "on a GPU", "cpu": "on a CPU"}  # words in the names of presets


class Source:
    """What the file of an experiment says of it, without being run."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.names = {
            ast.unparse(node.targets[0]): node.value for node in self.tree.body if isinstance(node, ast.Assign)
        }
        self.question, _, text = (ast.get_docstring(self.tree) or "").partition("\n\n")
        self.examples = text.partition("\n\n")[0] if text.startswith("    ") else ""
        # The keywords of `EXPERIMENT = Experiment(…)`; a calculator has none.
        self.keywords = next((keywords for _, keywords in self.calls("Experiment")), {})

    def calls(self, function: str) -> Iterator[tuple[Any, dict[str | None, Any]]]:
        """Every node whose value is a call of `function`, with the keywords of that."""
        for node in ast.walk(self.tree):
            call = getattr(node, "value", None)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == function:
                yield node, {word.arg: self.read(word.value) for word in call.keywords}

    def read(self, node: ast.expr) -> Any:
        """The value of an expression of literals and of this file's names; the text of any other."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name) if name in self.names:
                return self.read(self.names[name])
            case ast.Tuple(entries):
                return tuple(map(self.read, entries))
            case ast.Dict(keys, values):
                return dict(zip(map(self.read, keys), map(self.read, values), strict=True))
            case ast.BinOp(left, ast.BitOr(), right):  # of dicts
                return self.read(left) | self.read(right)
            case ast.Call(ast.Name("tuple"), [known]) if isinstance(keys := self.read(known), dict):
                return tuple(keys)
        return ast.unparse(node)

    def needs(self) -> str:
        """`GPU`, `ranks` or nothing."""
        if "gpus" in self.keywords:
            return "GPU"
        return "ranks" if self.keywords.get("ranks") == "many" else ""

    def options(self) -> Iterator[tuple[str, str]]:
        """Flag and help of every option that is written in this file."""
        for field, keywords in self.calls("option"):
            if not isinstance(field, ast.AnnAssign):
                continue
            default, text = map(self.read, field.value.args)
            flag = keywords.get("flag", "--" + field.target.id.replace("_", "-"))
            if default is not None and default is not False and default != ():
                text += f" [{'all' if default == keywords.get('choices') else shown(default)}]"
            yield field.target.id.upper() if "positional" in keywords else flag, text

    def presets(self) -> Iterator[tuple[str, str]]:
        """Name and settings of every preset."""
        for name, settings in self.keywords.get("presets", {}).items():
            label = " ".join(DEVICES.get(word, f"--preset {word}") for word in name.split("-"))
            yield label, ", ".join(f"{field}: {shown(value)}" for field, value in settings.items())


def listing(files: Mapping[str, Path]) -> str:
    """Every experiment under its heading, with what it needs and its question."""
    lines = []
    for heading, names in GROUPS.items():
        lines.append(heading)
        for name in names:
            source = Source(files[name])
            lines += _beside(f"{name:<24} {source.needs():<5}", source.question)
    return "\n".join([*lines, "", LEGEND])


def help_of(name: str, path: Path) -> str:
    """What an experiment answers, examples, its own options and its presets."""
    source = Source(path)
    lines = [source.question, "", source.examples or EXAMPLES.format(name=name)]
    for title, rows, most in (
        ("options of its own [default]:", [*source.options()], None),
        ("presets, and what they set:", [*source.presets()], 2),
    ):
        wide = max((len(label) for label, _ in rows), default=0)
        found = [line for label, text in rows for line in _beside(label.ljust(wide), text, most)]
        lines += ["", title, *found] if found else []
    return "\n".join([*lines, "", MORE.format(name=name)])


def _beside(label: str, text: str, most: int | None = None) -> list[str]:
    """The lines of a text beside its label, as wide as the terminal and at most 100 columns."""
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {label}  ",
        subsequent_indent=" " * (len(label) + 4),
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )
