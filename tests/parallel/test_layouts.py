"""Tensor and context parallelism under every data strategy: each gradient, and three steps, beside
one process.

The loss alone shows little: norms whose gradients are not summed, an all-reduce too many behind the
loss or another rank's positions leave it as it is, or nearly so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distlab.measure import CollectiveRecorder
from distlab.model import ModelConfig, TransformerLM
from distlab.parallel import Layout, get_strategy
from distlab.simulate.step import simulate_training
from distlab.testing import run_ranks
from distlab.theory.axes import context_volume, tensor_volume
from distlab.theory.model_shape import ModelShape
from tests.parallel.axes import (
    ON_GPUS,
    ROWS,
    SEED,
    Training,
    assert_as_one_process,
    assert_near_fp64,
    built,
    trained,
)
from tests.parallel.test_contract import BACKENDS, on_two_ranks

CONFIG = ModelConfig(
    d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64, context_length=24
)
TRAINING = Training(CONFIG, micro_batches=2)
STRATEGIES = ("naive", "bucketed", "zero1", "fsdp")
TABLE = {  # ranks → layouts under their strategies
    2: {
        "tp2": STRATEGIES,
        "cp2": STRATEGIES[1:],
        "cp2-ulysses": STRATEGIES[1:],
        "cp2-ring": STRATEGIES[1:],
    },
    3: {"cp3": ("bucketed",), "cp3-ring": ("zero1", "fsdp")},
    4: {
        "tp2": ("fsdp",),
        "cp2-ring": ("zero1",),
        "cp4-ring": ("fsdp",),
        "tp2,cp2": (*STRATEGIES[1:], "zero2"),
        "tp2,cp2-ulysses": (),
        "tp2,cp2-ring": ("fsdp",),
    },
}


def rows_of(table):
    """Return (layout, strategy) of each strategy of each layout."""
    rows = []
    for layout, strategies in table.items():
        for strategy in strategies:
            rows.append((layout, strategy))
    return rows


@pytest.mark.parametrize("ranks", TABLE)
def test_gradients_and_steps_are_those_of_one_process(ranks):
    assert_as_one_process(TRAINING, ranks, rows_of(TABLE[ranks]))


def test_in_fp32_layouts_round_as_one_process_does():
    assert_near_fp64(TRAINING, rows_of(dict.fromkeys(TABLE[2], ("bucketed",))))


def of_two_halves(model):
    """Let one process compute what two ranks of tensor parallelism do, one after the other, and add
    what they add.

    Between `enter` and `leave` the batch stands twice, once for each rank.
    """
    ops = model.operations()

    def each(kept, x, weight):
        """Multiply each rank's half of the batch with the part of the matrix that it has."""
        products = []
        for part, of_rank in zip(x.chunk(2), kept(weight), strict=True):
            products.append(F.linear(part, of_rank))
        return torch.cat(products)

    def halves_of_qkv(weight):
        """Return for each rank its half of the rows of queries, keys and values."""
        parts = weight.split([CONFIG.d_model, CONFIG.kv_width, CONFIG.kv_width])
        chunks = [part.chunk(2) for part in parts]
        return [torch.cat(of_rank) for of_rank in zip(*chunks, strict=True)]

    def halves_of_rows(weight):
        return weight.chunk(2)

    def halves_of_columns(weight):
        return weight.chunk(2, dim=1)

    def loss(x, weight, targets):
        logits = [F.linear(x, rows) for rows in weight.chunk(2)]
        top = torch.maximum(*(half.detach().amax(-1) for half in logits))
        total = sum((half - top[..., None]).exp().sum(-1) for half in logits)
        target = torch.cat(logits, -1).gather(-1, targets[..., None])[..., 0]
        counted = targets != -100
        return ((total.log() + top - target) * counted).sum() / counted.sum()

    for block in model.blocks:
        block.attention.qkv.multiply = partial(each, halves_of_qkv)
        block.feed_forward.w1.multiply = partial(each, halves_of_rows)
        block.feed_forward.w3.multiply = partial(each, halves_of_rows)
        block.attention.output.multiply = partial(each, halves_of_columns)
        block.feed_forward.w2.multiply = partial(each, halves_of_columns)

    def norm(x, weight, eps):
        """The weight's gradient is a sum of two halves' of the sequence, that of x as without
        ranks.
        """
        halves = torch.cat([ops.rms_norm(part, weight, eps) for part in x.detach().chunk(2, 1)], 1)
        return ops.rms_norm(x, weight.detach(), eps) + (halves - halves.detach())

    def add_norm(x, residual, weight, eps):
        total = residual + x
        return norm(total, weight, eps), total

    model.replace_ops(
        enter=lambda x: torch.cat((x, x)),
        leave=lambda x: sum(x.chunk(2)),
        rms_norm=norm,
        add_rms_norm=add_norm,
        linear_cross_entropy=loss,
    )


def test_two_ranks_are_to_the_bit_one_process_that_adds_the_same_two_halves():
    model = TransformerLM(CONFIG, seed=SEED)
    of_two_halves(model)
    training = replace(TRAINING, micro_batches=1, dtype=torch.float32)
    model(*training.batches(0)[0]).backward()
    (found,) = trained(training, 2, [("tp2", "naive")])
    for name, parameter in model.named_parameters():
        assert torch.equal(found.gradients[name], parameter.grad), name


