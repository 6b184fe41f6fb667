"""Baselines from torch: tensor parallelism and pipeline parallelism for the lab's Transformer.

They are written as a user of torch would write them. Tensor parallelism is `parallelize_module`
with sequence and loss parallelism, under `TorchFSDP2`. A pipeline is a schedule of
`torch.distributed.pipelining`. Both use torch's operations, because a Triton kernel does not accept
DTensors.

torch's data strategies are in `torch_peers.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.comm import collectives
from distlab.parallel.layout import Axes
from distlab.parallel.model import ParallelModel
from distlab.parallel.pipeline import StageRunner
from distlab.parallel.schedules import CHUNKS
from distlab.parallel.tensor_parallel import find_cuts

# -- tensor parallelism ---------------------------------------------------------------------------


def parallelize_by_torch(model: nn.Module, axes: Axes) -> dict[str, Any]:
    """Replace every matrix by a DTensor that the ranks of the tensor axis share.

    `tensor_parallel.parallelize` is our implementation of the same, without DTensors.

    Returns:
        Arguments of `TorchFSDP2`.
    """
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    device = next(model.parameters()).device.type
    ranks = torch.arange(axes.world.size()).view(-1, axes.tensor.size())
    mesh = DeviceMesh.from_group(
        [axes.data, axes.tensor], device, mesh=ranks, mesh_dim_names=("data", "tensor")
    )
    moved = _group_heads_by_rank(model, axes.tensor)
    ops = model.operations()

    def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return ops.cross_entropy(ops.logits(x, weight), targets)

    # The fused loss does not accept DTensors: compute the logits, then the loss.
    model.replace_ops(linear_cross_entropy=linear_cross_entropy)
    parallelize_module(model, mesh["tensor"], _tensor_plan())
    contexts = ExitStack()
    contexts.enter_context(loss_parallel())
    return {"contexts": contexts, "data_mesh": mesh["data"], "moved": moved}


def _tensor_plan() -> dict[str, Any]:
    """Return torch's parallel style of each module of the Transformer, by its path."""
    # Imported here, because the import of DTensor takes a second.
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    class NormParallel(SequenceParallel):
        """Style of a norm that also adds. It has two inputs, and torch's style prepares one."""

        @staticmethod
        def _prepare_input_fn(layout: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, layout, run_check=False) for x in inputs)

        @staticmethod
        def _prepare_output_fn(
            use_local: bool, module: nn.Module, outputs: Any, mesh: DeviceMesh
        ) -> Any:
            if isinstance(outputs, tuple):
                return tuple(x.to_local() for x in outputs)
            return outputs.to_local()

    class HeadParallel(ColwiseParallel):
        """Style of a head that takes targets and returns the loss. torch's drops the targets."""

        @staticmethod
        def _prepare_input_fn(
            given: Any, wanted: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh
        ) -> Any:
            x = ColwiseParallel._prepare_input_fn(given, wanted, module, inputs, mesh)
            return x, *inputs[1:]

        @staticmethod
        def _prepare_output_fn(
            layouts: Any, use_local: bool, module: nn.Module, outputs: Any, mesh: Any
        ) -> Any:
            return outputs.full_tensor() if isinstance(outputs, DTensor) else outputs

    # Norms and the residual stream are sharded along the sequence, dimension 1. Attention and the
    # feed-forward layer gather it.
    attention = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    feed_forward = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": NormParallel(),
        "head": HeadParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "blocks.*.attention_norm": NormParallel(),
        "blocks.*.feed_forward_norm": NormParallel(),
        "blocks.*.attention": attention,
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed_forward": feed_forward,
        "blocks.*.feed_forward.w1": ColwiseParallel(),
        "blocks.*.feed_forward.w3": ColwiseParallel(),
        "blocks.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }


