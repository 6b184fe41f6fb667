"""Pipelines under data strategies and beside the other axes: to the bit one process with the same micro-batches."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.comm import RankContext
from distlab.measure import CollectiveRecorder
from distlab.model import ModelConfig, TransformerLM
from distlab.parallel import Layout, Strategy, get_strategy
from distlab.parallel.schedules import SCHEDULES, Action
from distlab.testing import run_ranks
from distlab.theory.axes import layout_volume
from distlab.theory.volume import CommunicationVolume
from distlab.train.build import build_training, check_layout
from distlab.train.memory_budget import rank_parts
from distlab.train.step import TrainStep, loss_function
from tests.parallel.test_layouts import ON_GPUS, assembled, pieces, rms

CONFIG = ModelConfig(
    d_model=16, d_ff=32, num_layers=8, num_heads=4, num_kv_heads=2, vocab_size=32, context_length=8
)
MICRO_BATCHES, ROWS, STEPS, MAX_NORM, SEED = 4, 2, 3, 0.5, 3
Row = tuple[str, str]  # layout and strategy
ALONE: dict[int, list[Row]] = {  # ranks → pipelines that have all ranks: to the bit
    2: [("pp2", "naive"), ("pp2-gpipe", "bucketed"), ("pp2-interleaved", "zero1"), ("pp2-zero-bubble", "bucketed"),
        ("pp2-interleaved", "fsdp"), ("pp2-zero-bubble", "zero1")],
    4: [("pp4", "bucketed"), ("pp4-gpipe", "fsdp"), ("pp4-interleaved", "bucketed"), ("pp4-zero-bubble", "overlap")],
}  # fmt: skip
TOGETHER: list[Row] = [  # four ranks
    ("pp2", "fsdp"), ("pp2-interleaved", "fsdp"), ("pp2-zero-bubble", "bucketed"), ("pp2", "zero1"),
    ("pp2,tp2", "bucketed"), ("pp2-interleaved,cp2", "zero1"), ("pp2-zero-bubble,tp2", "naive"),
    ("pp2,cp2-ring", "fsdp"),
]  # fmt: skip


def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(
        0, CONFIG.vocab_size, (MICRO_BATCHES, ROWS, CONFIG.context_length + 1), generator=generator
    )
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def on_device(device: torch.device) -> ModelConfig:
    """With the lab's kernels on a GPU."""
    return replace(CONFIG, ops="triton") if device.type == "cuda" else CONFIG


def train(
    context: RankContext, layout: Layout, strategy: str | Strategy, dtype: torch.dtype, max_norm: float | None,
    compute: torch.dtype | None = None, **options: Any,
) -> tuple[list[float], list, list]:  # fmt: skip
    """Losses, first gradients and last parameters of this rank, after three steps of AdamW."""
    if isinstance(strategy, str):
        strategy = get_strategy(strategy)
    torch.set_default_dtype(dtype)
    try:
        _, model, optimizer = build_training(
            on_device(context.device), strategy, context.group, torch.optim.AdamW, {"lr": 1e-2},
            seed=SEED, device=context.device, layout=layout, bucket_size_mb=0.01, compute_dtype=compute,
            **options,
        )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    first: list = []
    step = TrainStep(model, optimizer, loss_function(CONFIG, layout), max_grad_norm=max_norm)
    update = optimizer.step

    def step_after_noting(*args: Any) -> Any:
        model.gradients()
        if not first:
            first.extend(pieces(model, lambda s: s.tensor.grad if s.tensor.numel() else s.tensor))
        return update(*args)

    optimizer.step = step_after_noting
    axes, device = layout.axes(context.group), context.device
    rows = ROWS // axes.batch_ranks
    mine = slice(axes.batch_rank * rows, (axes.batch_rank + 1) * rows)
    losses = []
    for number in range(STEPS):
        batches = [(tokens[mine].to(device), targets[mine].to(device)) for tokens, targets in micro_batches(number)]
        losses.append(step([axes.share(batch) for batch in batches]).item())
    model.synchronize()
    last = pieces(model, lambda shard: shard.tensor)
    assert set(model.whole_parameters()) == set(dict(TransformerLM(CONFIG).named_parameters()))
    model.close(restore=False)
    return losses, first, last


def rows_of(
    context: RankContext, rows: Sequence[Row], dtype: torch.dtype, max_norm: float | None, compute: Any = None
) -> list[tuple]:
    return [train(context, Layout.parse(layout), strategy, dtype, max_norm, compute) for layout, strategy in rows]


def one_process(dtype: torch.dtype, max_norm: float | None) -> tuple[list[float], dict, dict]:
    losses, first, last = run_ranks(rows_of, 1, [("", "local")], dtype, max_norm)[0][0]
    shapes = {name: p.shape for name, p in TransformerLM(CONFIG).named_parameters()}
    return losses, assembled([first], shapes), assembled([last], shapes)


