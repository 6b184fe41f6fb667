"""The loop: what all strategies compute alike, and how a run ends that cannot go on."""

import gc
import os
import signal
import time

import numpy as np
import pytest

from distlab.parallel import strategies_on
from distlab.testing import run_ranks
from distlab.train.config import TRAINABLE
from distlab.train.data import TokenWindows
from distlab.train.evaluate import validation_loss
from distlab.train.metrics import NonFiniteLoss
from tests.parallel.test_contract import on_two_ranks
from tests.train.cases import Run, digest


def losses_and_norms(context, each):
    """Of a run with each of these changes."""
    found = []
    for changes in each:
        run = Run(context, None, steps=4, **changes)
        outcome = run.trainer.run()
        assert [group["lr"] for group in run.trainer.optimizer.param_groups] == [
            run.trainer.schedule(3)
        ]
        found.append((run.losses, run.norms, outcome.validation[-1][1]))
        run.trainer.close()
    return found


TRAINABLE_ON_CPU = [name for name in TRAINABLE if name in strategies_on("cpu")]


def test_all_strategies_train_alike_bit_for_bit():
    """Losses and validation of the same steps, in every bit: two ranks add in one order, whatever
    the strategy.
    """
    each = [{"strategy": name, "clip": 0.0} for name in TRAINABLE_ON_CPU]
    results = [
        (losses, validation) for losses, _, validation in run_ranks(losses_and_norms, 2, each)[0]
    ]
    assert len(results[0][0]) == 4
    assert {
        name: found
        for name, found in zip(TRAINABLE_ON_CPU, results, strict=True)
        if found != results[0]
    } == {}


def test_accumulation_dtypes_recomputation_and_compiled_names():
    checkpointing = ("block", "qkv:1,attention:1", "auto")
    alike = [
        {},
        {"accumulate": 3},
        {"strategy": "fsdp", "accumulate": 3, "reshard": "step"},
        {"attention": "naive"},
    ]
    alike += [{"checkpointing": keep} for keep in checkpointing]
    low = [{"strategy": strategy, "dtype": "bf16"} for strategy in ("bucketed", "fsdp")]
    changed = [{"strategy": "zero1"} | changes for changes in alike] + low
    plain, *others = (losses for losses, *_ in run_ranks(losses_and_norms, 2, changed)[0])
    for changes, losses in zip(changed[1:], others, strict=True):
        is_low = changes in low
        assert not is_low or losses != plain
        for step, loss in plain.items():
            expected = pytest.approx(float.fromhex(loss), abs=0.03 if is_low else 1e-5)
            assert float.fromhex(losses[step]) == expected, changes


def overflow_on_one_rank(context, strategy):
    """fp16's scaler with a scale so large that one rank's gradients overflow; then a good step."""
    run = Run(context, None, strategy=strategy, dtype="fp16", clip=1.0)
    trainer = run.trainer
    trainer.wrapper.compute_dtype = None  # fp32, so that only the injection overflows
    trainer.scaler.scale = 4.0
    before = digest(trainer.wrapper)
    loss_of = trainer.train_step.loss_fn
    weight = float("inf") if context.rank == 1 else 1.0

    def overflowing(model, batch):
        loss = loss_of(model, batch)
        loss.register_hook(lambda gradient: gradient * weight)
        return loss

    trainer.train_step.loss_fn = overflowing
    trainer.one_step()
    skipped, unchanged = trainer.train_step.last_step_skipped, digest(trainer.wrapper) == before
    trainer.train_step.loss_fn = loss_of
    trainer.one_step()
    norm = trainer.train_step.grad_norm.item()
    assert not trainer.train_step.last_step_skipped and digest(trainer.wrapper) != before
    return skipped, unchanged, trainer.scaler.scale, norm


@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "fsdp"])
def test_an_overflow_on_one_rank_is_skipped_by_all(strategy):
    """Check that all ranks skip the step, halve the scale and change nothing else.

    The reported norm is unscaled.
    """
    expected = run_ranks(losses_and_norms, 2, [{}])[0][0][1]
    for skipped, unchanged, scale, norm in run_ranks(overflow_on_one_rank, 2, strategy):
        assert skipped and unchanged and scale == 2.0
        assert 0.5 < norm / expected[2] < 2  # unscaled: a factor of the scale would show


