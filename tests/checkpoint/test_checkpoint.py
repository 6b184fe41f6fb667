"""Checkpoints: resumed at any world size under any strategy, and damaged in every way that disks
know.
"""

import os
import random
import resource
import shutil
import signal

import pytest
import torch
from torch import nn

from distlab.checkpoint import files, tensors
from distlab.checkpoint.checkpointer import Checkpointer, CheckpointError
from distlab.checkpoint.files import MARKER, CheckpointFolder, OtherFormat
from distlab.parallel import STRATEGIES as REGISTRY
from distlab.testing import RanksFailed, run_ranks
from distlab.train.loop import Trainer
from tests.parallel.test_contract import on_two_ranks
from tests.train.cases import STRATEGIES, Run, draw_from_all_generators

# The norm over pieces is a sum in another order than the norm over whole gradients: its last bit
# may differ.
UNCLIPPED = {"clip": 0.0, "steps": 4}
CUT = 2  # the step after which the checkpoint of these tests is written


def train_and_save(context, root, strategies, changes):
    """Four steps under each strategy, with a checkpoint after the second; the losses of the last
    two.

    Behind a strategy's name may stand a layout, as in `fsdp tp2`.
    """
    losses = {}
    for strategy in strategies:
        name, _, layout = strategy.partition(" ")
        run = Run(
            context,
            f"{root}/{strategy}",
            strategy=name,
            layout=layout,
            checkpoint_every=CUT,
            **changes,
        )
        run.trainer.run()
        # keep that of step 2
        shutil.rmtree(run.trainer.checkpoints.folder.path_of(2 * CUT), ignore_errors=True)
        losses[strategy] = {step: loss for step, loss in run.losses.items() if step > CUT}
        torch.distributed.barrier()
    return losses


def resume(context, pairs, root, changes):
    found = []
    for written, strategy in pairs:
        name, _, layout = strategy.partition(" ")
        options = {} if REGISTRY[name].takes_mesh else {"shard_size": None}
        run = Run(context, f"{root}/{written}", **changes | options, strategy=name, layout=layout)
        assert run.trainer.resume() and run.trainer.step == CUT
        run.trainer.checkpoints = None
        run.trainer.run()
        found.append(run.losses)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("checkpoints"))
    return root, run_ranks(train_and_save, 2, root, STRATEGIES, UNCLIPPED)[0]


def each_after_another(step):
    """(who wrote, who reads) with each strategy once as either."""
    return [(name, STRATEGIES[(i + step) % len(STRATEGIES)]) for i, name in enumerate(STRATEGIES)]


def test_resumed_at_the_same_world_size_strategies_continue_one_another_bit_for_bit(saved):
    """Compare losses after a change of strategy: every strategy adds two ranks in one order."""
    root, losses = saved
    pairs = [*each_after_another(-1), ("bucketed", "bucketed"), ("fsdp2", "fsdp2")]
    for (written, strategy), found in zip(
        pairs, run_ranks(resume, 2, pairs, root, UNCLIPPED)[0], strict=True
    ):
        assert found == losses[written], f"{written} → {strategy}"


def assert_continued(losses, world_size, pairs, root, changes):
    for (written, strategy), found in zip(
        pairs, run_ranks(resume, world_size, pairs, root, changes)[0], strict=True
    ):
        for step, expected in losses[written].items():
            # fp32 means of other groupings, through up to two AdamW steps of 1e-3
            difference = abs(float.fromhex(found[step]) - float.fromhex(expected))
            assert difference < 2e-5, f"{written} → {strategy} at step {step}"


@pytest.mark.parametrize("world_size", [1, 3])
def test_resumed_at_another_world_size_losses_are_those_of_the_uninterrupted_run(saved, world_size):
    """Resume from 2 ranks at 1 and 3: data and state stay, sums over ranks round differently."""
    root, losses = saved
    assert_continued(losses, world_size, each_after_another(1), root, UNCLIPPED)


