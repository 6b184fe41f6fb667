"""Experiments as tests run them: in a preset, in this process or on ranks, and as the
command does.
"""

import importlib
import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from distlab.experiment import lone_context, run_folder
from distlab.report.view import _draw
from distlab.testing import run_ranks
from launch.__main__ import main
from tests.commands import be_python, forked


def measured(experiment, root, preset="smoke", timeout_s=20.0, draws=False, **fields):
    """The rows of a run named `run` under `root`, written as the command writes them.

    Args:
        timeout_s: seconds that a collective may take, on ranks.
        draws: True to draw the pictures of the view, which takes up to a second. The one run in
            small of every experiment, see `smoke`, has them.
        fields: of the configuration, over the preset's.
    """
    if experiment.ranks == "many":
        ranks = experiment.nproc or max(fields.get("group_sizes", (2,)))
        arguments = (
            experiment.measure.__module__.removeprefix("experiments."),
            str(root),
            preset,
            fields,
            draws,
        )
        return run_ranks(on_rank, ranks, *arguments, deadline_s=300, group_timeout_s=timeout_s)[0]
    return _measured(experiment, lone_context("cpu"), root, preset, fields, draws)


def on_rank(context, name, root, preset, fields, draws=False):
    """Run `measured` on this rank, with our kernels in plain torch: interpreting them takes ten
    times as long.

    All rows are explained, however slow the host is, and each from a trace of two steps instead of
    five.
    """
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    plain = patch("kernels._dispatch.runs_triton", lambda tensor: False)
    explained = patch("experiments.ddp_bench.rows.EXPLAINED_S", 1e9)
    traced = patch("experiments.ddp_bench.rows.TRACED_ON_CPU", 2)
    with plain, explained, traced:
        return _measured(experiment, context, root, preset, fields, draws)


def _measured(experiment, context, root, preset, fields, draws):
    drawing = nullcontext() if draws else patch("distlab.report.view._draw", _others)
    with drawing:
        return _measured_and_written(experiment, context, root, preset, fields)


def _others(view, records, path):
    """Return the pictures that the run itself has drawn, and draw none."""
    return _draw(replace(view, pictures={}), records, path)


def _measured_and_written(experiment, context, root, preset, fields):
    config = experiment.config(**(experiment.preset(preset, on_gpu=False) | fields))
    with run_folder(context, root, experiment.name, "run") as folder:
        config = experiment.prepare(config, context)
        run = experiment.open(config, context, folder)
        experiment.measure(config, context, run)
        if context.is_main:
            experiment.finish(run, json_only=True)
    return list(experiment.view.derived(run.records))


def refused(capsys, *arguments):
    """The one line with which `distlab run …` refuses these arguments.

    A command whose ranks may start runs in a fork. Under xdist this process has a second thread,
    and there each rank would import torch again.
    """
    if "--nproc" in arguments:
        code, said = _in_a_fork(["-m", "launch", "run", *arguments])
    else:
        try:
            code = main(["run", *arguments])
        except SystemExit as end:  # argparse's
            code = end.code
        said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if "error:" in line]
    assert code == 2 and len(lines) == 1, (code, said)
    return lines[0]


def _in_a_fork(command):
    """Exit code and stderr of `python COMMAND…` in this process's folder."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = forked(command, stdout, stderr, partial(_be_python_in, os.getcwd()))
        process.join(120)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{command} takes more than 120 s: {stderr.read_text()}")
        return process.exitcode, stderr.read_text()


def _be_python_in(folder, command):
    os.chdir(folder)
    be_python(command)
