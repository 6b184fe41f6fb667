"""Training under a user's own wrapper: bit-equal resumption, and refusals."""

import json

import pytest

from distlab.bench.wrappers import trained_by
from distlab.testing import run_ranks
from launch import trainer
from tests.commands import python
from tests.train.cases import Run, digest

WRAPPERS = "tests.bench.own_wrappers:"


def wrapped_run(context, name, folder=None, accumulate=1):
    """A run of the tiny model under a wrapper of `own_wrappers`."""
    wrapper = trained_by(WRAPPERS + name, accumulate)
    return Run(context, folder, wrapper, accumulate=accumulate)


def killed_and_resumed(context, name, folder):
    """The losses and parameters of six steps, undisturbed and with a new run after three."""
    whole = wrapped_run(context, name)
    whole.trainer.run()
    first = wrapped_run(context, name, folder)
    first.save(steps=3)
    first.trainer.close()
    second = wrapped_run(context, name, folder)
    assert second.trainer.resume()
    second.trainer.run()
    resumed = {step: whole.losses[step] for step in (4, 5, 6)} == second.losses
    return resumed, digest(whole.trainer.wrapper) == digest(second.trainer.wrapper)


@pytest.mark.parametrize("name", ["overlapped", "torch_ddp", "two_rates", "compiled_blocks"])
def test_a_resumed_run_repeats_the_bits(name, tmp_path):
    assert run_ranks(killed_and_resumed, 2, name, str(tmp_path)) == [(True, True)] * 2


def refusal(context, name, accumulate):
    with pytest.raises(ValueError) as refused:
        wrapped_run(context, name, accumulate=accumulate)
    return str(refused.value)


@pytest.mark.parametrize(
    "name, accumulate, sentence",
    [
        ("fsdp2", 1, "it leaves a rank a part of 'embedding.weight', and checkpoints need"),
        ("cut", 1, "it leaves a rank a part of 'embedding.weight', and checkpoints need"),
        ("torch_zero", 1, "its third value returns a ZeroRedundancyOptimizer, whose state"),
        ("overlapped", 2, "has no no_sync(), so it may send in each of the 2 backwards"),
    ],
)
def test_what_checkpoints_cannot_hold_is_refused(name, accumulate, sentence):
    for said in run_ranks(refusal, 2, name, accumulate):
        assert said.startswith(f"--wrap {WRAPPERS}{name}: ") and sentence in said, said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--wrap", "my_code", "--quick"], "--wrap my_code: give package.module:function"),
        (["--wrap", "a:b", "--layout", "tp2"], "--wrap a:b: your wrapper .* leave --layout out"),
        (["--wrap", "a:b", "--strategy", "fsdp"], "--wrap a:b: .* leave --strategy out"),
    ],
)
def test_options_that_a_wrapper_decides_are_refused_before_ranks_start(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        trainer.main(arguments)


def test_the_command_trains_under_it(tmp_path):
    wrap = WRAPPERS + "torch_ddp"
    options = ["--wrap", wrap, "--quick", "--nproc=2", "--backend=gloo", f"--out={tmp_path}"]
    done = python("launch/train.py", *options)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout.splitlines()[-1])["records"]
    assert record["variant"] == wrap and record["metrics"]["steps"] == 10
    assert (tmp_path / f"train/synthetic-tiny-{WRAPPERS.rstrip(':')}-torch_ddp").is_dir()