def test_muons_momentum_is_stored_by_rows_and_continued_by_slices(tmp_path):
    """Bit for bit; and AdamW, whose state it is not, refuses it."""
    changes = UNCLIPPED | {"optimizer": "muon"}
    losses = run_ranks(train_and_save, 2, str(tmp_path), ["fsdp"], changes)[0]
    assert run_ranks(resume, 2, [("fsdp", "zero1")], str(tmp_path), changes)[0] == [losses["fsdp"]]
    with pytest.raises(RanksFailed, match="holds the state of Muon, not of AdamW"):
        run_ranks(resume, 2, [("fsdp", "zero1")], str(tmp_path), UNCLIPPED)


ON_A_MESH = {"shard_size": 2} | UNCLIPPED  # two shard groups of two ranks


# A reader finds each tensor by its name in an index, whoever wrote it. So `make test` has each form
# of a shard once as written and once as read, and leaves out pairs of forms that it has elsewhere.
SOME_OR_ALL = pytest.mark.parametrize(
    "is_all", [False, pytest.param(True, marks=pytest.mark.commands)], ids=["some", "all"]
)


@SOME_OR_ALL
def test_hybrid_sharding_continues_others_and_others_continue_it(saved, tmp_path, is_all):
    """Written at 2 × 2 ranks, each shard once, or by others at two; read at both.

    Others among them: see above.
    """
    root, losses = saved
    names = ["hsdp", "torch-hsdp"] if is_all else ["hsdp"]
    at_two = [("hsdp", "zero1")]
    others = [("fsdp", "hsdp")]
    if is_all:
        at_two.append(("torch-hsdp", "hsdp"))
        others.append(("bucketed", "torch-hsdp"))
    written = run_ranks(train_and_save, 4, str(tmp_path), names, ON_A_MESH)[0]
    assert_continued(written, 4, [("hsdp", "torch-hsdp")], str(tmp_path), ON_A_MESH)
    assert_continued(written, 2, at_two, str(tmp_path), ON_A_MESH)
    assert_continued(losses, 4, others, root, ON_A_MESH)


SHARED = UNCLIPPED | {"vocab": 32, "heads": 4}  # what two ranks can share


@SOME_OR_ALL
def test_ranks_that_share_matrices_continue_others_and_others_continue_them(tmp_path, is_all):
    """Boxes of rows and columns, cut once more by ZeRO or FSDP, read whole.

    And whole ones read as boxes.
    """
    names = ["fsdp tp2", "zero1 tp2,cp2"]
    pairs = [("fsdp tp2", "fsdp"), ("zero1 tp2,cp2", "bucketed tp4")]
    at_two = [("fsdp tp2", "bucketed tp2")]
    from_whole = [("fsdp", "zero1 tp4")]
    if is_all:
        names.append("bucketed tp4")
        pairs.append(("bucketed tp4", "zero1 cp2-ring"))
        at_two.append(("zero1 tp2,cp2", "fsdp"))
        from_whole.append(("zero1", "fsdp tp2"))
    written = run_ranks(train_and_save, 4, str(tmp_path), names, SHARED)[0]
    assert_continued(written, 4, pairs, str(tmp_path), SHARED)
    assert_continued(written, 2, at_two, str(tmp_path), SHARED)
    whole = [name for name, _ in from_whole]
    written = run_ranks(train_and_save, 2, str(tmp_path), whole, SHARED)[0]
    assert_continued(written, 4, from_whole, str(tmp_path), SHARED)


@SOME_OR_ALL
def test_stages_of_a_pipeline_continue_others_and_others_continue_them(tmp_path, is_all):
    """Each rank has some names alone: written and read by name, beside shared matrices and
    shards.
    """
    changes = SHARED | {"batch": 16, "accumulate": 2, "layers": 4}
    rows = ["fsdp pp2,tp2", "zero1 pp2-interleaved", "fsdp"]
    pairs = [("fsdp pp2,tp2", "fsdp"), ("zero1 pp2-interleaved", "bucketed pp2,cp2")]
    at_two = [("fsdp", "naive pp2")]
    if is_all:
        rows.append("bucketed pp4")
        pairs += [("fsdp", "fsdp pp2,tp2"), ("bucketed pp4", "zero1 pp2")]
        at_two.append(("bucketed pp4", "zero1"))
    written = run_ranks(train_and_save, 4, str(tmp_path), rows, changes)[0]
    assert_continued(written, 4, pairs, str(tmp_path), changes)
    assert_continued(written, 2, at_two, str(tmp_path), changes)


