"""A small Transformer under a layout, beside one process: what the tests of layouts and of
pipelines share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from distlab.model import ModelConfig, TransformerLM
from distlab.parallel import Layout, get_strategy
from distlab.testing import run_ranks
from distlab.train.build import build_training
from distlab.train.step import TrainStep, loss_in_head

ROWS, STEPS, SEED = 2, 3, 3  # sequences of a micro-batch, for all data-parallel ranks
Row = tuple[str, str]  # layout and strategy
Piece = tuple[str, Any, int, Tensor]
# how two ranks run: on one GPU, where messages go through the host's memory, or on one each
ON_GPUS = {
    "gloo": {"device": "cuda:0", "group_timeout_s": 60},
    "nccl": {"backend": "nccl"},
}


@dataclass(frozen=True)
class Training:
    """What is trained, by AdamW.

    Attributes:
        micro_batches: of a step.
        dtype, compute: of parameters, and of autocast.
        max_norm: at which gradients are clipped; None for never.
        options: of `build_training`.
    """

    config: ModelConfig
    micro_batches: int
    dtype: torch.dtype = torch.float64
    compute: torch.dtype | None = None
    max_norm: float | None = 0.5
    options: Mapping[str, Any] = field(default_factory=dict)

    def batches(self, step):
        """Tokens and targets of each micro-batch, `(ROWS, context)`."""
        generator = torch.Generator().manual_seed(step)
        size = (self.micro_batches, ROWS, self.config.context_length + 1)
        tokens = torch.randint(0, self.config.vocab_size, size, generator=generator)
        return [(each[:, :-1], each[:, 1:]) for each in tokens]

    @property
    def shapes(self):
        return {name: p.shape for name, p in TransformerLM(self.config).named_parameters()}


@torch.compiler.set_stance(force_backend="aot_eager")  # where blocks are compiled
def train(context, training, layout, strategy):
    """Losses, first gradients and last parameters of this rank; on a GPU with the lab's kernels."""
    config = (
        replace(training.config, ops="triton") if context.device.type == "cuda" else training.config
    )
    torch.set_default_dtype(training.dtype)
    try:
        _, model, optimizer = build_training(
            config,
            strategy,
            context.group,
            torch.optim.AdamW,
            {"lr": 1e-2},
            seed=SEED,
            device=context.device,
            layout=layout,
            bucket_size_mb=0.01,
            compute_dtype=training.compute,
            **training.options,
        )
    finally:
        torch.set_default_dtype(torch.float32)
    first: list[Piece] = []
    losses = []
    step = TrainStep(model, optimizer, loss_in_head, max_grad_norm=training.max_norm)
    finish = model.finish_gradient_synchronization

    def finish_and_note():
        finish()
        model.gradients()  # under ZeRO-1 shards' gradients are pointed at where they arrived
        if not losses:  # under ZeRO-2 each micro-batch of the first step adds to them
            first[:] = pieces(
                model, lambda shard: shard.tensor.grad if shard.tensor.numel() else shard.tensor
            )

    model.finish_gradient_synchronization = finish_and_note
    axes, device = layout.axes(context.group), context.device
    rows = ROWS // axes.batch_ranks
    mine = slice(axes.batch_rank * rows, (axes.batch_rank + 1) * rows)
    for number in range(STEPS):
        batches = [
            tuple(each[mine].to(device) for each in batch) for batch in training.batches(number)
        ]
        losses.append(step([axes.share(batch) for batch in batches]).item())
    model.synchronize()
    last = pieces(model, lambda shard: shard.tensor)
    state = model.full_state_dict()
    assert {name: value.shape for name, value in state.items()} == training.shapes
    model.load_full_state_dict({name: value + 1 for name, value in state.items()})
    assert all(
        torch.equal(value, state[name] + 1) for name, value in model.full_state_dict().items()
    )
    model.close(restore=False)
    return losses, first, last


def pieces(model, values):
    """(name, box in the whole, first element in it, values) of what this rank holds."""
    return [
        (shard.name, box, start, values(shard).detach().reshape(-1)[held].cpu().clone())
        for shard in map(model.located, model.shards())
        for box, start, held in shard.places()
    ]


def assembled(held, shapes):
    """Whole tensors out of all ranks' pieces, which cover everything.

    Where several hold an element, to the bit.
    """
    whole = {
        name: torch.full(shape, torch.nan, dtype=held[0][0][3].dtype)
        for name, shape in shapes.items()
    }
    for name, box, start, values in (piece for rank in held for piece in rank):
        part = whole[name][tuple(slice(first, last) for first, last in box)]
        flat = part.reshape(-1)
        seen = flat[start : start + len(values)]
        assert torch.equal(seen[~seen.isnan()], values[~seen.isnan()]), f"ranks differ in {name}"
        flat[start : start + len(values)] = values
        part.copy_(flat.view(part.shape))
    assert not any(value.isnan().any() for value in whole.values()), "some elements are on no rank"
    return whole


def built(context, config, layout, strategy="local", **options):
    """A rank's part of a model without training: shape, model and optimizer."""
    return build_training(
        config,
        get_strategy(strategy),
        context.group,
        torch.optim.SGD,
        {"lr": 1.0},
        device=context.device,
        layout=layout,
        **options,
    )


def _rows(context, training, rows):
    return [
        train(context, training, Layout.parse(layout), get_strategy(strategy))
        for layout, strategy in rows
    ]


def trained(training, ranks, rows, **where):
    """Of each row the losses of all ranks, and in full the first gradients and the last
    parameters.
    """
    found = run_ranks(_rows, ranks, training, rows, deadline_s=240, **where)
    return [
        (losses, assembled(gradients, training.shapes), assembled(parameters, training.shapes))
        for losses, gradients, parameters in (
            zip(*of_ranks, strict=True) for of_ranks in zip(*found, strict=True)
        )
    ]


def one_process(training, **where):
    ((losses, gradients, parameters),) = trained(training, 1, [("", "local")], **where)
    return losses[0], gradients, parameters


def assert_as_one_process(training, ranks, rows):
    """In fp64 each gradient to 1e-13 of its largest entry, and each parameter after all steps."""
    _, gradients, parameters = one_process(replace(training, options={}))
    for row, (_, first, last) in zip(rows, trained(training, ranks, rows), strict=True):
        for name, value in gradients.items():
            assert (first[name] - value).abs().max() <= 1e-13 * value.abs().max(), (
                f"{row}: gradient of {name}"
            )
            # Clipping is by an fp32 norm, and Adam divides by gradients that are nearly zero.
            assert (last[name] - parameters[name]).abs().max() <= 1e-7, f"{row}: {name}"


def assert_near_fp64(training, rows, compute=None, *, alone="cpu", **where):
    """On two ranks in fp32 each gradient nearer to fp64 than 1.5 times one process's, by the root
    of the mean square.

    Args:
        alone: the device of the one process.
        where: how ranks run, see `ON_GPUS`.
    """
    _, exact, _ = one_process(training)
    training = replace(training, dtype=torch.float32, compute=compute)

    def errors(found):
        return {
            name: ((found[name] - value).norm() / value.norm()).item()
            for name, value in exact.items()
        }

    allowed = errors(one_process(training, device=alone)[1])
    for row, (_, gradients, _) in zip(rows, trained(training, 2, rows, **where), strict=True):
        error = errors(gradients)
        worst = max(error, key=lambda name: error[name] / allowed[name])
        assert error[worst] <= 1.5 * allowed[worst], (
            f"{row} {compute}: {worst} {error[worst]} {allowed[worst]}"
        )
