"""Tensor and context parallelism under every data strategy: each gradient, and three steps, beside one process.

The loss alone shows little: norms whose gradients are not summed, an all-reduce too many behind the loss or another
rank's positions leave it as it is, or nearly so.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.comm import RankContext
from distlab.measure import CollectiveRecorder
from distlab.model import ModelConfig, TransformerLM
from distlab.parallel import Layout, ParallelModel, get_strategy
from distlab.precision import autocast
from distlab.simulate.step import simulate_training
from distlab.testing import run_ranks
from distlab.theory.axes import context_volume, tensor_volume
from distlab.theory.model_shape import ModelShape
from distlab.train.build import build_training

CONFIG = ModelConfig(
    d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64, context_length=24
)
ROWS, STEPS, MAX_NORM, SEED = 4, 3, 0.5, 3
STRATEGIES = ("naive", "bucketed", "zero1", "fsdp")
TABLE = {  # ranks → layouts under their strategies
    2: {"tp2": STRATEGIES, "cp2": STRATEGIES[1:], "cp2-ulysses": STRATEGIES[1:], "cp2-ring": STRATEGIES[1:]},
    3: {"cp3": ("bucketed",), "cp3-ring": ("zero1", "fsdp")},
    4: {"tp2": ("fsdp",), "cp2-ring": ("zero1",), "cp4-ring": ("fsdp",), "tp2,cp2": STRATEGIES[1:],
        "tp2,cp2-ulysses": (), "tp2,cp2-ring": ("fsdp",)},
}  # fmt: skip


def config_on(device: torch.device, dtype: torch.dtype) -> ModelConfig:
    """With the lab's kernels on a GPU."""
    return replace(CONFIG, ops="triton") if device.type == "cuda" and dtype != torch.float64 else CONFIG


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sequences of all ranks; as many rows as 2 and 4 data-parallel ranks share evenly."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, CONFIG.context_length + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def one_process(dtype: torch.dtype, compute: torch.dtype | None, device: torch.device, steps: int) -> Any:
    """First gradients, norms and last parameters of the model in one process."""
    model = TransformerLM(config_on(device, dtype), seed=SEED, device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        with autocast(device, compute):
            loss = model(*batch(step, device))
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return first, dict(model.named_parameters())


def pieces(model: ParallelModel, values: Any) -> list[tuple[str, Any, int, Tensor]]:
    """(name, box in the whole, first element in it, values) of what this rank holds."""
    return [
        (shard.name, box, start, values(shard).detach().reshape(-1)[held].cpu().clone())
        for shard in map(model.located, model.shards())
        for box, start, held in shard.places()
    ]


def assembled(held: list[list[tuple[str, Any, int, Tensor]]], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Whole tensors out of all ranks' pieces, which cover everything; where several hold an element, to the bit."""
    whole = {name: torch.full(shape, torch.nan, dtype=held[0][0][3].dtype) for name, shape in shapes.items()}
    for name, box, start, values in (piece for rank in held for piece in rank):
        part = whole[name][tuple(slice(first, last) for first, last in box)]
        flat = part.reshape(-1)
        seen = flat[start : start + len(values)]
        assert torch.equal(seen[~seen.isnan()], values[~seen.isnan()]), f"ranks differ in {name}"
        flat[start : start + len(values)] = values
        part.copy_(flat.view(part.shape))
    assert not any(value.isnan().any() for value in whole.values()), "some elements are on no rank"
    return whole


def train(
    context: RankContext, strategy: str, layout: Layout, dtype: torch.dtype, compute: torch.dtype | None = None,
    steps: int = STEPS, **options: Any,
) -> tuple[list, list]:  # fmt: skip
    """First gradients and last parameters of this rank; three clipped steps of AdamW, one of two micro-batches."""
    torch.set_default_dtype(dtype)
    try:
        _, model, optimizer = build_training(
            config_on(context.device, dtype), get_strategy(strategy), context.group, torch.optim.AdamW, {"lr": 1e-2},
            seed=SEED, device=context.device, layout=layout, bucket_size_mb=0.01, compute_dtype=compute,
            **options,
        )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    axes = layout.axes(context.group)
    rows = ROWS // axes.batch_ranks
    first: list = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = batch(step, context.device)
        mine = slice(axes.batch_rank * rows, (axes.batch_rank + 1) * rows)
        parts = 2 if step == 1 and rows > 1 else 1
        shared = axes.share((tokens[mine], targets[mine]))
        for part in range(parts):
            some = [each.chunk(parts)[part] for each in shared]
            with model.no_sync() if part < parts - 1 else nullcontext():
                with model.autocast():
                    loss = model(*some) / parts
                loss.backward()
        model.finish_gradient_synchronization()
        model.gradients()  # under ZeRO-1 shards' gradients are pointed at where they arrived
        first = first or pieces(model, lambda shard: shard.tensor.grad if shard.tensor.numel() else shard.tensor)
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    model.synchronize()
    last = pieces(model, lambda shard: shard.tensor)
    model.close(restore=False)
    return first, last


def rows_of(context: RankContext, table: dict[str, tuple[str, ...]], kinds: list) -> dict[str, tuple[list, list]]:
    return {
        f"{layout} {strategy} {dtype}": train(context, strategy, Layout.parse(layout), dtype, compute)
        for layout, strategies in table.items()
        for strategy in strategies
        for dtype, compute in kinds
    }


def rms(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Per tensor the distance to float64, in parts of its size."""
    return {
        name: ((found[name].double() - value).norm() / value.norm()).item() for name, value in exact.items()
    }


@pytest.mark.parametrize("ranks", TABLE)
def test_gradients_and_steps_are_those_of_one_process(ranks):
    """In fp64 each tensor to 1e-13 of its largest entry; in fp32 nearer to fp64 than 1.5 times one process's."""
    kinds = [(torch.float64, None), (torch.float32, None)]
    cpu = torch.device("cpu")
    exact, exact_last = one_process(torch.float64, None, cpu, STEPS)
    plain, _ = one_process(torch.float32, None, cpu, STEPS)
    shapes = {name: value.shape for name, value in exact.items()}
    found = run_ranks(rows_of, ranks, TABLE[ranks], kinds, deadline_s=240)
    for row in found[0]:
        gradients, last = (assembled([rank[row][which] for rank in found], shapes) for which in (0, 1))
        if row.endswith("float64"):
            for name, value in exact.items():
                worst = (gradients[name] - value).abs().max().item()
                assert worst <= 1e-13 * value.abs().max().item(), f"{row}: {name}"
                # Clipping is by an fp32 norm, and Adam divides by gradients that are nearly zero.
                assert (last[name] - exact_last[name]).abs().max().item() <= 1e-7, f"{row}: {name} after {STEPS} steps"
        else:
            error, allowed = rms(gradients, exact), rms(plain, exact)
            assert all(error[name] <= 1.5 * allowed[name] for name in exact), f"{row}: {error} beside {allowed}"


def of_two_halves(model: TransformerLM) -> None:
    """Let one process compute what two ranks of tensor parallelism do, one after the other, and add what they add.

    Between `enter` and `leave` the batch stands twice, once for each rank.
    """
    ops = model.operations()

    def each(kept: Any, x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([F.linear(part, of_rank) for part, of_rank in zip(x.chunk(2), kept(weight), strict=True)])

    def rows(weight: Tensor, *sizes: int) -> list[Tensor]:
        return [torch.cat([part.chunk(2)[rank] for part in weight.split(sizes)]) for rank in (0, 1)]

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = [F.linear(x, rows) for rows in weight.chunk(2)]
        top = torch.maximum(*(half.detach().amax(-1) for half in logits))
        total = sum((half - top[..., None]).exp().sum(-1) for half in logits)
        target = torch.cat(logits, -1).gather(-1, targets[..., None])[..., 0]
        counted = targets != -100
        return ((total.log() + top - target) * counted).sum() / counted.sum()

    for block in model.blocks:
        block.attention.qkv.multiply = partial(
            each, lambda weight: rows(weight, CONFIG.d_model, CONFIG.kv_width, CONFIG.kv_width)
        )
        block.feed_forward.w1.multiply = block.feed_forward.w3.multiply = partial(each, lambda weight: weight.chunk(2))
        block.attention.output.multiply = block.feed_forward.w2.multiply = partial(each, lambda w: w.chunk(2, 1))

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The weight's gradient is a sum of two halves' of the sequence, that of x as without ranks."""
        halves = torch.cat([ops.rms_norm(part, weight, eps) for part in x.detach().chunk(2, 1)], 1)
        return ops.rms_norm(x, weight.detach(), eps) + (halves - halves.detach())

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, weight, eps), total

    model.replace_ops(
        enter=lambda x: torch.cat((x, x)),
        leave=lambda x: sum(x.chunk(2)),
        rms_norm=norm,
        add_rms_norm=add_norm,
        linear_cross_entropy=loss,
    )


def first_gradients(context: RankContext) -> list:
    return train(context, "naive", Layout(tensor=2), torch.float32, steps=1)[0]


def test_two_ranks_are_to_the_bit_one_process_that_adds_the_same_two_halves():
    model = TransformerLM(CONFIG, seed=SEED)
    of_two_halves(model)
    model(*batch(0, torch.device("cpu"))).backward()
    found = assembled(run_ranks(first_gradients, 2), {name: p.shape for name, p in model.named_parameters()})
    assert [name for name, p in model.named_parameters() if not torch.equal(found[name], p.grad)] == []


RECOMPUTED = [  # layout, strategy, what blocks keep, what is compiled
    ("tp2", "fsdp", "attention", "off"), ("tp2", "zero1", "every-2", "off"), ("cp2-ring", "bucketed", "block", "off"),
    ("tp2", "bucketed", "none", "blocks"),
]  # fmt: skip


def recomputed(context: RankContext) -> list[list]:
    return [
        train(context, strategy, Layout.parse(layout), torch.float64, steps=1, checkpointing=keep, compile=compile)[0]
        for layout, strategy, keep, compile in RECOMPUTED
    ]


def test_recomputation_and_compiled_blocks_change_no_gradient():
    exact, _ = one_process(torch.float64, None, torch.device("cpu"), 1)
    found = run_ranks(recomputed, 2, deadline_s=240)
    for number, row in enumerate(RECOMPUTED):
        gradients = assembled([rank[number] for rank in found], {name: v.shape for name, v in exact.items()})
        for name, value in exact.items():
            worst = (gradients[name] - value).abs().max().item()
            assert worst <= 1e-13 * value.abs().max().item(), f"{row}: {name}"


def counted(context: RankContext, layouts: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for layout in map(Layout.parse, layouts):
        _, model, _ = build_training(
            CONFIG, get_strategy("local"), context.group, torch.optim.SGD, {"lr": 1.0}, device=context.device,
            layout=layout,
        )  # fmt: skip
        shared = layout.axes(context.group).share(batch(0, context.device))
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
        step = simulate_training(CONFIG, "local", batch=1, world_size=4, dtype="fp32", layout=layout)
        sent = len(step.calls), step.comm_bytes  # its group of ranks has a sequence for each of them
        assert layout.ranks != ROWS or sent == expected, f"{layout}, simulated"


def refused(context: RankContext) -> dict[str, str]:
    """What each mistake is told; every rank alike, before anything is sent."""
    cases = {
        "heads": ({"num_heads": 4, "num_kv_heads": 1}, "tp2"),
        "vocabulary": ({"vocab_size": 63}, "tp2"),
        "dropout": ({"dropout": 0.1}, "tp2"),
        "ranks": ({}, "tp3"),
    }
    found = {}
    for name, (changes, layout) in cases.items():
        config = ModelConfig(**(vars(CONFIG) | changes))
        with pytest.raises(ValueError) as error:
            build_training(
                config, get_strategy("bucketed"), context.group, torch.optim.SGD, {"lr": 1.0}, device="cpu",
                layout=Layout.parse(layout),
            )  # fmt: skip
        found[name] = str(error.value)
    with pytest.raises(TypeError) as type_error:
        get_strategy("naive").build(
            torch.nn.Linear(2, 2), context.group, torch.optim.SGD, {"lr": 1.0}, layout=Layout(tensor=2)
        )
    found["model"] = str(type_error.value)
    with pytest.raises(ValueError) as error:
        Layout(context=2).axes(context.group).share(torch.zeros(1, 6))
    found["length"] = str(error.value)
    return found


def test_what_does_not_divide_is_one_sentence_on_every_rank():
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "cannot share 1 attention heads" in first["heads"] and "63 words" in first["vocabulary"]
    assert "set dropout to 0" in first["dropout"] and "does not divide the 2 ranks" in first["ranks"]
    assert "splits()" in first["model"] and "a multiple of 4" in first["length"]


@pytest.mark.parametrize("text", ["tp0", "tp2,tp2", "cp2-tree", "dp2", "tp2 cp2"])
def test_a_layout_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="tpN, cpN"):
        Layout.parse(text)


def test_a_layout_says_itself():
    assert [str(Layout.parse(text)) for text in ("", "tp2,cp4-ring", "cp2")] == ["", "cp4-ring,tp2", "cp2"]


ON_GPUS = {  # how two ranks run: on one GPU, or on one each
    "gloo": {"device": "cuda:0", "group_timeout_s": 60},
    "nccl": {"backend": "nccl"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_ranks_on_gpus_do_so_by_the_labs_kernels(backend):
    """Tolerances as above, bf16 beside one process's bf16."""
    kinds = [(torch.float32, None), (torch.float32, torch.bfloat16)]
    table = {layout: STRATEGIES[1:] for layout in ("tp2", "cp2", "cp2-ulysses", "cp2-ring")}
    device = torch.device("cuda:0")
    exact, _ = one_process(torch.float64, None, torch.device("cpu"), 1)
    shapes = {name: value.shape for name, value in exact.items()}
    found = run_ranks(rows_of_both, 2, table, kinds, deadline_s=240, **ON_GPUS[backend])
    for compute, rows in found[0].items():
        plain, _ = one_process(torch.float32, compute, device, 1)
        allowed = rms({name: value.cpu() for name, value in plain.items()}, exact)
        for row in rows:
            error = rms(assembled([rank[compute][row][0] for rank in found], shapes), exact)
            worst = max(error, key=lambda name: error[name] / allowed[name])
            assert error[worst] <= 1.5 * allowed[worst], f"{row} {compute}: {worst} {error[worst]} {allowed[worst]}"


def rows_of_both(context: RankContext, table: dict[str, tuple[str, ...]], kinds: list) -> dict[Any, Any]:
    return {compute: rows_of(context, table, [(dtype, compute)]) for dtype, compute in kinds}