def test_at_least_one_checkpoint_is_kept(one_rank, tmp_path):
    with pytest.raises(ValueError, match="keep=0: at least one checkpoint must stay"):
        Checkpointer(tmp_path, one_rank, keep=0)


@on_two_ranks
def test_a_scheduler_is_built_before_loading_or_after_or_added(context, tmp_path):
    """torch's schedulers add options to the optimizer's groups."""

    def built(seed):
        torch.manual_seed(seed)
        module = nn.Linear(3, 2)
        return REGISTRY["zero1"].build(module, context.group, torch.optim.AdamW, {"lr": 0.1})

    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def trained(model, optimizer, scheduler):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            scheduler.step()
        return [value.clone() for value in model.full_parameters().values()]

    model, optimizer = built(0)
    scheduler = scheduler_of(optimizer)
    trained(model, optimizer, scheduler)
    checkpointer = Checkpointer(tmp_path, context)
    checkpointer.save(2, model, optimizer, strategy="zero1", extra={})
    checkpointer.wait()
    state = scheduler.state_dict()
    expected = trained(model, optimizer, scheduler)

    for is_first in (True, False):
        model, optimizer = built(1)
        scheduler = scheduler_of(optimizer) if is_first else None
        stored = checkpointer.newest()
        checkpointer.load(stored, model, optimizer)
        scheduler = scheduler or scheduler_of(optimizer)
        scheduler.load_state_dict(state)
        assert all(map(torch.equal, trained(model, optimizer, scheduler), expected))

    model, optimizer = built(2)  # without a scheduler, and then one is added
    checkpointer.save(3, model, optimizer, strategy="zero1", extra={})
    checkpointer.wait()
    model, optimizer = built(3)
    scheduler_of(optimizer)
    checkpointer.load(checkpointer.newest(), model, optimizer)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    checkpointer.close()


@on_two_ranks
def test_every_generator_is_restored(context, tmp_path):
    run = Run(context, tmp_path)
    random.gauss(0, 1)  # leaves a second number waiting inside Python's generator
    run.save(steps=1)
    expected = draw_from_all_generators()
    other = Run(context, tmp_path)
    other.trainer.resume()
    assert draw_from_all_generators() == expected


def stored_content(context, folder, strategy, shard_size):
    run = Run(context, folder, strategy=strategy, shard_size=shard_size)
    run.save(steps=1)
    return run.trainer.checkpoints.newest().content


def test_what_is_stored_is_unpadded_by_name_and_shared_among_ranks(tmp_path):
    forms = []
    for ranks, strategy, shard_size in (
        (3, "bucketed", None),
        (3, "zero1", None),
        (3, "fsdp", None),
        (4, "hsdp", 2),
    ):
        content = run_ranks(stored_content, ranks, str(tmp_path / strategy), strategy, shard_size)[
            0
        ]
        index = {
            key: entry for key, entry in content["tensors"].items() if not key.startswith("rng")
        }
        forms.append({key: (entry["shape"], entry["dtype"]) for key, entry in index.items()})
        assert forms[-1] == forms[0] and forms[0]["model/embedding.weight"] == ([31, 32], "float32")
        parts = index["optimizer/exp_avg/embedding.weight"]["parts"]
        assert sum(count for _, count, *_ in parts) == 31 * 32  # no padding
        sizes = [entry["bytes"] for entry in content["files"].values()]
        # nobody writes what another writes too
        assert len(sizes) == ranks and max(sizes) < 1.1 * min(sizes)


# -- damage ----------------------------------------------------------------------------------------


def write_two(context, folder):
    run = Run(context, folder, steps=4, checkpoint_every=2)
    run.trainer.run()


def newest_step(context, folder):
    messages: list[str] = []
    run = Run(context, folder)
    run.trainer.checkpoints.progress = messages.append
    run.trainer.resume()
    return run.trainer.step, messages


def refusal(context, folder):
    with pytest.raises((CheckpointError, OtherFormat)) as caught:
        Run(context, folder).trainer.resume()
    return str(caught.value)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_ranks(write_two, 2, str(folder))
    return folder


