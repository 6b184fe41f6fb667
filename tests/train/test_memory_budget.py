"""What a run needs of the machine is looked at before anything is built."""

import re
from dataclasses import replace

import pytest
import torch

from distlab.measure.memory import parameters_of, tensor_bytes
from distlab.model.config import KEPT, preset
from distlab.parallel import STRATEGIES
from distlab.testing import run_ranks
from distlab.theory.memory import peak
from distlab.theory.memory.peak import step_memory
from distlab.theory.model_shape import ModelShape
from distlab.train import memory_budget
from distlab.train.build import build_training
from distlab.train.config import TrainConfig
from distlab.train.memory_budget import (
    GIB,
    PlannedStep,
    least_recomputation,
    require,
    shortage,
    training_step,
)

TINY = preset("tiny")
LONG = preset("tiny", context_length=100_000_000)


@pytest.fixture
def free(monkeypatch):
    """Sets how much memory the machine has free."""

    def put(num_bytes):
        monkeypatch.setattr(memory_budget, "free_bytes", lambda device: num_bytes)

    put(16 * GIB)
    return put


def test_what_fits_is_let_through_and_so_is_what_nobody_can_judge(free):
    assert shortage(PlannedStep(TINY, 4), "cpu") is None
    free(None)
    assert shortage(PlannedStep(LONG, 4), "cpu") is None


def test_the_message_says_by_how_much_and_which_option_helps(free):
    text = shortage(PlannedStep(LONG, 4), "cpu")
    assert (
        "batch 4 × context 100,000,000 in fp32 under local does not fit in the memory of cpu"
        in text
    )
    needed, allowed, missing = (
        float(x.replace(",", "")) for x in re.findall(r"([\d,]+\.\d)", text)[1:4]
    )
    assert (allowed, missing) == (16.0, pytest.approx(needed - 16, abs=0.2))
    length = int(re.search(r"--context (\d+) would fit", text)[1])
    fits, larger = (PlannedStep(preset("tiny", context_length=n), 4) for n in (length, 2 * length))
    assert shortage(fits, "cpu") is None and shortage(larger, "cpu") is not None


def test_each_kind_of_excess_has_its_remedy(free):
    assert "--batch" in shortage(PlannedStep(TINY, 10**8), "cpu")
    both = shortage(PlannedStep(preset("tiny", context_length=10**7), 10**7), "cpu")
    assert "A smaller --batch and a smaller --context together" in both
    text = shortage(PlannedStep(preset("10B"), 1), "cpu")
    assert (
        "take a smaller --size, or --strategy fsdp --checkpointing block on 16 ranks with as much "
        "each" in text
    )
    text = shortage(PlannedStep(preset("10B", context_length=10**6), 1), "cpu")
    assert text.endswith("block on 16 ranks with as much each and a smaller --context")
    text = shortage(PlannedStep(preset("10B", vocab_size=10**9), 1), "cpu")
    assert text.endswith("too much alone: take a smaller --size")
    text = shortage(PlannedStep(preset("tiny", context_length=131_072), 4), "cpu")
    assert text.endswith("--checkpointing auto would fit")


def test_the_memory_of_many_layers_is_known_at_once(monkeypatch):
    """20,000 took 53 s: every block's moment was made, again and again."""
    many = PlannedStep(preset("tiny", num_layers=1000), 4)
    found = many.memory(2)
    assert len(found.moments) < 200
    monkeypatch.setattr(peak, "BLOCKS_SEEN", 1000)
    assert len(many.memory(2).moments) > 1000 and many.memory(2).peak == found.peak


def test_as_little_is_recomputed_as_the_memory_allows():
    """From nothing kept to everything, in the order of arithmetic per byte.

    The last blocks keep most.
    """
    plan = PlannedStep(preset("8B", ops="triton"), 1, "fsdp", "bf16", checkpointing="auto")
    peaks = {keep: replace(plan, checkpointing=keep).memory(2).peak.total for keep in KEPT}
    assert sorted(peaks, key=peaks.get) == list(KEPT)
    assert peaks["block"] == pytest.approx(68.4 * GIB, rel=0.02)  # measured on two H200s
    found = [least_recomputation(plan, 2, gib * GIB, on_gpu=True) for gib in (60, 71, 160, 1000)]
    assert found[0] == "block" and found[-1] == "none"
    assert re.fullmatch(r"block:\d+,attention:\d+", found[1]) and re.fullmatch(
        r"gate-up:\d+,none:\d+", found[2]
    )
    assert least_recomputation(plan, 2, None, on_gpu=True) == "none"


