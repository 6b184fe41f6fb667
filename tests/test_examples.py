"""The files in examples/: they train, and resume under another strategy.

So does the loop that the README shows.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import nn

import distlab
from distlab.parallel import BucketedDDP
from distlab.testing import run_ranks
from distlab.train.evaluate import validation_loss
from distlab.train.sample import generate
from examples import compare_strategies, train
from experiments import ddp_bench
from tests.commands import ROOT
from tests.experiments.frame import measured


@pytest.fixture
def run(tmp_path):
    """The options of a short run; `run(folder, *more)`."""
    few = ["--batch=4", "--steps=8", "--save-every=4", "--log-every=1"]
    return lambda folder, *more: [*few, f"--folder={tmp_path / folder}", *more]


@contextmanager
def in_short():
    """Sample 8 bytes instead of 200, and validate on 8 sequences instead of 64.

    Both take the same code again and again, and most of a run's time.
    """

    def few_bytes(model, prompt, count):
        return generate(model, prompt, min(count, 8))

    def few_sequences(model, data, context, *, sequences, batch):
        return validation_loss(model, data, context, sequences=min(sequences, 8), batch=batch)

    with patch.multiple(train, generate=few_bytes, validation_loss=few_sequences):
        yield


def on_rank(context, options):
    with in_short():
        return train.train(train.parse(options), context)


@in_short()
def test_a_run_that_changes_strategy_and_ranks_has_the_losses_of_an_uninterrupted_one(
    run, capsys, tmp_path
):
    whole = train.main(run("whole"))
    assert list(whole) == [*range(1, 9)] and whole[8] < whole[1] - 1.5, whole
    shown = capsys.readouterr().out
    assert "on text it was not trained on" in shown and "\nThe " in shown

    text = tmp_path / "text.txt"
    text.write_bytes(train.sentences())
    parts = run("changing", f"--text={text}", "--accumulate=2")
    before, same = run_ranks(on_rank, 2, [*parts, "--strategy=zero1", "--steps=4"])
    after = train.main([*parts, "--strategy=fsdp"])
    assert "from step 4, which 2 rank(s) wrote under zero1" in capsys.readouterr().out
    assert before == same and list(after) == [*range(5, 9)]
    # The same sums in another order: 2e-6 apart.
    assert before | after == pytest.approx(whole, abs=2e-5)


def differences(context):
    return compare_strategies.compare(context, lambda _: None, width=16, steps=4)


def test_the_strategies_of_one_file_train_as_the_labs_do():
    """At two ranks bit for bit.

    At three a sum's order depends on where its element lies in a message.
    """
    names = ["naive", "flat", "overlap", "bucketed", "zero1", "fsdp"]
    for found in run_ranks(differences, 2):
        assert found == dict.fromkeys(names, 0.0)
    for found in run_ranks(differences, 3):
        assert list(found) == names and max(found.values()) < 1e-6, found


def test_the_strategies_of_one_file_are_read_in_one_sitting():
    text = (ROOT / "examples" / "strategies.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450


def test_the_own_model_goes_through_the_bench(tmp_path):
    choice = {"factory": "examples.own_model:build", "strategies": ("local", "bucketed", "fsdp")}
    choice["profile_steps"] = 0  # no trace is looked at
    rows = {
        record.variant: record.metrics
        for record in measured(ddp_bench.EXPERIMENT, tmp_path, **choice)
    }
    for name in ("bucketed", "fsdp"):  # as one process over the batches of both ranks
        assert rows[name]["verdict"] == "right" and rows[name]["comm_bytes_per_step"] > 0


def test_the_loop_of_the_readme_trains(one_rank):
    loop = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )[1]
    module, batches = nn.Linear(4, 3), [(torch.randn(2, 4), torch.tensor([0, 2]))]
    before = module.weight.clone()
    imported = {
        "BucketedDDP": BucketedDDP,
        "AdamW": torch.optim.AdamW,
        "cross_entropy": nn.functional.cross_entropy,
    }
    exec(loop, imported | {"module": module, "batches": batches})
    assert not torch.equal(module.weight, before)


def test_the_cells_of_the_notebook_run(tmp_path):
    """As a kernel executes them: one after the other, in a process that has no main file."""
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = f"names = {{'__name__': '__main__'}}\nfor cell in {sources!r}:\n    exec(cell, names)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+) +[\d.]+ ms, (\d+) messages$", done.stdout, re.M)[:2] == [
        ("local", "0"),
        ("flat", "1"),
    ]
    assert (
        done.stdout.splitlines()[-1] == "[3.0, 3.0, 3.0]"
        and (tmp_path / "outputs" / "ddp_bench").is_dir()
    )


def test_a_run_from_python_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)exit code 2.*'nope' is unknown"):
        distlab.run("ddp_bench", strategies=["nope"])