@pytest.fixture
def copied(two, tmp_path):
    """A folder with checkpoints of steps 2 and 4."""
    return shutil.copytree(two, tmp_path / "copied")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {  # what is done to the newer one → the file that the message names
    lambda folder: flip_a_bit(folder / "rank_1_0.bin"): "rank_1_0.bin",
    lambda folder: os.truncate(folder / "rank_0_0.bin", 100): "rank_0_0.bin",
    lambda folder: (folder / "rank_1_0.bin").unlink(): "rank_1_0.bin",
    lambda folder: (folder / MARKER).unlink(): MARKER,
}


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(two, tmp_path):
    """Check a flipped bit, a truncated or missing file, and a folder that was never complete."""
    for number, (damage, file) in enumerate(DAMAGE.items()):
        folder = shutil.copytree(two, tmp_path / str(number))
        damage(folder / "step_00000004")
        (step, messages), (other, _) = run_ranks(newest_step, 2, str(folder))
        assert step == other == 2, number
        (message,) = messages
        assert "step 4 is not used" in message and file in message
        assert "put aside as rejected-step_00000004" in message
        assert sorted(path.name for path in folder.iterdir()) == [
            "rejected-step_00000004",
            "step_00000002",
        ]


def test_if_all_are_damaged_nothing_is_begun_anew(copied):
    for step in ("step_00000002", "step_00000004"):
        flip_a_bit(copied / step / "rank_0_0.bin")
    for _ in range(2):  # the second time too: what is put aside would be no checkpoint at all
        for message in run_ranks(refusal, 2, str(copied)):
            assert (
                "none of the 2 checkpoints" in message and "Pass --fresh to start over" in message
            )


def test_what_has_the_name_of_a_temporary_folder_and_is_none_goes(tmp_path):
    """It was reported as removed, stayed, and the next checkpoint could not be written."""
    store, other = CheckpointFolder(tmp_path / "run"), tmp_path / "others"
    for place in (store.path, other):
        place.mkdir()
    (other / "kept").touch()
    file, link, gone = (store.temporary_path_of(step) for step in (2, 3, 4))
    for remove in (lambda: [store.begin(step) for step in (2, 3, 4)], store.clean):
        for path in (file, link, gone):
            files.shutil.rmtree(path, ignore_errors=True)
        file.touch()
        link.symlink_to(other)
        gone.symlink_to(tmp_path / "nothing")
        remove()
        assert not any(path.is_symlink() or path.is_file() for path in (file, link, gone))
    assert list(store.path.iterdir()) == [] and (other / "kept").exists()


def test_a_hundredth_checkpoint_is_put_aside_as_the_others(tmp_path):
    store = CheckpointFolder(tmp_path)
    for _ in range(100):
        store.path_of(4).mkdir()
        last = store.set_aside(4)
    assert last.name == "rejected-step_00000004-100" and store.steps() == []


@on_two_ranks
def test_a_checkpoint_of_another_model_lists_what_differs(context, two):
    """Check that errors list tensors that do not match, and options of another run."""
    trainer = Run(context, two, vocab=37, lr=0.5).trainer
    with pytest.raises(
        ValueError,
        match=r"another model.*embedding\.weight has shape \(31, 32\) .* \(37, 32\) here",
    ):
        trainer.checkpoints.load(trainer.checkpoints.newest(), trainer.wrapper, trainer.optimizer)
    with pytest.raises(
        ValueError, match=r"lr is 0\.001 there and 0\.5 here.*vocab_size is 31 there and 37 here"
    ):
        trainer.resume()


# -- writing that fails ----------------------------------------------------------------------------