@pytest.mark.parametrize("where", ["loss", "gradient"])
@on_two_ranks
def test_a_nan_stops_all_ranks_with_step_and_rank_and_the_last_good_checkpoint_stays(
    context, tmp_path, where
):
    """Check that no checkpoint holds a NaN that rank 1 computed and every rank has received.

    The NaN occurs in the fourth step, after which a checkpoint is due.
    """
    run = Run(context, tmp_path, checkpoint_every=2, steps=6, clip=0.0)
    trainer = run.trainer
    loss_of = trainer.train_step.loss_fn

    def poisoned(model, batch):
        loss = loss_of(model, batch)
        if context.rank == 1 and trainer.step == 3 and where == "loss":
            return loss * float("nan")
        if context.rank == 1 and trainer.step == 3:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    trainer.train_step.loss_fn = poisoned
    with pytest.raises(NonFiniteLoss) as caught:
        trainer.run()
    said = str(caught.value)
    assert "step 4" in said and "The checkpoint of step 2 is good" in said
    assert ("loss is nan on rank 1" if where == "loss" else "gradient norm is not finite") in said
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def stop_by_signal(context, folder):
    """Rank 1 alone is asked to stop, in the middle of its fourth step."""
    run = Run(context, folder, steps=50)
    data = run.trainer.train
    rows = data.rows

    def interrupted(numbers):
        if context.rank == 1 and run.trainer.step == 3:
            run.trainer.stop.received = signal.SIGTERM
        return rows(numbers)

    data.rows = interrupted
    outcome = run.trainer.run()
    return outcome.last_step, outcome.stopped_by, run.trainer.checkpoints.newest().step


def test_a_signal_to_one_rank_stops_all_at_one_step_with_a_checkpoint(tmp_path):
    results = run_ranks(stop_by_signal, 2, str(tmp_path))
    assert results[0] == results[1]
    last, stopped_by, stored = results[0]
    assert stopped_by == signal.SIGTERM and stored == last and 3 < last < 7


@pytest.mark.parametrize("strategy", ["bucketed", "fsdp"])
@on_two_ranks
def test_a_closed_trainer_leaves_no_descriptor_and_no_thread(context, tmp_path, strategy):
    """Each trainer makes two groups of its own, of five descriptors and three threads each on a
    rank.
    """

    def held():
        return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]

    found = []
    for number in range(3):
        run = Run(context, tmp_path / str(number), strategy=strategy, steps=1)
        run.trainer.run()
        run.trainer.close()
        del run
        gc.collect()
        deadline = time.monotonic() + 10  # gloo closes its sockets in a thread of its own
        while found and more(held(), found[0]) and time.monotonic() < deadline:
            time.sleep(0.02)
        found.append(held())
    assert not more(found[1], found[0]) and not more(found[2], found[0]), found


def more(held, before):
    return any(now > then for now, then in zip(held, before, strict=True))


def ragged_validation(context, strategy):
    run = Run(context, None, strategy=strategy)
    # 59 targets, 8 windows
    data = TokenWindows(np.arange(60, dtype=np.uint8) % 31, 31, 8, ragged=True)
    return validation_loss(run.trainer.wrapper, data, context, sequences=100, batch=2)


def test_validation_counts_each_token_once_at_every_world_size():
    """Check a ragged last window, unequal numbers of windows, and a rank without any."""
    alone = run_ranks(ragged_validation, 1, "bucketed")[0]
    for world_size, strategy in ((2, "bucketed"), (3, "fsdp")):
        losses = run_ranks(ragged_validation, world_size, strategy)
        assert len(set(losses)) == 1 and losses[0] == pytest.approx(alone, abs=1e-6)


def losses_with_dropout(context, validate_every):
    run = Run(context, None, steps=4, dropout=0.3, validate_every=validate_every)
    outcome = run.trainer.run()
    assert len(outcome.validation) == (4 if validate_every else 1)
    return run.losses


def test_validation_leaves_no_trace_in_training():
    """With dropout: validation draws no random numbers, and the steps after it go on dropping."""
    assert run_ranks(losses_with_dropout, 2, 1) == run_ranks(losses_with_dropout, 2, 0)