@pytest.mark.parametrize(
    "row, options",
    [
        (("tp2", "fsdp"), {"checkpointing": "attention"}),
        (("tp2", "zero1"), {"checkpointing": "every-2"}),
        (("cp2-ring", "bucketed"), {"checkpointing": "block"}),
        (("tp2", "bucketed"), {"compile": "blocks"}),
    ],
)
def test_recomputation_and_compiled_blocks_change_no_gradient(row, options):
    assert_as_one_process(replace(TRAINING, micro_batches=1, options=options), 2, [row])


def counted(context, layouts):
    found = {}
    for layout in map(Layout.parse, layouts):
        _, model, _ = built(context, CONFIG, layout)
        shared = layout.axes(context.group).share(TRAINING.batches(0)[0])
        with CollectiveRecorder() as recorder:
            model(*shared).backward()
        found[str(layout)] = (recorder.count, recorder.total_bytes)
    return found


def test_messages_and_bytes_are_the_closed_forms():
    context = CONFIG.context_length
    layouts = [
        "tp2",
        "cp2",
        "cp2-ulysses",
        "cp2-ring",
        "tp2,cp2",
        "tp2,cp2-ring",
        "cp4-ring",
        "cp4",
    ]
    found = run_ranks(counted, 4, layouts)[0]
    for layout in map(Layout.parse, layouts):
        shape = ModelShape.of(CONFIG, layout.tensor)
        inside = {"batch": ROWS, "context": context // layout.context}
        between = {"batch": ROWS, "context": context, "ranks": layout.context}
        of_tensor = tensor_volume(shape, **inside)
        of_context = context_volume(shape, **between, how=layout.attention)
        both = of_tensor + of_context
        expected = (both.collectives, both.bytes)
        assert found[str(layout)] == expected, layout
        if layout.ranks == ROWS:  # a simulated group of ranks has a sequence for each of them
            step = simulate_training(
                CONFIG, "local", batch=1, world_size=4, dtype="fp32", layout=layout
            )
            assert (len(step.calls), step.comm_bytes) == expected, f"{layout}, simulated"


@dataclass(frozen=True)
class Mistake:
    """A model that the ranks of a layout cannot share.

    Attributes:
        said: part of the error.
        layout: layout as text.
        changes: changes to `CONFIG`.
        strategy: name of the strategy.
        stages: blocks of each stage.
        checkpointing: recomputation.
    """

    said: str
    layout: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "bucketed"
    stages: tuple[int, ...] = ()
    checkpointing: str = "none"


MISTAKES = (
    Mistake("cannot share 1 attention heads", "tp2", {"num_heads": 4, "num_kv_heads": 1}),
    Mistake("63 words", "tp2", {"vocab_size": 63}),
    Mistake("set dropout to 0", "tp2", {"dropout": 0.1}),
    Mistake("does not divide the 2 ranks", "tp3"),
    Mistake("2 stages cannot have equal parts of 3 blocks", "pp2", {"num_layers": 3}),
    Mistake("1 block cannot fill 2 stages", "pp2", {"num_layers": 1}),
    Mistake("give 2 numbers", "pp2", stages=(2, 1)),
    Mistake("shares the embedding's matrix", "pp2", {"tie_embeddings": True}),
    Mistake("fsdp gives a block's", "pp2-zero-bubble", strategy="fsdp"),
    Mistake("no recomputation", "pp2-zero-bubble", checkpointing="block"),
)


@on_two_ranks
def test_what_does_not_divide_is_one_sentence_on_every_rank(context):
    """Check the error of each mistake on every rank, before anything is sent."""
    for mistake in MISTAKES:
        with pytest.raises(ValueError, match=mistake.said):
            built(
                context,
                replace(CONFIG, **mistake.changes),
                Layout.parse(mistake.layout, mistake.stages),
                mistake.strategy,
                checkpointing=mistake.checkpointing,
            )
    for said, layout in (
        (r"splits\(\)", Layout(tensor=2)),
        (r"keep_blocks\(\)", Layout(pipeline=2)),
    ):
        with pytest.raises(TypeError, match=said):
            get_strategy("naive").build(
                torch.nn.Linear(2, 2), context.group, torch.optim.SGD, {"lr": 1.0}, layout=layout
            )
    with pytest.raises(ValueError, match="ranks share sequences, so give parts"):
        get_strategy("naive").build(
            torch.nn.Linear(2, 2),
            context.group,
            torch.optim.SGD,
            {"lr": 1.0},
            layout=Layout(context=2),
        )
    with pytest.raises(ValueError, match="a multiple of 4"):
        Layout(context=2).axes(context.group).share(torch.zeros(1, 6))


@pytest.mark.parametrize("text", ["tp0", "tp2,tp2", "cp2-tree", "dp2", "tp2 cp2"])
def test_a_layout_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="tpN, cpN"):
        Layout.parse(text)


def test_a_layout_says_itself():
    assert [str(Layout.parse(text)) for text in ("", "tp2,cp4-ring", "cp2")] == [
        "",
        "cp4-ring,tp2",
        "cp2",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_on_gpus_do_so_by_the_labs_kernels(backend):
    """In bf16 beside one process's bf16."""
    rows = rows_of(dict.fromkeys(("tp2", "cp2", "cp2-ulysses", "cp2-ring"), STRATEGIES[1:]))
    for compute in (None, torch.bfloat16):
        assert_near_fp64(TRAINING, rows, compute, alone="cuda:0", **ON_GPUS[backend])
