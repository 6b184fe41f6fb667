"""Every command on a page: known to exist in the ordinary suite, run in the `commands` set (`make test-commands`).

Commands run in a copy of the checkout, in the order of their page, so that what one leaves (a checkpoint, say) the
next finds. Most run as written; `QUICK` shortens those that would take minutes, by options added at the end, where the
last one wins. What cannot run here says why, and has its options held against `--help` instead. The options that
`QUICK` takes the place of are tried by `test_what_a_command_does_by_default_suits_the_machine`, without running.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from distlab.parallel import STRATEGIES, strategies_on
from launch.__main__ import experiments
from tests.commands import ROOT, environment
from tests.pages import PROGRAMS, Command, commands_of, fenced_lines, pages

ON_GPU = torch.cuda.is_available()
TINY = "--size tiny --batch 1 --context 32 --dtype fp32"
BENCH = f"{TINY} --warmup 1 --rounds 2 --steps 3 --check-steps 2 --profile-steps 1"
CURVES = "--size tiny --steps 12 --kill-at 6 --checkpoint-every 3 --rounds 1 --block 2"
# The first pattern that is found in a command decides what is added to it.
QUICK: dict[str, str] = {
    r"^make bench$": f"ARGS='{BENCH}'",
    r"^make test$": "ARGS=tests/test_hardware.py",
    r"^make test-commands$": "ARGS=--collect-only",
    r"^make test-gpu$": "ARGS=--collect-only",
    r"launch/ddp_bench\.py": BENCH,
    r"launch/memory_breakdown\.py": f"{TINY} --steps 3",
    r"launch/(allreduce_sweep|bucket_sweep)\.py|run scaling_measured": "--quick",
    r"launch/model_benchmark\.py": f"{TINY} --steps 3",
    r"launch/train\.py": "--size tiny --steps 4 --log-every 1",
    r"launch/sample\.py": "--tokens 5",
    r"experiments/train_curves\.py": CURVES,
    r"experiments/sabotage\.py": "--steps 4",
    r"run (mixed_precision|activation_checkpointing|instrument_cost)$": "--quick",
    r"run predict_steps.* --calibrate": "--cases medium:8 --ranks 2 --rows local flat",
    r"experiments\.kernel_roofline": "--smoke",
    r"experiments[./]attention_memory": "--smoke",
    r"run simulate_scale": "--model small --ranks 4",
    r"-m tests\.kill_runs": "--moments 1 --series same",
    r"-m tests\.fuzz": "--seeds 3",
    r"-m tests\.mutations": "--list",
    r"^pytest -n auto": "tests/test_hardware.py",
    r"^(pytest|\.venv/bin/python -m pytest|TRITON_INTERPRET)": "-x",  # run whole: a failure ends and fails them
}
# Why a command does not run here at all. `--help` is asked instead where it has a script of ours.
CANNOT: dict[str, str] = {
    r"^pip install": "changes the environment; make install does the same from pinned versions",
    r"--nnodes 2|machine0|^sbatch": "needs several machines",
    r"^compute-sanitizer": "needs a GPU and the CUDA toolkit",
    r"bucketed-dma": "needs a GPU",
    r"run (tune_flash_attention|attention_record|attention_sweep)(?!.*--quick)": "needs a GPU",
    r"run kernel_roofline.* --tune": "needs a GPU",
}
TIMEOUT_S = 420


# What a page leaves for the reader to fill in, filled in.
FILLED_IN = {r"local,<name>,": "local,naive,", r" …$": ""}


def all_commands() -> list[Command]:
    found = {}
    for page in pages():
        for command in commands_of(page):
            text = command.text
            for left_open, filled in FILLED_IN.items():
                text = re.sub(left_open, filled, text)
            found.setdefault(text, replace(command, text=text))
    return list(found.values())


COMMANDS = all_commands()


def quick_form(text: str) -> str:
    """The command with the options that make it short."""
    added = next((options for pattern, options in QUICK.items() if re.search(pattern, text)), "")
    if "launch/ddp_bench.py" in text and "--strategies" not in text:
        added += " --strategies local,bucketed,fsdp,torch-ddp"  # `make bench` runs them all
    return f"{text} {added}".strip()


def why_not(text: str) -> str:
    """Why it cannot run here; empty if it can."""
    for pattern, reason in CANNOT.items():
        if re.search(pattern, text) and not (ON_GPU and reason == "needs a GPU"):
            return reason
    return ""


def script_of(text: str) -> list[str] | None:
    """How to ask a command's script of this repository for help: `[file]`, `[-m, module]` or `[-m, launch, run, NAME]`.

    None if it has none.
    """
    words = shlex.split(text)
    if words[:2] == ["distlab", "run"]:
        return ["-m", "launch", *words[1:3]]
    for place, word in enumerate(words):
        if re.fullmatch(r"(launch|experiments|distlab)/[\w/]+\.py", word):
            return [word]
        if word == "-m" and words[place + 1].split(".")[0] in ("launch", "experiments", "distlab"):
            return ["-m", words[place + 1]]
    return None


# -- in the ordinary suite -------------------------------------------------------------------------------------


def test_pages_have_commands():
    """The extraction finds what stands on the pages in each of the three forms."""
    texts = {command.text for command in COMMANDS}
    assert {"make bench", "python -m distlab.doctor", "make test-commands"} <= texts
    assert any(command.page == "docs/questions.md" for command in COMMANDS) and len(COMMANDS) > 30


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_line_of_a_shell_block_is_a_command_that_is_tried(page):
    """None is passed over because its program is unknown here, or because something is left to fill in."""
    tried = {command.text for command in COMMANDS}
    for line in fenced_lines(page):
        for left_open, filled in FILLED_IN.items():
            line = re.sub(left_open, filled, line)
        assert line in tried, f"{page.name}: {line}"
        assert not re.search(r"<\w+>|…|\.\.\.", line), f"{page.name}: {line} has a part to fill in"


def defaults() -> dict[str, Callable[[], object]]:
    """What each command makes of no options at all on this machine."""
    from experiments import train_curves
    from launch import allreduce_sweep, bucket_sweep, ddp_bench, memory_breakdown, model_benchmark, train
    from launch import scaling as scaling_measured

    def configured(module: ModuleType) -> Callable[[], object]:
        make = getattr(module, "config_from", None) or module.config_of
        return lambda: make(module.parser().parse_args([]))

    modules = (
        *(allreduce_sweep, bucket_sweep, ddp_bench, memory_breakdown, model_benchmark, scaling_measured, train),
        train_curves,
    )
    return {module.__name__: configured(module) for module in modules}


DEFAULTS = defaults()


@pytest.mark.parametrize("command", DEFAULTS)
def test_what_a_command_does_by_default_suits_the_machine(command):
    """A strategy that only GPUs run is in nobody's default on a CPU."""
    config = DEFAULTS[command]()
    names = getattr(config, "strategies", ())
    here = strategies_on("cuda" if ON_GPU else "cpu")
    assert [name for name in names if name in STRATEGIES and name not in here] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text)
