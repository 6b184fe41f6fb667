"""One training step, the same for every strategy: zero, forward and backward, finish, optimizer.

zero_grad ─ [micro-batch]×k ─ finish_gradient_synchronization ─ (clip, check) ─ optimizer.step
             the first k−1 under no_sync(): one synchronisation per optimizer step
             (where gradients are freed, each finishes: memory is saved, and more is sent.
             Under hybrid sharding each reduce-scatters, and replicas synchronise once)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import RankContext, collectives
from distlab.model.config import ModelConfig
from distlab.model.ops import cross_entropy
from distlab.model.transformer import TransformerLM
from distlab.optim import Muon
from distlab.parallel import Layout, ParallelModel
from distlab.parallel.layout import DATA_PARALLEL
from distlab.precision import autocast
from distlab.train.scaler import LossScaler

# A mean over a batch, or the sum over a batch and the number of examples or tokens that count.
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFunction = Callable[[nn.Module, Any], Loss]


def mean_loss(loss: Loss) -> Tensor:
    """Return the mean over one batch, of a loss that is a mean or (sum, count)."""
    if isinstance(loss, tuple):
        total, count = loss
        return total / count
    return loss


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a language model on `(tokens_BT, targets_BT)`."""
    tokens_BT, targets_BT = batch
    return cross_entropy(model(tokens_BT), targets_BT)


