"""Pipelines under data strategies and beside the other axes: to the bit one process with the same
micro-batches.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from distlab.measure import CollectiveRecorder
from distlab.model import ModelConfig
from distlab.parallel import Layout, get_strategy
from distlab.parallel.pipeline import Pipeline
from distlab.parallel.schedules import SCHEDULES
from distlab.theory.axes import layout_volume
from distlab.theory.volume import CommunicationVolume
from distlab.train.build import check_layout
from distlab.train.memory_budget import rank_parts
from distlab.train.step import TrainStep, loss_function
from tests.parallel.axes import (
    ON_GPUS,
    ROWS,
    Row,
    Training,
    assert_as_one_process,
    assert_near_fp64,
    built,
    one_process,
    trained,
)
from tests.parallel.test_contract import BACKENDS, on_four_ranks, on_two_ranks

CONFIG = ModelConfig(
    d_model=16, d_ff=32, num_layers=4, num_heads=4, num_kv_heads=2, vocab_size=32, context_length=8
)
DEEP = replace(CONFIG, num_layers=8)  # four stages in two parts each, or stages of several blocks
MICRO_BATCHES = 4
TRAINING = Training(CONFIG, MICRO_BATCHES)
ALONE: dict[int, list[Row]] = {  # ranks → pipelines that have all ranks: to the bit
    2: [
        ("pp2", "naive"),
        ("pp2-gpipe", "bucketed"),
        ("pp2-interleaved", "zero1"),
        ("pp2-zero-bubble", "bucketed"),
        ("pp2-interleaved", "fsdp"),
        ("pp2-zero-bubble", "zero1"),
        ("pp2-interleaved", "zero2"),
        ("pp2-zero-bubble", "zero2"),
    ],
    3: [
        ("pp3", "bucketed"),
        ("pp3-gpipe", "naive"),
        ("pp3-interleaved", "fsdp"),
        ("pp3-zero-bubble", "zero1"),
    ],
    4: [
        ("pp4", "bucketed"),
        ("pp4-gpipe", "fsdp"),
        ("pp4-interleaved", "bucketed"),
        ("pp4-zero-bubble", "overlap"),
    ],
}
TOGETHER: list[Row] = [  # four ranks
    ("pp2", "fsdp"),
    ("pp2-interleaved", "fsdp"),
    ("pp2-zero-bubble", "bucketed"),
    ("pp2", "zero1"),
    ("pp2,tp2", "bucketed"),
    ("pp2-interleaved,cp2", "zero1"),
    ("pp2-interleaved", "zero2"),
    ("pp2-zero-bubble", "zero2"),
    ("pp2-zero-bubble,tp2", "naive"),
    ("pp2,cp2-ring", "fsdp"),
]


@pytest.mark.parametrize("ranks", ALONE)
def test_every_schedule_is_one_process_to_the_bit(ranks):
    training = replace(TRAINING, dtype=torch.float32, max_norm=None)
    if ranks == 3:  # which do not divide eight blocks
        training = replace(training, config=replace(CONFIG, num_layers=6), micro_batches=3)
    if ranks == 4:
        training = replace(training, config=DEEP)
    alone = one_process(training)
    rows = ALONE[ranks]
    for row, found in zip(rows, trained(training, ranks, rows), strict=True):
        assert list(found.losses) == [alone.losses] * ranks, f"{row}: losses"
        for name in training.shapes:
            same_gradient = torch.equal(found.gradients[name], alone.gradients[name])
            assert same_gradient, f"{row}: gradient of {name}"
            assert torch.equal(found.parameters[name], alone.parameters[name]), f"{row}: {name}"


def test_beside_data_tensor_and_context_parallelism():
    assert_as_one_process(TRAINING, 4, TOGETHER)


def test_all_axes_at_once(request):
    """Eight ranks: tp2 · cp2 · pp2."""
    assert_as_one_process(TRAINING, 8, [("pp2,tp2,cp2", "bucketed")])
    if request.config.getoption("--all-layouts"):
        layouts = ("tp2,cp2", "tp2,cp2-ring", "tp2", "cp2", "cp2-ulysses", "cp4-ring")
        for schedule, layout in product(SCHEDULES, layouts):
            strategies = ["naive", "bucketed", "zero1"]
            if schedule != "zero-bubble":
                strategies.append("fsdp")
            text = f"pp2-{schedule},{layout}"
            assert_as_one_process(TRAINING, 8, [(text, strategy) for strategy in strategies])


@pytest.mark.parametrize(
    "row, options",
    [
        (("pp2", "bucketed"), {"compile": "blocks"}),
        (("pp2-interleaved", "zero1"), {"checkpointing": "every-2"}),
        (("pp2", "fsdp"), {"checkpointing": "attention"}),
        (("pp2-interleaved", "fsdp"), {"checkpointing": "block", "keep_gathered": True}),
    ],
)
def test_compiled_blocks_and_recomputation_change_no_gradient(row, options):
    assert_as_one_process(replace(TRAINING, options=options), 2, [row])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_ranks_on_gpus_do_so_by_the_labs_kernels(backend, compute):
    rows = [
        ("pp2", "bucketed"),
        ("pp2-gpipe", "zero1"),
        ("pp2-interleaved", "fsdp"),
        ("pp2-zero-bubble", "bucketed"),
    ]
    assert_near_fp64(
        replace(TRAINING, max_norm=None), rows, compute, alone="cuda:0", **ON_GPUS[backend]
    )


def noted(ran, action):
    ran.append(action)
    return nullcontext()


@on_four_ranks
def test_what_runs_is_the_list(context):
    for name in SCHEDULES:
        layout = Layout(pipeline=context.world_size, schedule=name)
        _, model, _ = built(context, DEEP, layout)
        ran: list = []
        model.pipeline.observe = partial(noted, ran)
        model.pipeline.run(model, loss_function(DEEP, layout), TRAINING.batches(0))
        assert ran == SCHEDULES[name](context.world_size, MICRO_BATCHES)[context.rank], name


COUNTED = [  # (layout, strategy)
    ("pp2", "bucketed"),
    ("pp2", "fsdp"),
    ("pp2-interleaved", "bucketed"),
    ("pp2-interleaved", "fsdp"),
    ("pp2-zero-bubble", "bucketed"),
    ("pp2,tp2", "bucketed"),
    ("pp2,tp2", "fsdp"),
]


@on_four_ranks
def test_a_step_sends_what_the_closed_form_says(context):
    """Of each rank."""
    for text, strategy in COUNTED:
        layout = Layout.parse(text)
        _, model, optimizer = built(context, CONFIG, layout, strategy, bucket_size_mb=0.01)
        step = TrainStep(model, optimizer, loss_function(CONFIG, layout))
        step(TRAINING.batches(0))  # an order is learned
        with CollectiveRecorder() as recorder:
            step(TRAINING.batches(1))
        parts = rank_parts(CONFIG, layout, micro_batches=MICRO_BATCHES)
        said = layout_volume(
            get_strategy(strategy),
            parts[layout.axes(context.group).pipeline.rank()].shape,
            batch=ROWS,
            context=CONFIG.context_length,
            world_size=context.world_size,
            bucket_size_mb=0.01,
            micro_batches=MICRO_BATCHES,
            pipeline=layout.pipeline,
        )
        assert CommunicationVolume(recorder.count, recorder.total_bytes) == said, (
            f"{text} {strategy}"
        )
        model.close(restore=False)


@on_two_ranks
def test_stages_of_other_sizes_keep_the_names_of_the_whole(context):
    _, model, _ = built(context, DEEP, Layout.parse("pp2", stages=(5, 3)))
    blocks = {name.split(".")[1] for name, _ in model.module.named_parameters() if "blocks" in name}
    assert blocks == set("567" if context.rank else "01234")


def test_a_loss_of_a_sum_and_a_count_is_refused():
    """`TrainStep` takes it without a pipeline."""
    pipeline = SimpleNamespace(stages=[()])
    model = Mock(autocast=nullcontext)
    with pytest.raises(TypeError, match="returns what the model returns, a tensor, and not tuple"):
        Pipeline._forward(pipeline, model, lambda model, batch: (model(), 8), None, 0, None)


@pytest.mark.parametrize(
    "layout, compile, said",
    [
        ("pp2", "model", "--compile blocks"),
        ("pp2-zero-bubble", "blocks", "--compile off"),
        ("pp2-interleaved", "off", "take 4"),
    ],
)
def test_what_cannot_be_asked_for(layout, compile, said):
    with pytest.raises(ValueError, match=said):
        check_layout(Layout.parse(layout), compile, micro_batches=3)