def test_the_trainers_batch_is_that_of_all_ranks(free):
    config = TrainConfig(batch=10**8, accumulate=2)
    plan = training_step(config, 2)
    assert (plan.batch, plan.batch_option) == (10**8 // 4, 4)
    batch = int(re.search(r"--batch (\d+)", shortage(plan, "cpu"))[1])
    assert batch % 4 == 0
    said = [
        shortage(training_step(replace(config, batch=size), 2), "cpu")
        for size in (batch, batch + 4)
    ]
    assert said[0] is None and said[1] is not None  # the largest


@pytest.mark.parametrize("strategy", ["local", "fsdp", "torch-zero"])
def test_less_than_the_closed_form_is_certain_and_parts_of_a_step_need_less(strategy):
    plan = PlannedStep(preset("small"), 4, strategy, "bf16")
    casts = strategy == "fsdp"
    peak = step_memory(
        ModelShape.of(plan.model),
        batch=4,
        context=512,
        strategy=STRATEGIES[strategy],
        world_size=2,
        precision="bf16" if casts else "bf16-autocast",
        workspace_bytes=0,
    ).peak.total
    step = plan.least_bytes(2, on_gpu=False)
    assert 0.85 * peak < step < peak
    less = [
        replace(plan, mode=mode).least_bytes(2, on_gpu=False)
        for mode in ("inference", "forward_backward")
    ]
    assert less[0] < less[1] < step


@pytest.mark.parametrize("strategy, sharded", [("hsdp", "fsdp"), ("torch-hsdp", "fsdp2")])
def test_hybrid_sharding_needs_what_full_sharding_needs_on_the_ranks_of_a_group(strategy, sharded):
    hybrid = training_step(TrainConfig(strategy=strategy, shard_size=2), 8)
    full = replace(hybrid, strategy=sharded)
    assert (
        hybrid.least_bytes(8, on_gpu=False)
        == full.least_bytes(2, on_gpu=False)
        > full.least_bytes(8, on_gpu=False)
    )


@pytest.mark.parametrize("strategy, sharded", [("hsdp", "fsdp"), ("torch-hsdp", "fsdp2")])
def test_hybrid_sharding_divides_among_a_host_unless_said_otherwise(strategy, sharded):
    hybrid = training_step(TrainConfig(strategy=strategy), 32)
    full = replace(hybrid, strategy=sharded)
    needed = hybrid.least_bytes(32, on_gpu=False)
    assert needed == full.least_bytes(8, on_gpu=False) > full.least_bytes(32, on_gpu=False)
    # Ranks that are fewer than those of a host.
    assert hybrid.least_bytes(4, on_gpu=False) == full.least_bytes(4, on_gpu=False)


def planned_on_hosts(context, names):
    from distlab.comm import subgroups
    from distlab.simulate.plan import plan_steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subgroups.socket, "gethostname", lambda: names[context.rank])
        (plan,) = plan_steps([PlannedStep(TINY, 4, "hsdp")], context)
        _, model, optimizer = build_training(
            TINY, STRATEGIES["hsdp"], context.group, torch.optim.AdamW, device="cpu"
        )
        held = tensor_bytes(parameters_of(model, optimizer))
        model.close(restore=False)
    return plan.step.shard_size, plan.memory.after_init.parameters, held


def test_hybrid_sharding_is_planned_with_the_hosts_of_the_ranks():
    """Two hosts of two ranks: as much is held as is planned."""
    for size, planned, held in run_ranks(planned_on_hosts, 4, ["a", "a", "b", "b"]):
        assert size == 2
        assert planned == pytest.approx(held, rel=0.01)
        assert planned > PlannedStep(TINY, 4, "hsdp").memory(4).after_init.parameters


def test_one_that_fits_is_enough_where_rows_may_fail(free):
    planned = [PlannedStep(TINY, 4), PlannedStep(LONG, 4)]
    require(planned, "cpu", some=True)
    with pytest.raises(MemoryError, match="does not fit"):
        require(planned, "cpu")
    with pytest.raises(MemoryError, match="does not fit"):
        require(planned[1:], "cpu", some=True)


def test_a_strategy_that_needs_gpus_is_refused_on_a_cpu():
    with pytest.raises(
        ValueError, match="'bucketed-dma' needs GPUs, and this run computes on a CPU"
    ):
        require([PlannedStep(TINY, 4, "bucketed-dma")], torch.device("cpu"))


def short_on_rank_1(context):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "free_bytes", lambda device: (2 - context.rank) * GIB)
        try:
            require([PlannedStep(preset("tiny", context_length=2048), 8)], context.device, context)
        except MemoryError as error:
            return str(error)
    return "fits"


def test_ranks_of_one_host_share_its_memory_and_agree():
    """Rank 1 sees less free than rank 0; either alone would have enough of its own."""
    answers = run_ranks(short_on_rank_1, 2)
    assert len(set(answers)) == 1 and "for each of 2 ranks and 0.5 are free" in answers[0]
