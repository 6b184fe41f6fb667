"""Tensor and context parallelism under every data strategy: each gradient, and three steps, beside one process.

The loss alone shows little: norms whose gradients are not summed, an all-reduce too many behind the loss or another
rank's positions leave it as it is, or nearly so.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from distlab.comm import RankContext
from distlab.measure import CollectiveRecorder
from distlab.model import ModelConfig
from distlab.parallel import Layout, get_strategy
from distlab.simulate.step import simulate_training
from distlab.testing import run_ranks
from distlab.theory.axes import context_volume, tensor_volume
from distlab.theory.model_shape import ModelShape
from distlab.train.build import build_training
from tests.parallel.axes import (
    ON_GPUS,
    ROWS,
    Row,
    Training,
    assert_as_one_process,
    assert_near_fp64,
)  # fmt: skip

CONFIG = ModelConfig(
    d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64, context_length=24
)
TRAINING = Training(CONFIG, micro_batches=2)
STRATEGIES = ("naive", "bucketed", "zero1", "fsdp")
TABLE = {  # ranks → layouts under their strategies
    2: {"tp2": STRATEGIES, "cp2": STRATEGIES[1:], "cp2-ulysses": STRATEGIES[1:], "cp2-ring": STRATEGIES[1:]},
    3: {"cp3": ("bucketed",), "cp3-ring": ("zero1", "fsdp")},
    4: {"tp2": ("fsdp",), "cp2-ring": ("zero1",), "cp4-ring": ("fsdp",), "tp2,cp2": STRATEGIES[1:],
        "tp2,cp2-ulysses": (), "tp2,cp2-ring": ("fsdp",)},
}  # fmt: skip


def rows_of(table: dict[str, tuple[str, ...]]) -> list[Row]:
    return [(layout, strategy) for layout, strategies in table.items() for strategy in strategies]


@pytest.mark.parametrize("ranks", TABLE)
def test_gradients_and_steps_are_those_of_one_process(ranks):
    assert_as_one_process(TRAINING, ranks, rows_of(TABLE[ranks]))


def test_in_fp32_layouts_round_as_one_process_does():
    assert_near_fp64(TRAINING, 2, rows_of(dict.fromkeys(TABLE[2], ("bucketed",))))


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (("tp2", "fsdp"), {"checkpointing": "attention"}),
        (("tp2", "zero1"), {"checkpointing": "every-2"}),
        (("cp2-ring", "bucketed"), {"checkpointing": "block"}),
        (("tp2", "bucketed"), {"compile": "blocks"}),
    ],
)
def test_recomputation_and_compiled_blocks_change_no_gradient(row, options):
    assert_as_one_process(replace(TRAINING, micro_batches=1, options=options), 2, [row])


def counted(context: RankContext, layouts: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for layout in map(Layout.parse, layouts):
        _, model, _ = build_training(
            CONFIG, get_strategy("local"), context.group, torch.optim.SGD, {"lr": 1.0}, device=context.device,
            layout=layout,
        )  # fmt: skip
        shared = layout.axes(context.group).share(TRAINING.batches(0)[0])
        with CollectiveRecorder() as recorder:
            model(*shared).backward()
        found[str(layout)] = (recorder.count, recorder.total_bytes)
    return found


def test_messages_and_bytes_are_the_closed_forms():
    context = CONFIG.context_length
    layouts = ["tp2", "cp2", "cp2-ulysses", "cp2-ring", "tp2,cp2", "tp2,cp2-ring", "cp4-ring", "cp4"]
    found = run_ranks(counted, 4, layouts)[0]
    for layout in map(Layout.parse, layouts):
        shape = ModelShape.of(CONFIG, layout.tensor)
        inside = {"batch": ROWS, "context": context // layout.context}
        between = {"batch": ROWS, "context": context, "ranks": layout.context}
        forms = tensor_volume(shape, **inside), context_volume(shape, **between, how=layout.attention)
        expected = tuple(sum(getattr(form, field) for form in forms) for field in ("collectives", "bytes"))
        assert found[str(layout)] == expected, layout
        if layout.ranks == ROWS:  # a simulated group of ranks has a sequence for each of them
            step = simulate_training(CONFIG, "local", batch=1, world_size=4, dtype="fp32", layout=layout)
            assert (len(step.calls), step.comm_bytes) == expected, f"{layout}, simulated"


def refused(context: RankContext) -> dict[str, str]:
    """What each mistake is told; every rank alike, before anything is sent."""
    cases = {
        "heads": ("tp2", {"num_heads": 4, "num_kv_heads": 1}, "bucketed", {}),
        "vocabulary": ("tp2", {"vocab_size": 63}, "bucketed", {}),
        "dropout": ("tp2", {"dropout": 0.1}, "bucketed", {}),
        "ranks": ("tp3", {}, "bucketed", {}),
        "parts": ("pp2", {"num_layers": 3}, "bucketed", {}),
        "sizes": ("pp2", {}, "bucketed", {"stages": (2, 1)}),
        "tied": ("pp2", {"tie_embeddings": True}, "bucketed", {}),
        "fsdp": ("pp2-zero-bubble", {}, "fsdp", {}),
        "recomputed": ("pp2-zero-bubble", {}, "bucketed", {"checkpointing": "block"}),
    }
    found = {}
    for name, (layout, changes, strategy, options) in cases.items():
        stages = options.pop("stages", ())
        with pytest.raises(ValueError) as error:
            build_training(
                replace(CONFIG, **changes), get_strategy(strategy), context.group, torch.optim.SGD, {"lr": 1.0},
                device="cpu", layout=Layout.parse(layout, stages), **options,
            )  # fmt: skip
        found[name] = str(error.value)
    for name, layout in (("cut", Layout(tensor=2)), ("stages", Layout(pipeline=2))):
        with pytest.raises(TypeError) as type_error:
            get_strategy("naive").build(
                torch.nn.Linear(2, 2), context.group, torch.optim.SGD, {"lr": 1.0}, layout=layout
            )
        found[name] = str(type_error.value)
    with pytest.raises(ValueError) as error:
        Layout(context=2).axes(context.group).share(torch.zeros(1, 6))
    found["length"] = str(error.value)
    return found


def test_what_does_not_divide_is_one_sentence_on_every_rank():
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "cannot share 1 attention heads" in first["heads"] and "63 words" in first["vocabulary"]
    assert "set dropout to 0" in first["dropout"] and "does not divide the 2 ranks" in first["ranks"]
    assert "2 stages cannot have equal parts of 3 blocks" in first["parts"] and "give 2 numbers" in first["sizes"]
    assert "shares the embedding's matrix" in first["tied"] and "fsdp gives a block's" in first["fsdp"]
    assert "no recomputation" in first["recomputed"] and "keep_blocks()" in first["stages"]
    assert "splits()" in first["cut"] and "a multiple of 4" in first["length"]


@pytest.mark.parametrize("text", ["tp0", "tp2,tp2", "cp2-tree", "dp2", "tp2 cp2"])
def test_a_layout_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="tpN, cpN"):
        Layout.parse(text)


def test_a_layout_says_itself():
    assert [str(Layout.parse(text)) for text in ("", "tp2,cp4-ring", "cp2")] == ["", "cp4-ring,tp2", "cp2"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_ranks_on_gpus_do_so_by_the_labs_kernels(backend):
    """In bf16 beside one process's bf16."""
    rows = rows_of(dict.fromkeys(("tp2", "cp2", "cp2-ulysses", "cp2-ring"), STRATEGIES[1:]))
    for compute in (None, torch.bfloat16):
        assert_near_fp64(TRAINING, 2, rows, compute, alone="cuda:0", **ON_GPUS[backend])