def test_what_a_command_names_exists(command):
    """Scripts, modules, test files and make targets; commands that run nothing of ours are told by their program."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    words = [word for word in shlex.split(command.text) if not re.match(r"[A-Z_]+=", word)]
    assert words[0] in PROGRAMS
    if words[0] == "make":
        assert words[1] in targets
    if words[:2] == ["distlab", "run"]:
        assert words[2] in experiments()
    for place, word in enumerate(words):
        if re.fullmatch(r"(tests|launch|experiments|distlab|kernels)/[\w/]*(\.py|\.sbatch)?", word):
            made_by_the_command = words[place - 1] in ("--table", "--out")
            assert made_by_the_command or (ROOT / word).exists(), f"{command.page}: {word}"
        if word == "-m" and words[place + 1].startswith(("experiments.", "launch.", "distlab.")):
            module = ROOT / words[place + 1].replace(".", "/")
            runs = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
            assert runs, f"{command.page}: {words[place + 1]}"


def test_the_tables_of_this_file_are_used():
    """A pattern that fits no command is left over from a page that changed."""
    texts = [command.text for command in COMMANDS]
    for pattern in [*CANNOT, *QUICK]:
        assert any(re.search(pattern, text) for text in texts), pattern


# -- the `commands` set ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of the working tree, with this interpreter as its virtual environment and a text to train on."""
    copy = tmp_path_factory.mktemp("checkout") / "distlab"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
    else:
        ignored = shutil.ignore_patterns(".venv", "outputs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / ".venv/bin").mkdir(parents=True)
    for program in ("python", "ruff"):
        found = Path(sys.executable).with_name(program)
        if found.exists():  # a wrapper: a link would lose the environment that the interpreter belongs to
            wrapper = copy / ".venv/bin" / program
            wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(found))} "$@"\n')
            wrapper.chmod(0o755)
    (copy / ".venv/.installed").touch()
    (copy / "my.txt").write_text((ROOT / "README.md").read_text() * 3)
    shutil.make_archive(str(copy / "submission"), "zip", copy / "kernels")
    return copy


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    variables = environment() | {"PYTHONPATH": str(folder), "PATH": path}
    return subprocess.run(
        ["bash", "-c", f'distlab() {{ python -m launch "$@"; }}\n{command}'],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def _grouped(command: Command):
    """One page's commands stay on one worker, where one finds what another left."""
    return pytest.param(command, id=command.text, marks=pytest.mark.xdist_group(command.page))


@pytest.mark.commands
@pytest.mark.parametrize("command", [_grouped(command) for command in COMMANDS])
def test_the_command_runs(command, checkout):
    reason, script = why_not(command.text), script_of(command.text)
    if reason and (script is None or "several machines" in reason):
        pytest.skip(reason)
    if reason:  # its options at least must be there
        help_text = shell(shlex.join(["python", *script, "--help"]), checkout)
        assert help_text.returncode == 0, help_text.stderr
        place = command.text.index(script[-1]) + len(script[-1])
        for option in re.findall(r" (--[a-z-]+)", command.text[place:]):
            assert option in help_text.stdout, f"{script[-1]} knows no {option}"
        return
    result = shell(quick_form(command.text), checkout)
    # pytest says 5 when nothing was selected: `make test-gpu` on a machine without one
    nothing_selected = "no tests" in result.stdout and result.returncode in (2, 5)
    assert result.returncode == 0 or nothing_selected, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