@on_two_ranks
def test_a_full_disk_on_one_rank_is_an_error_on_all_that_names_it(context, tmp_path):
    """Check that the previous checkpoint stays, and no partial one gets its final name."""
    run = Run(context, tmp_path, steps=4)
    run.save(steps=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step 2 could not be written \(rank 1: .*too large.*1 is intact"
        ):
            run.save(steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    torch.distributed.barrier()
    assert run.trainer.checkpoints.newest().step == 1
    run.save()  # the disk has room again
    assert run.trainer.checkpoints.newest().step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def go_on_with_keep_1(context, folder, steps):
    """Resume and train up to a checkpoint at `steps`; the step that it went on from."""
    run = Run(context, folder, steps=steps, keep=1)
    run.trainer.resume()
    first = run.trainer.step
    run.trainer.run()
    run.trainer.close()
    return first


def test_the_last_one_that_can_be_loaded_is_never_deleted(copied):
    """A bit flips in the newest, which shows in no file's size: what was rejected does not count as
    kept.
    """
    flip_a_bit(copied / "step_00000004" / "rank_0_0.bin")
    assert run_ranks(go_on_with_keep_1, 2, str(copied), 3) == [2, 2]
    assert sorted(path.name for path in copied.iterdir()) == [
        "rejected-step_00000004",
        "step_00000003",
    ]
    assert run_ranks(go_on_with_keep_1, 2, str(copied), 4) == [3, 3]
    assert sorted(path.name for path in copied.iterdir()) == [
        "rejected-step_00000004",
        "step_00000004",
    ]


def test_what_nobody_checked_does_not_count_as_kept(copied):
    store = CheckpointFolder(copied)
    assert store.prune(1, set()) == store.prune(1, {2}) == store.prune(2, {2, 4}) == []
    assert store.prune(1, {4}) == [2] and store.steps() == [4]


class Died(BaseException):
    """Stands for SIGKILL."""


def test_what_is_deleted_has_lost_its_name_first(copied, monkeypatch):
    """A deletion that is cut short, of a checkpoint written again or of an old one, leaves no half
    one to be read.
    """
    store = CheckpointFolder(copied)

    def begin_again():
        shutil.copytree(store.path_of(4), store.temporary_path_of(4))
        (store.temporary_path_of(4) / MARKER).unlink()
        content = {
            key: value
            for key, value in store.open(4).content.items()
            if key not in ("format", "step")
        }
        store.commit(4, content)

    def die_in_the_middle(path, **options):
        files = sorted(path.iterdir()) if path.is_dir() else []
        if files:
            files[0].unlink()
            raise Died

    for action in (begin_again, lambda: store.prune(1, known_good={4})):
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", die_in_the_middle)
            with pytest.raises(Died):
                action()
        for step in store.steps():
            files.check_sizes(store.open(step))
    assert store.steps() == [4]


def test_a_checkpoint_is_flushed_before_it_has_its_name_and_its_name_after(copied, monkeypatch):
    """Else a machine that loses power may have the name without the files, or not the name."""
    store, flushed = CheckpointFolder(copied), []
    content = {
        key: value for key, value in store.open(4).content.items() if key not in ("format", "step")
    }
    monkeypatch.setattr(
        files, "sync_folder", lambda path: flushed.append((path, 6 in store.steps()))
    )
    store.begin(6)
    store.commit(6, content)
    assert flushed == [(store.temporary_path_of(6), False), (copied, True)]


# -- death while writing ---------------------------------------------------------------------------


def die_while_saving(context, folder, point):
    """Complete step 1, then end this rank by SIGKILL at a random event of writing step 2."""
    run = Run(context, folder)
    run.save(steps=1)
    chance = random.Random(1000 * point + context.rank)
    # Every write to a file, flush, rename and removal is an event; a checkpoint of this model has
    # about 75.
    remaining = chance.randrange(80)

    def count_down(original):
        def counted(*args, **kwargs):
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return counted

    tensors.append = count_down(tensors.append)
    for name in ("fsync", "rename", "replace", "rmdir", "mkdir", "open"):
        setattr(os, name, count_down(getattr(os, name)))
    run.save(steps=1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigkill_at_random_points_of_a_write_leaves_a_checkpoint_that_loads(tmp_path, request):
    """Check that the newest complete checkpoint, of step 1 or 2, loads bit for bit."""
    reference = run_ranks(reference_losses, 2)[0]
    for point in range(request.config.getoption("--kill-points")):
        folder = str(tmp_path / str(point))
        with pytest.raises(RanksFailed):
            run_ranks(die_while_saving, 2, folder, point, group_timeout_s=6)
        step, losses = run_ranks(resumed_losses, 2, folder)[0]
        assert step in (1, 2)
        assert losses == {number: loss for number, loss in reference.items() if number > step}


def reference_losses(context):
    run = Run(context, None, steps=3)
    run.trainer.run()
    return run.losses


def resumed_losses(context, folder):
    run = Run(context, folder, steps=3)
    assert run.trainer.resume()
    step = run.trainer.step
    run.trainer.checkpoints = None
    Trainer.run(run.trainer)
    return step, run.losses