@torch.no_grad()
def _group_heads_by_rank(model: nn.Module, group: ProcessGroup) -> dict[str, Tensor]:
    """Reorder the rows of matrices that consist of several, such as q, k and v.

    torch gives each rank an equal part of neighbouring rows. The new order makes these the rows of
    the rank's heads, as in `tensor_parallel`.

    Returns:
        The new position of each row, by the name of the parameter.
    """
    moved = {}
    for name, cut in find_cuts(model, group).items():
        if len(cut.ranges) == 1:
            continue
        rows = []
        for ranges in collectives.gather_objects(cut.ranges, group):  # one rank after the other
            for first, last in ranges:
                rows.append(torch.arange(first, last))
        order = torch.cat(rows)
        parameter = model.get_parameter(name)
        parameter.copy_(parameter[order.to(parameter.device)].clone())
        moved[name] = order.argsort()
    return moved


# -- pipeline parallelism -------------------------------------------------------------------------


class TorchPipeline(StageRunner):
    """Runner of a schedule of `torch.distributed.pipelining`, with the interface of `Pipeline`.

    Args:
        axes, model: see `StageRunner`.
    """

    def __init__(self, axes: Axes, model: Any):
        super().__init__(axes, model)
        # torch's zero-bubble cannot split the backward of an autograd Function that is written in
        # Python.
        for module in model.modules():
            if hasattr(module, "multiply"):
                module.multiply = nn.functional.linear
        model.replace_ops(logits=nn.functional.linear)
        self._schedules: dict[int, Any] = {}  # torch's schedules, by the number of micro-batches

    def run(
        self,
        model: ParallelModel,
        loss_fn: Callable[[Any, Any], Tensor],
        micro_batches: Sequence[Any],
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Run forward and backward of all micro-batches, see `Pipeline.run`.

        `loss_fn` and `scale` are not used. torch computes the loss from the logits of the last
        stage.
        """
        count = len(micro_batches)
        if count not in self._schedules:
            self._schedules[count] = self._schedule(model, count)
        # torch splits the batch into micro-batches itself.
        tokens = torch.cat([tokens for tokens, _ in micro_batches])
        targets = torch.cat([targets for _, targets in micro_batches])
        has_last = self.last in self.mine
        inputs = [tokens] if 0 in self.mine else []
        losses: list[Tensor] = []
        self._schedules[count].step(
            *inputs,
            target=targets if has_last else None,
            losses=losses if has_last else None,
            return_outputs=False,
        )
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=model.device)
        return collectives.sum_tensor(total.detach().double(), self.group)

    def _schedule(self, model: ParallelModel, count: int) -> Any:
        """Return torch's schedule of this rank's stages for `count` micro-batches."""
        from torch.distributed import pipelining

        stages = []
        for number in self.mine:
            stage = pipelining.PipelineStage(
                _TorchStage(model, self.stages[number]),
                number,
                len(self.stages),
                model.device,
                group=self.group,
            )
            stages.append(stage)
        classes = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
        }
        takes_several = self.schedule in CHUNKS or self.schedule == "zero-bubble"

        def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
            logits = logits.flatten(0, 1).float()
            return nn.functional.cross_entropy(logits, targets.flatten()) / count

        return classes[self.schedule](
            stages if takes_several else stages[0],
            count,
            loss_fn=loss_fn,
            # torch would divide the gradients of each stage's module by `count`. The stages of a
            # rank share one module here, and `loss_fn` already divides.
            scale_grads=False,
        )


class _TorchStage(nn.Module):
    """One stage of a model, with the one input that torch's pipeline sends."""

    def __init__(self, model: ParallelModel, blocks: range):
        super().__init__()
        self.model = model
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks on tokens `(B, T)` (first stage) or on activations `(B, T, d)`."""
        is_tokens = x.ndim == 2
        with self.model.autocast():
            if is_tokens:
                return self.model(x, blocks=self.blocks)
            # The model also needs tokens, of which it reads the shape only.
            return self.model(x[..., 0], x=x, blocks=self.blocks)