def loss_in_head(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a model that computes it in its head."""
    return model(*batch)


def loss_function(model: ModelConfig, layout: Layout = DATA_PARALLEL) -> LossFunction:
    """Return the loss function of a `TransformerLM`: of its logits, or computed in the head.

    Ranks that share the vocabulary compute it in the head, where not all logits are needed. So do
    ranks of a pipeline, of which only the last has logits.
    """
    in_head = model.loss_in_head or layout.tensor > 1 or layout.pipeline > 1
    return loss_in_head if in_head else next_token_loss


def under_autocast(
    loss_fn: LossFunction, device: torch.device, dtype: torch.dtype | None
) -> LossFunction:
    """Return a loss whose operators cast their inputs to the dtype that the parameters have."""

    def cast(model: nn.Module, batch: Any) -> Loss:
        with autocast(device, dtype):
            return loss_fn(model, batch)

    return cast


def split(batch: tuple[Tensor, ...], parts: int) -> list[tuple[Tensor, ...]]:
    """Split the sequences of a batch in equal parts."""
    if parts == 1:
        return [batch]
    chunks = [tensor.chunk(parts) for tensor in batch]
    return list(zip(*chunks, strict=True))


def adamw(ops: str) -> tuple[type[torch.optim.Optimizer], dict[str, bool]]:
    """Return AdamW's class for a choice of operations, and its options beyond the usual ones.

    Both update all parameters in a few launches. Their states have the same names, so that each
    loads a checkpoint of the other.
    """
    if ops != "triton":
        return torch.optim.AdamW, {"fused": True}
    from kernels.adamw import AdamW

    return AdamW, {}


def muon(ops: str) -> tuple[type[torch.optim.Optimizer], dict[str, str]]:
    """Return Muon with updates as large as AdamW's, so that it takes AdamW's learning rate.

    `ops` changes nothing.
    """
    return Muon, {"adjust_lr_fn": "match_rms_adamw"}


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def compiled(model: TransformerLM, how: str, backend: str = "inductor") -> nn.Module:
    """Return a compiled `model`, or the model with compiled `blocks`, or as it is (`off`)."""
    if how == "model":
        return torch.compile(model, backend=backend)
    if how == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    return model


class TrainStep:
    """Training step on a list of micro-batches. Returns the mean loss of this rank, detached.

    With a loss of (sum, count), the gradient is that of the mean over all examples or tokens that
    count, of all micro-batches and ranks. The mean over ranks of what is returned is then that
    mean.

    Args:
        model: model under a strategy of `distlab.parallel`. Forward and loss run under its
            `autocast()`.
        optimizer: optimizer over the wrapped model's parameters.
        loss_fn: function `loss_fn(model, batch)` that returns a scalar loss, a mean over the batch,
            or (sum, count): the sum of the losses of the batch, and the number of examples or
            tokens that count, which a pipeline refuses. It returns the same form for every batch.
        max_grad_norm: L2 norm over all ranks' shards to which averaged gradients are clipped. The
            norm before is left in `grad_norm`.
        scaler: loss scaler for fp16. A step in which any rank's gradient overflows is skipped on
            all (reads a flag on the host).
        context: context of this rank, needed only with a scaler, because all ranks must decide
            alike.
        mark: function that is called with "forward_backward" and "optimizer" as each phase ends
            (see `measure.clock`).

    Raises:
        ValueError: a scaler without a context.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        *,
        max_grad_norm: float | None = None,
        scaler: LossScaler | None = None,
        context: RankContext | None = None,
        mark: Callable[[str], None] | None = None,
    ):
        if scaler is not None and context is None:
            raise ValueError("a scaler needs context=..., because all ranks must decide alike")
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.max_grad_norm = max_grad_norm
        self.scaler = scaler
        self.context = context
        self.mark = mark or (lambda phase: None)
        self.last_step_skipped = False
        self.grad_norm: Tensor | None = None  # 0-dim, on the device, of the last step

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        # None, and not zeros: strategies hand over buffers for gradients that do not exist yet.
        self.optimizer.zero_grad(set_to_none=True)
        scale = 1.0 if self.scaler is None else self.scaler.scale
        count = None
        if self.model.pipeline is not None:
            total = self.model.pipeline.run(self.model, self.loss_fn, micro_batches, scale)
        else:
            total, count = self._accumulate(micro_batches, scale)
        self.model.finish_gradient_synchronization()
        if count is not None:
            # Before clipping, whose norm is that of the mean.
            total = total * self._divide_by_count(count)
        self.mark("forward_backward")
        if self.scaler is not None:
            self._unscale()
        elif self.max_grad_norm is not None:
            self.grad_norm = self.model.clip_grad_norm_(self.max_grad_norm)
        if not self.last_step_skipped:
            self.optimizer.step()
        self.mark("optimizer")
        return total

    def _accumulate(
        self, micro_batches: Sequence[Any], scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of each micro-batch, of which the last synchronizes.

        Returns:
            The mean loss and None, or the sum of all losses and their count (0-dim fp64).
        """
        total: Tensor | None = None
        count: Tensor | None = None
        for number, batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            # Only the last backward sends gradients to all ranks. Those before add to them locally,
            # unless that would keep full gradients which the strategy can do without.
            adds_locally = not is_last and not self.model.accumulates_shards
            with self.model.no_sync() if adds_locally else nullcontext():
                with self.model.autocast():
                    loss = self.loss_fn(self.model, batch)
                if isinstance(loss, tuple):
                    loss, counted = loss
                    if count is None:
                        count = torch.zeros((), dtype=torch.float64, device=loss.device)
                    count = count + counted
                else:
                    # Gradients of micro-batches are summed, so the mean is made here.
                    loss = loss / len(micro_batches)
                # The multiplication is left out without a scaler, where it would cost a launch.
                scaled_loss = loss if scale == 1.0 else loss * scale
                scaled_loss.backward()
            if not is_last and self.model.accumulates_shards:
                self.model.finish_gradient_synchronization()
            if total is None:
                # Made on the device. A copy of a zero from the host would wait for all kernels that
                # are queued there, and the GPU would idle until the optimizer is launched.
                total = torch.zeros((), device=loss.device)
            total = total + loss.detach()
        return total, count

    def _divide_by_count(self, count: Tensor) -> Tensor:
        """Turn the gradients of sums into those of the mean over all ranks' counts.

        This comes after the last backward, because the count of a step is known only after its last
        forward. Strategies add and average, so one factor at the end is exact.

        Returns:
            The factor of this rank's sum in the mean over ranks.
        """
        group = self.model.process_group
        ranks = 1
        if group is not None:
            count = collectives.sum_tensor(count, group)
            ranks = group.size()
        factor = ranks / count  # the strategy has divided by the ranks
        with self.model.elementwise_gradient_edits():
            for gradient in self.model.gradients().every():
                gradient.mul_(factor)
        return factor

    def _unscale(self) -> None:
        """Undo the loss scale and clip in one pass, or skip the step on all ranks."""
        norm = self.model.grad_norm()
        # Of the gradients without the scale, as callers without a scaler see it.
        self.grad_norm = norm / self.scaler.scale
        # One flag for all gradients: a norm is finite only if every element is, and its square sum
        # does not overflow.
        finite = bool(norm.isfinite().item())
        # A rank that skipped a step alone would have other parameters from then on.
        finite = collectives.all_ranks_agree(finite, norm.device, self.context.group)
        factor = 1.0 / self.scaler.scale
        self.scaler.update(finite)
        self.last_step_skipped = not finite
        if not finite:
            return
        if self.max_grad_norm is not None:
            # As torch's `clip_grad_norm_`, whose 1e-6 avoids a division by zero.
            factor *= min(1.0, self.max_grad_norm / (self.grad_norm.item() + 1e-6))
        with self.model.elementwise_gradient_edits():
            for gradient in self.model.gradients().every():
                gradient.mul_(factor)
