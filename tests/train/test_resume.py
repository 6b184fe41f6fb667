"""What a resumed run takes over besides parameters and moments, and what it must not be given
another of.
"""

import itertools

import pytest
import torch

from distlab.testing import run_ranks
from distlab.train.config import refuse_other_run
from tests.parallel.test_contract import on_two_ranks
from tests.train.cases import Run, draw_from_all_generators, tiny


def parameters(run):
    """All of this rank's parameters in one vector, once they have arrived."""
    run.trainer.wrapper.synchronize()
    return torch.cat(
        [p.detach().flatten().clone() for p in run.trainer.wrapper.module.parameters()]
    )


@on_two_ranks
def test_the_loss_scale_and_every_option_of_a_group_are_those_of_the_checkpoint(context, tmp_path):
    """fp16 would begin again at a scale of 65,536.

    A weight decay that was changed on the way would be lost.
    """
    for strategy in ("bucketed", "sharded-optimizer", "zero1", "zero2", "fsdp"):
        folder = tmp_path / strategy
        first = Run(context, folder, strategy=strategy, dtype="fp16")
        first.trainer.one_step()
        first.trainer.scaler.scale, first.trainer.scaler.good_steps = 512.0, 7
        for group in first.trainer.optimizer.param_groups:
            group |= {"weight_decay": 40.0, "betas": (0.5, 0.6), "eps": 1e-3}
        first.save()
        second = Run(context, folder, strategy=strategy, dtype="fp16")
        assert second.trainer.resume()
        assert second.trainer.scaler.state_dict() == {"scale": 512.0, "good_steps": 7}
        (group,) = second.trainer.optimizer.param_groups
        assert (group["weight_decay"], group["betas"], group["eps"]) == (40.0, (0.5, 0.6), 1e-3)
        before = parameters(second)
        for run in (first, second):
            run.trainer.one_step()
        # the options are those that the step uses
        assert torch.equal(parameters(first), parameters(second))
        assert not torch.equal(parameters(second), before)


def generators(context, folder):
    """What a rank would draw at the beginning of the run, and what it draws after having
    resumed.
    """
    Run(context)
    beginning = draw_from_all_generators()
    run = Run(context, folder)
    if run.trainer.resume():
        return beginning, draw_from_all_generators()
    draw_from_all_generators()  # as dropout would
    run.save(steps=1)
    return beginning, []


def test_a_rank_that_the_checkpoint_does_not_know_draws_what_nobody_has_drawn(tmp_path):
    """Written by one rank and resumed by two: dropout on the second must not repeat its
    beginning.
    """
    run_ranks(generators, 1, str(tmp_path))
    first, second = run_ranks(generators, 2, str(tmp_path))
    drawn = [*first, *second]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))


# A resumed run must repeat what decides the sequence of losses. Not so strategy, world size,
# micro-batches or what is only written and shown; `steps` may grow.
LASTING = {
    "seed": 1,
    "clip": 0.5,
    "batch": 24,
    "lr": 0.5,
    "lr_floor": 0.5,
    "warmup": 1,
    "weight_decay": 0.5,
    "beta2": 0.5,
    "dtype": "bf16",
    "dropout": 0.5,
    "vocab": 37,
    "context": 16,
}


@pytest.mark.parametrize("name, value", LASTING.items())
def test_what_decides_the_losses_must_be_repeated(name, value):
    with pytest.raises(ValueError, match=f"{name}.* is .* there and {value!r} here"):
        refuse_other_run(tiny().identity({}), tiny(**{name: value}).identity({}), "a checkpoint")


def test_what_does_not_decide_the_losses_may_change():
    for changes in (
        {"strategy": "fsdp"},
        {"accumulate": 3},
        {"steps": 7},
        {"keep": 1},
        {"validate_every": 2},
    ):
        refuse_other_run(tiny().identity({}), tiny(**changes).identity({}), "a checkpoint")
