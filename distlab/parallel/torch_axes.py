"""torch's own tensor and pipeline parallelism for the lab's Transformer: what ours are measured beside.

As torch's users would write them: `parallelize_module` with sequence and loss parallelism under
`fsdp2`; and a schedule of `torch.distributed.pipelining`, where one rank has each stage. They take
torch's operations, because a Triton kernel takes no DTensor.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.comm import collectives
from distlab.parallel.pipeline import stage_blocks
from distlab.parallel.schedules import CHUNKS
from distlab.parallel.tensor_parallel import find_cuts

if TYPE_CHECKING:
    from distlab.parallel.layout import Axes
    from distlab.parallel.model import ParallelModel


def parallelize_by_torch(model: nn.Module, axes: "Axes") -> dict[str, Any]:
    """Cut every matrix into DTensors, as `tensor_parallel.parallelize` does without.

    Returns:
        What `TorchFSDP2` must know of it.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    class OfBothInputs(SequenceParallel):
        """Of a norm that also adds: torch's style prepares the first input alone."""

        @staticmethod
        def _prepare_input_fn(layout: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, layout, run_check=False) for x in inputs)

        @staticmethod
        def _prepare_output_fn(
            use_local: bool, module: nn.Module, outputs: Any, mesh: DeviceMesh
        ) -> Any:
            return (
                tuple(x.to_local() for x in outputs)
                if isinstance(outputs, tuple)
                else outputs.to_local()
            )

    class LossInHead(ColwiseParallel):
        """Of a head that takes targets and returns the loss: torch's style hands on the first input alone."""

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

    device = next(model.parameters()).device.type
    ranks = torch.arange(axes.world.size()).view(-1, axes.tensor.size())
    mesh = DeviceMesh.from_group(
        [axes.data, axes.tensor], device, mesh=ranks, mesh_dim_names=("data", "tensor")
    )
    moved = _group_heads_by_rank(model, axes.tensor)
    whole_sequence = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    of_attention = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": OfBothInputs(),
        "head": LossInHead(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "blocks.*.attention_norm": OfBothInputs(),
        "blocks.*.feed_forward_norm": OfBothInputs(),
        "blocks.*.attention": of_attention,
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed_forward": whole_sequence,
        "blocks.*.feed_forward.w1": ColwiseParallel(),
        "blocks.*.feed_forward.w3": ColwiseParallel(),
        "blocks.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    ops = model.operations()
    model.replace_ops(
        linear_cross_entropy=lambda x, weight, targets: ops.cross_entropy(
            ops.logits(x, weight), targets
        )
    )
    parallelize_module(model, mesh["tensor"], plan)
    contexts = ExitStack()
    contexts.enter_context(loss_parallel())
    return {"contexts": contexts, "data_mesh": mesh["data"], "moved": moved}


@torch.no_grad()
def _group_heads_by_rank(model: nn.Module, group: ProcessGroup) -> dict[str, Tensor]:
    """Put the rows of fused matrices such that equal parts of them are what each rank of ours keeps."""
    moved = {}
    for name, cut in find_cuts(model, group).items():
        if len(cut.ranges) > 1:
            parameter = model.get_parameter(name)
            ranges = collectives.gather_objects(cut.ranges, group)
            order = torch.cat([torch.arange(*each) for of_rank in ranges for each in of_rank])
            parameter.copy_(parameter[order.to(parameter.device)].clone())
            moved[name] = order.argsort()
    return moved


class TorchPipeline:
    """A schedule of `torch.distributed.pipelining` behind the interface of `Pipeline`."""

    def __init__(self, group: ProcessGroup, model: Any, schedule: str, sizes: Sequence[int] = ()):
        self.group, self.schedule = group, schedule
        self.stages = stage_blocks(model, group.size(), schedule, sizes)
        self.mine = range(group.rank(), len(self.stages), group.size())
        self.last = len(self.stages) - 1
        model.keep_blocks([self.stages[stage] for stage in self.mine])
        # torch's zero-bubble cannot split the backward of a Function in Python
        for module in model.modules():
            if hasattr(module, "multiply"):
                module.multiply = nn.functional.linear
        model.replace_ops(logits=nn.functional.linear)
        self._runs: dict[int, Any] = {}  # torch's schedule, by the number of micro-batches

    def run(
        self,
        model: "ParallelModel",
        loss_fn: Callable[[Any, Any], Tensor],
        micro_batches: Sequence[Any],
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """See `Pipeline.run`; the loss is computed of logits, outside of the last stage."""
        count = len(micro_batches)
        if count not in self._runs:
            self._runs[count] = self._schedule(model, count)
        tokens, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        losses: list[Tensor] = []
        given = [tokens] if 0 in self.mine else []
        last = {"target": targets, "losses": losses} if self.last in self.mine else {}
        self._runs[count].step(*given, **last, return_outputs=False)
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=model.device)
        return collectives.sum_tensor(total.detach().double(), self.group)

    def _schedule(self, model: "ParallelModel", count: int) -> Any:
        from torch.distributed import pipelining

        stages = [
            pipelining.PipelineStage(
                _TorchStage(model, self.stages[stage]),
                stage,
                len(self.stages),
                model.device,
                group=self.group,
            )
            for stage in self.mine
        ]
        schedules = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
        }
        takes_several = self.schedule in (*CHUNKS, "zero-bubble")

        def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
            return (
                nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / count
            )

        # torch would divide the gradients of a stage's module, which several stages of a rank share
        # here.
        given = {"loss_fn": loss_fn, "scale_grads": False}
        return schedules[self.schedule](stages if takes_several else stages[0], count, **given)


class _TorchStage(nn.Module):
    def __init__(self, model: "ParallelModel", blocks: range):
        super().__init__()
        self.model, self.blocks = model, blocks

    def forward(self, x: Tensor) -> Tensor:
        with self.model.autocast():
            if x.ndim == 2:
                return self.model(x, blocks=self.blocks)
            # of tokens their number alone matters here
            return self.model(x[..., 0], x=x, blocks=self.blocks)
