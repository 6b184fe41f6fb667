"""Train a small Transformer under a layout and on one process: helpers of layouts and pipelines."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.model import ModelConfig, TransformerLM
from distlab.parallel import Layout, get_strategy
from distlab.testing import run_ranks
from distlab.train.build import build_training
from distlab.train.step import TrainStep, loss_in_head

ROWS = 2  # sequences of a micro-batch, over all data-parallel ranks
STEPS = 3
SEED = 3
Row = tuple[str, str]  # layout and strategy
# How two ranks run: on one GPU, where messages go through the host's memory, or on one each.
ON_GPUS = {
    "gloo": {"device": "cuda:0", "group_timeout_s": 60},
    "nccl": {"backend": "nccl"},
}


class Piece(NamedTuple):
    """Contiguous elements of a tensor that a rank holds.

    Attributes:
        name: name of the tensor.
        box: (first, end) of each dimension of the part of the tensor that they are in.
        start: number of the first element in the flattened box.
        values: elements, on the CPU.
    """

    name: str
    box: Any
    start: int
    values: Tensor


class Found(NamedTuple):
    """Result of a training.

    Attributes:
        losses: loss of each step, of each rank or of one.
        gradients: name → gradient of the first step.
        parameters: name → parameter after the last step.
    """

    losses: Any
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True)
class Training:
    """Model and steps of a training with AdamW.

    Attributes:
        config: shape of the model.
        micro_batches: number of micro-batches of a step.
        dtype: dtype of the parameters.
        compute: dtype of autocast. None for none.
        max_norm: norm to which gradients are clipped. None for no clipping.
        options: further arguments of `build_training`.
    """

    config: ModelConfig
    micro_batches: int
    dtype: torch.dtype = torch.float64
    compute: torch.dtype | None = None
    max_norm: float | None = 0.5
    options: Mapping[str, Any] = field(default_factory=dict)

    def batches(self, step):
        """Return (tokens, targets) of each micro-batch of a step, both `(ROWS, context)`."""
        generator = torch.Generator().manual_seed(step)
        size = (self.micro_batches, ROWS, self.config.context_length + 1)
        tokens = torch.randint(0, self.config.vocab_size, size, generator=generator)
        return [(each[:, :-1], each[:, 1:]) for each in tokens]

    @property
    def shapes(self):
        """Shape of each parameter of the whole model."""
        return {name: p.shape for name, p in TransformerLM(self.config).named_parameters()}


@torch.compiler.set_stance(force_backend="aot_eager")  # where blocks are compiled
def train(context, training, layout, strategy):
    """Train `STEPS` steps on this rank, on a GPU with the lab's kernels.

    Returns:
        Losses, pieces of the first step's gradients, and pieces of the last parameters.
    """
    config = training.config
    if context.device.type == "cuda":
        config = replace(config, ops="triton")
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
        # Under ZeRO-1 this lets the shards' gradients refer to the memory where they arrived.
        model.gradients()
        if not losses:  # under ZeRO-2 each micro-batch of the first step adds to them
            first[:] = pieces(model, gradient_of)

    model.finish_gradient_synchronization = finish_and_note
    axes = layout.axes(context.group)
    rows = ROWS // axes.batch_ranks
    mine = slice(axes.batch_rank * rows, (axes.batch_rank + 1) * rows)
    for number in range(STEPS):
        batches = []
        for tokens, targets in training.batches(number):
            batch = (tokens[mine].to(context.device), targets[mine].to(context.device))
            batches.append(axes.share(batch))
        losses.append(step(batches).item())
    model.synchronize()
    last = pieces(model, tensor_of)
    check_full_state(model, training)
    model.close(restore=False)
    return losses, first, last


def tensor_of(shard):
    return shard.tensor


def gradient_of(shard):
    """Return the gradient of a shard. A shard without elements has none, and stands for it."""
    return shard.tensor.grad if shard.tensor.numel() else shard.tensor


def check_full_state(model, training):
    """Check that a full state has all of the model, and that one that is loaded comes back."""
    state = model.full_state_dict()
    assert {name: value.shape for name, value in state.items()} == training.shapes
    changed = {name: value + 1 for name, value in state.items()}
    model.load_full_state_dict(changed)
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, changed[name]), name


def pieces(model, values_of):
    """Return the pieces that this rank holds.

    Args:
        model: wrapped model.
        values_of: function from a shard to the tensor to take.
    """
    found = []
    for shard in map(model.located, model.shards()):
        flat = values_of(shard).detach().reshape(-1)
        for box, start, held in shard.places():
            found.append(Piece(shard.name, box, start, flat[held].cpu().clone()))
    return found


def assembled(held, shapes):
    """Return whole tensors, made of all ranks' pieces.

    The pieces must cover everything. Ranks that hold the same element must agree to the bit.

    Args:
        held: pieces of each rank.
        shapes: name → shape of the whole tensor.
    """
    dtype = held[0][0].values.dtype
    # NaN marks elements that no piece has filled yet.
    whole = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}
    for piece in itertools.chain.from_iterable(held):
        box = tuple(slice(first, last) for first, last in piece.box)
        part = whole[piece.name][box]
        # A copy if the box is not contiguous, so it is copied back below.
        flat = part.reshape(-1)
        place = slice(piece.start, piece.start + len(piece.values))
        is_filled = ~flat[place].isnan()
        assert torch.equal(flat[place][is_filled], piece.values[is_filled]), (
            f"ranks differ in {piece.name}"
        )
        flat[place] = piece.values
        part.copy_(flat.view(part.shape))
    assert not any(value.isnan().any() for value in whole.values()), "some elements are on no rank"
    return whole


def built(context, config, layout, strategy="local", **options):
    """Build a rank's part of a model: shape, model and optimizer."""
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
    """Train each row, a (layout, strategy), and return what was `Found` of it.

    Losses are those of each rank. Gradients and parameters are put together from all ranks.
    """
    by_rank = run_ranks(_rows, ranks, training, rows, deadline_s=240, **where)
    found = []
    for of_row in zip(*by_rank, strict=True):
        losses, gradients, parameters = zip(*of_row, strict=True)
        found.append(
            Found(
                losses=losses,
                gradients=assembled(gradients, training.shapes),
                parameters=assembled(parameters, training.shapes),
            )
        )
    return found