@pytest.mark.parametrize("ranks", ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_schedule_is_one_process_to_the_bit(ranks, dtype):
    losses, gradients, parameters = one_process(dtype, None)
    found = run_ranks(rows_of, ranks, ALONE[ranks], dtype, None, deadline_s=240)
    shapes = {name: value.shape for name, value in gradients.items()}
    for number, row in enumerate(ALONE[ranks]):
        of_ranks = [rank[number] for rank in found]
        assert [rank[0] for rank in of_ranks] == [losses] * ranks, f"{row}: losses"
        for which, expected in ((1, gradients), (2, parameters)):
            for name, value in assembled([rank[which] for rank in of_ranks], shapes).items():
                assert torch.equal(value, expected[name]), f"{row}: {name}, {'gradient' if which == 1 else 'value'}"


def assert_as_one_process(ranks: int, rows: Sequence[Row]) -> None:
    """Three clipped steps; every gradient in fp64."""
    _, gradients, parameters = one_process(torch.float64, MAX_NORM)
    shapes = {name: value.shape for name, value in gradients.items()}
    found = run_ranks(rows_of, ranks, rows, torch.float64, MAX_NORM, deadline_s=240)
    for number, row in enumerate(rows):
        first, last = (assembled([rank[number][which] for rank in found], shapes) for which in (1, 2))
        for name, value in gradients.items():
            assert (first[name] - value).abs().max() <= 1e-13 * value.abs().max(), f"{row}: gradient of {name}"
            # Clipping is by an fp32 norm, and Adam divides by gradients that are nearly zero.
            assert (last[name] - parameters[name]).abs().max() <= 1e-7, f"{row}: {name}"


def test_beside_data_tensor_and_context_parallelism():
    assert_as_one_process(4, TOGETHER)


def test_all_axes_at_once(request):
    """Eight ranks: tp2 · cp2 · pp2."""
    assert_as_one_process(8, [("pp2,tp2,cp2", "bucketed")])
    if request.config.getoption("--all-layouts"):
        layouts = ("tp2,cp2", "tp2,cp2-ring", "tp2", "cp2", "cp2-ulysses", "cp4-ring")
        for schedule, layout in product(SCHEDULES, layouts):
            strategies = ["naive", "bucketed", "zero1", *(["fsdp"] if schedule != "zero-bubble" else [])]
            assert_as_one_process(8, [(f"pp2-{schedule},{layout}", strategy) for strategy in strategies])


RECOMPUTED = [  # layout, strategy, what is compiled, what blocks keep
    ("pp2", "bucketed", "blocks", "none"), ("pp2-interleaved", "zero1", "off", "every-2"),
    ("pp2", "fsdp", "off", "attention"),
]  # fmt: skip


def recomputed(context: RankContext) -> list[list[float]]:
    return [
        train(context, Layout.parse(layout), strategy, torch.float32, None, compile=compile, checkpointing=keep)[0]
        for layout, strategy, compile, keep in RECOMPUTED
    ]


def test_compiled_blocks_and_recomputation_change_no_bit():
    losses, *_ = one_process(torch.float32, None)
    assert run_ranks(recomputed, 2, deadline_s=240) == [[losses] * len(RECOMPUTED)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_ranks_on_gpus_do_so_by_the_labs_kernels(backend, compute):
    """On one GPU messages go through the host's memory. Every gradient nearer to fp64 than 1.5 × one process's."""
    _, exact, _ = one_process(torch.float64, None)
    shapes = {name: value.shape for name, value in exact.items()}
    run = partial(rows_of, dtype=torch.float32, max_norm=None, compute=compute)
    alone = run_ranks(run, 1, [("", "local")], device="cuda:0")[0][0][1]
    allowed = rms(assembled([alone], shapes), exact)
    rows = [("pp2", "bucketed"), ("pp2-gpipe", "zero1"), ("pp2-interleaved", "fsdp"), ("pp2-zero-bubble", "bucketed")]
    found = run_ranks(run, 2, rows, deadline_s=240, **ON_GPUS[backend])
    for number, row in enumerate(rows):
        error = rms(assembled([rank[number][1] for rank in found], shapes), exact)
        worst = max(error, key=lambda name: error[name] / allowed[name])
        assert error[worst] <= 1.5 * allowed[worst], f"{row}: {worst} {error[worst]} {allowed[worst]}"


def noted(ran: list[Action], action: Action) -> AbstractContextManager[None]:
    ran.append(action)
    return nullcontext()


def observed(context: RankContext, schedules: list[str]) -> list[tuple[list, int, int]]:
    """Actions as they ran, messages and bytes of a step."""
    found = []
    for name in schedules:
        layout = Layout(pipeline=context.world_size, schedule=name)
        _, model, _ = build_training(
            CONFIG, get_strategy("local"), context.group, torch.optim.SGD, {"lr": 1.0}, device=context.device,
            layout=layout,
        )  # fmt: skip
        ran: list = []
        model.pipeline.observe = partial(noted, ran)
        with CollectiveRecorder() as recorder:
            model.pipeline.run(model, loss_function(CONFIG, layout), micro_batches(0))
        calls = [call for call in recorder.calls if call.op in ("send", "recv")]
        assert ran == SCHEDULES[name](context.world_size, MICRO_BATCHES)[context.rank]
        found.append((len(calls), sum(call.bytes for call in calls)))
    return found


def test_what_runs_is_the_list_and_what_travels_the_closed_form():
    """2·m·(p·v − 1) activations, each counted where it leaves and where it arrives."""
    names = list(SCHEDULES)
    size = 4 * ROWS * CONFIG.context_length * CONFIG.d_model
    for ranks in (2, 4):
        found = run_ranks(observed, ranks, names)
        for number, name in enumerate(names):
            stages = ranks * (2 if name == "interleaved" else 1)
            messages = 2 * 2 * MICRO_BATCHES * (stages - 1)
            assert sum(rank[number][0] for rank in found) == messages, name
            assert sum(rank[number][1] for rank in found) == messages * size, name


COUNTED = [
    (layout, strategy)
    for layout in ("pp2", "pp2-interleaved", "pp2-zero-bubble", "pp2,tp2")
    for strategy in ("local", "bucketed", "fsdp")
    if (layout, strategy) != ("pp2-zero-bubble", "fsdp")
]


def counted(context: RankContext, rows: list[Row]) -> list[tuple[bool, str]]:
    """Whether a step sends what the closed form says of this rank, and both."""
    found = []
    for layout, strategy in ((Layout.parse(layout), get_strategy(strategy)) for layout, strategy in rows):
        _, model, optimizer = build_training(
            CONFIG, strategy, context.group, torch.optim.SGD, {"lr": 1.0}, device=context.device, layout=layout,
            bucket_size_mb=0.01,
        )  # fmt: skip
        step = TrainStep(model, optimizer, loss_function(CONFIG, layout))
        step(micro_batches(0))  # an order is learned
        with CollectiveRecorder() as recorder:
            step(micro_batches(1))
        parts = rank_parts(CONFIG, layout, micro_batches=MICRO_BATCHES)
        said = layout_volume(
            strategy, parts[layout.axes(context.group).pipeline.rank()].shape, batch=ROWS,
            context=CONFIG.context_length, world_size=context.world_size,
            bucket_size_mb=0.01, micro_batches=MICRO_BATCHES, pipeline=layout.pipeline,
        )  # fmt: skip
        sent = CommunicationVolume(recorder.count, recorder.total_bytes)
        found.append((sent == said, f"{sent}, closed form {said}"))
        model.close(restore=False)
    return found


def test_a_step_sends_what_the_closed_form_says():
    for rank in run_ranks(counted, 4, COUNTED, deadline_s=120):
        for row, (equal, both) in zip(COUNTED, rank, strict=True):
            assert equal, f"{row}: {both}"


def uneven(context: RankContext) -> list[str]:
    layout = Layout.parse("pp2", stages=(5, 3))
    _, model, _ = build_training(
        CONFIG, get_strategy("naive"), context.group, torch.optim.SGD, {"lr": 1.0}, device="cpu", layout=layout
    )  # fmt: skip
    return sorted({name.split(".")[1] for name, _ in model.module.named_parameters() if "blocks" in name})


def test_stages_of_other_sizes_keep_the_names_of_the_whole():
    assert run_ranks(uneven, 2) == [list("01234"), list("567")]


def refused(context: RankContext) -> dict[str, str]:
    cases = {
        "parts": ("pp2", {"num_layers": 3}, "bucketed", {}),
        "sizes": ("pp2", {}, "bucketed", {"stages": (4, 3)}),
        "tied": ("pp2", {"tie_embeddings": True}, "bucketed", {}),
        "fsdp": ("pp2-zero-bubble", {}, "fsdp", {}),
        "recomputed": ("pp2-zero-bubble", {}, "bucketed", {"checkpointing": "block"}),
    }
    found = {}
    for name, (layout, changes, strategy, more) in cases.items():
        stages = more.pop("stages", ())
        with pytest.raises(ValueError) as error:
            build_training(
                ModelConfig(**(vars(CONFIG) | changes)), get_strategy(strategy), context.group, torch.optim.SGD,
                {"lr": 1.0}, device="cpu", layout=Layout.parse(layout, stages), **more,
            )  # fmt: skip
        found[name] = str(error.value)
    with pytest.raises(TypeError) as type_error:
        get_strategy("naive").build(
            torch.nn.Linear(2, 2), context.group, torch.optim.SGD, {"lr": 1.0}, layout=Layout(pipeline=2)
        )
    found["model"] = str(type_error.value)
    return found


def test_what_does_not_fit_is_one_sentence_on_every_rank():
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "2 stages cannot have equal parts of 3 blocks" in first["parts"] and "give 2 numbers" in first["sizes"]
    assert "shares the embedding's matrix" in first["tied"] and "fsdp gives a block's" in first["fsdp"]
    assert "no recomputation" in first["recomputed"] and "keep_blocks()" in first["model"]


@pytest.mark.parametrize(
    "layout, compile, said",
    [("pp2", "model", "--compile blocks"), ("pp2-zero-bubble", "blocks", "--compile off"),
     ("pp2-interleaved", "off", "take 4")],
)  # fmt: skip
def test_what_cannot_be_asked_for(layout, compile, said):
    with pytest.raises(ValueError, match=said):
        check_layout(Layout.parse(layout), compile, micro_batches=3)
