"""Layouts: how ranks share a model along four axes, and the process groups of a rank.

    rank = ((pipeline · D + data) · C + context) · T + tensor

The tensor axis is innermost, because its ranks exchange the most bytes.

    axis       a rank has                communication
    tensor     a part of every matrix    sums inside each block (`tensor_parallel.py`)
    context    a part of every sequence  keys and values are sent (`context_parallel.py`)
    pipeline   some of the blocks        activations are sent (`pipeline.py`)
    data       other sequences           the data strategy averages gradients over data × context

Each axis uses its own process group and does not depend on the others. A data strategy wraps the
module that the other axes leave on a rank: an ordinary module with smaller matrices. Its group is
data × context.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.subgroups import partition
from distlab.parallel.context_parallel import HOW, ZigZag
from distlab.parallel.schedules import SCHEDULES


class Notation(NamedTuple):
    """Notation of one axis in the text of a layout, such as `cp4-ring`.

    Attributes:
        short: the axis in the text, such as `cp`.
        axis: field of `Layout` that holds the number of ranks.
        option: field of `Layout` that the ending sets. None: the axis has no endings.
        endings: allowed values of that field. The first one is the default.
    """

    short: str
    axis: str
    option: str | None = None
    endings: tuple[str, ...] = ()


NOTATIONS = (
    Notation(short="pp", axis="pipeline", option="schedule", endings=tuple(SCHEDULES)),
    Notation(short="cp", axis="context", option="attention", endings=HOW),
    Notation(short="tp", axis="tensor"),
)


@dataclass(frozen=True)
class Layout:
    """Numbers of ranks that share a model along each axis. The other ranks are data-parallel.

    Attributes:
        pipeline, context, tensor: number of ranks along the axis.
        attention: transport of keys and values between ranks that share sequences, one of `HOW`.
        schedule: schedule of the pipeline, one of `SCHEDULES`.
        stages: number of blocks of each stage of the pipeline. Empty: stages of equal size.

    Raises:
        ValueError: a number below one, an unknown name, or sizes of stages without a pipeline.
    """

    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    attention: str = HOW[0]
    schedule: str = "1f1b"
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for notation in NOTATIONS:
            ranks = getattr(self, notation.axis)
            if ranks < 1:
                raise ValueError(f"layout {notation.axis}={ranks}: give 1 rank or more")
        for notation in NOTATIONS:
            if notation.option is None:
                continue
            value = getattr(self, notation.option)
            if value not in notation.endings:
                raise ValueError(
                    f"layout {notation.option}={value!r}: choose one of "
                    f"{', '.join(notation.endings)}"
                )
        if self.stages and self.pipeline == 1:
            sizes = " ".join(map(str, self.stages))
            raise ValueError(
                f"stages {sizes}: this layout has no pipeline whose stages these could be: add "
                f"pp{max(2, len(self.stages))}, or leave them out"
            )

    @staticmethod
    def parse(text: str, stages: Sequence[int] = ()) -> "Layout":
        """Return the layout that a text such as `tp2,cp2` or `tp2+cp2` describes.

        An ending chooses an option of the axis: `cp4-ring` is ring attention, `pp4-gpipe` is the
        schedule GPipe. An empty text is the layout of one rank.

        Args:
            text: axes with their numbers of ranks, separated by commas or plus signs.
            stages: number of blocks of each stage of the pipeline.

        Raises:
            ValueError: a text of another form.
        """
        fields: dict[str, Any] = {}
        for part in re.split("[,+]", text) if text else []:
            found = _parse_part(part.strip())
            if found is None or found.notation.axis in fields:
                raise ValueError(
                    f"layout {text!r}: give tpN, cpN, ppN or several, such as tp2,cp2 or tp2+cp2; "
                    f"after cpN, how attention goes over ranks: -{', -'.join(HOW)}; after ppN, "
                    f"the schedule: -{', -'.join(SCHEDULES)}"
                )
            fields[found.notation.axis] = found.ranks
            if found.ending is not None:
                fields[found.notation.option] = found.ending
        return Layout(**fields, stages=tuple(stages))

    @property
    def ranks(self) -> int:
        """Number of ranks that share one model."""
        return self.pipeline * self.context * self.tensor

    def axes(self, group: ProcessGroup) -> "Axes":
        """Return this rank's process groups. Call it on every rank.

        A second call returns the same groups.

        Args:
            group: all ranks of the job.

        Raises:
            ValueError: a number of ranks that the layout does not divide.
        """
        if self.ranks == 1:
            return Axes(self, group, group)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) % self.ranks:
            raise ValueError(
                f"layout {self}: {self.ranks} ranks share a model, which does not divide the "
                f"{len(ranks)} ranks of the job"
            )
        T = self.tensor
        C = self.context
        stage_size = len(ranks) // self.pipeline  # number of ranks that have the same stages
        # Neighbours share matrices.
        tensor_groups = [ranks[first : first + T] for first in range(0, len(ranks), T)]
        # Gradients are averaged over the ranks of the same stages with the same part of matrices.
        data_groups = []
        for first in range(0, len(ranks), stage_size):
            stage_ranks = ranks[first : first + stage_size]
            data_groups += [stage_ranks[place::T] for place in range(T)]
        # Each C neighbours of such a group share sequences.
        context_groups = []
        for data_group in data_groups:
            for first in range(0, len(data_group), C):
                context_groups.append(data_group[first : first + C])
        # A pipeline has the rank at the same place of every stage.
        pipelines = [ranks[place::stage_size] for place in range(stage_size)]
        # Every rank must make the groups in this order.
        tensor = partition(group, tensor_groups) if self.tensor > 1 else None
        context = partition(group, context_groups) if self.context > 1 else None
        pipeline = partition(group, pipelines) if self.pipeline > 1 else None
        return Axes(
            layout=self,
            world=group,
            data=partition(group, data_groups),
            context=context,
            tensor=tensor,
            pipeline=pipeline,
            pipelines=pipelines,
        )

    def __str__(self) -> str:
        parts = []
        for notation in NOTATIONS:
            ranks = getattr(self, notation.axis)
            if ranks == 1:
                continue
            part = f"{notation.short}{ranks}"
            if notation.option is not None:
                ending = getattr(self, notation.option)
                if ending != notation.endings[0]:  # the default is not written
                    part += f"-{ending}"
            parts.append(part)
        return ",".join(parts)


DATA_PARALLEL = Layout()


@dataclass(frozen=True)
class Axes:
    """Process groups of one rank.

    Attributes:
        layout: numbers of ranks from which the groups follow.
        world: all ranks of the job.
        data: ranks over which a data strategy averages: data × context.
        context: ranks that share sequences. None if each rank has whole sequences.
        tensor: ranks that share matrices. None if each rank has whole matrices.
        pipeline: ranks that have the stages of one model, in order. None without a pipeline.
        pipelines: global ranks of all pipelines of the job.
    """

    layout: Layout
    world: ProcessGroup
    data: ProcessGroup
    context: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    pipelines: Sequence[Sequence[int]] = ()

    @property
    def batch_rank(self) -> int:
        """Index of this rank's sequences, from 0 to `batch_ranks` - 1."""
        return self.data.rank() // self.layout.context

    @property
    def batch_ranks(self) -> int:
        """Number of parts of the global batch, each with different sequences."""
        return self.data.size() // self.layout.context

    def share(self, batch: Any, dim: int = 1) -> Any:
        """Return this rank's part of the sequences of a batch: two chunks of each (`ZigZag`).

        Shift the targets before: the token after a chunk is on another rank.

        Args:
            batch: tensor `(B, T, …)`, or a tuple or list of batches.
            dim: dimension of the sequence.

        Raises:
            ValueError: a length that 2 × context ranks do not divide.
        """
        if self.context is None:
            return batch
        zigzag = ZigZag(self.context)
        if isinstance(batch, Tensor):
            return zigzag.local(batch, dim)
        return type(batch)(self.share(each, dim) for each in batch)


class _Part(NamedTuple):
    """One axis of a layout's text."""

    notation: Notation
    ranks: int
    ending: str | None


def _parse_part(text: str) -> _Part | None:
    """Return what a text such as `cp4-ring` says. None if it cannot be read."""
    match = re.fullmatch("(pp|cp|tp)([1-9][0-9]*)(?:-(.+))?", text)
    if match is None:
        return None
    short, ranks, ending = match.groups()
    notation = next(each for each in NOTATIONS if each.short == short)
    if ending is not None:
        # One rank has no schedule and sends no keys, so an ending would have no effect.
        has_effect = ending in notation.endings and int(ranks) > 1
        if not has_effect:
            return None
    return _Part(notation, int(ranks), ending)