def one_process(training, **where):
    """Train on one process, and return what was `Found`, with the losses of its only rank."""
    (found,) = trained(training, 1, [("", "local")], **where)
    return found._replace(losses=found.losses[0])


def assert_as_one_process(training, ranks, rows):
    """Check in fp64 that each row has the gradients and parameters of one process.

    Each gradient to 1e-13 of its largest entry, and each parameter after all steps to 1e-7.
    """
    alone = one_process(replace(training, options={}))
    for row, found in zip(rows, trained(training, ranks, rows), strict=True):
        for name, gradient in alone.gradients.items():
            gradient_error = (found.gradients[name] - gradient).abs().max()
            assert gradient_error <= 1e-13 * gradient.abs().max(), f"{row}: gradient of {name}"
            error = (found.parameters[name] - alone.parameters[name]).abs().max()
            # Clipping is by an fp32 norm, and Adam divides by gradients that are nearly zero.
            assert error <= 1e-7, f"{row}: {name}"


def assert_near_fp64(training, rows, compute=None, *, alone="cpu", **where):
    """Check on two ranks in fp32 that no gradient's error is above 1.5 times one process's.

    The error is the root of the mean square of the difference from fp64.

    Args:
        training: training in fp64.
        rows: (layout, strategy) of each row.
        compute: dtype of autocast.
        alone: device of the one process.
        where: arguments of `run_ranks`, see `ON_GPUS`.
    """
    exact = one_process(training).gradients
    training = replace(training, dtype=torch.float32, compute=compute)

    def errors(gradients):
        """Return name → relative error of the gradient."""
        found = {}
        for name, value in exact.items():
            found[name] = ((gradients[name] - value).norm() / value.norm()).item()
        return found

    allowed = errors(one_process(training, device=alone).gradients)
    for row, found in zip(rows, trained(training, 2, rows, **where), strict=True):
        error = errors(found.gradients)
        worst = max(error, key=lambda name: error[name] / allowed[name])
        assert error[worst] <= 1.5 * allowed[worst], (
            f"{row} {compute}: {worst} {error[worst]} {allowed[worst]}"
        )
