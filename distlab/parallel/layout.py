"""How ranks share a model: four axes over one mesh, and the groups of a rank.

    rank = ((pipeline · D + data) · C + context) · T + tensor        tensor innermost: its messages are the most

    axis       a rank of it has                      who averages or sums
    tensor     a share of every matrix               sums inside of each block (`tensor_parallel.py`)
    context    a share of every sequence             keys and values travel (`context_parallel.py`)
    pipeline   some of the blocks                    activations travel (`pipeline.py`)
    data       other sequences                       the data strategy averages gradients over data × context

Each axis knows one process group and nothing of the others. A data strategy wraps what the other
axes leave on a rank, an ordinary module with fewer rows, and its group is data × context.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.subgroups import partition
from distlab.parallel.context_parallel import HOW, ZigZag
from distlab.parallel.schedules import SCHEDULES

SHORT = {"pp": "pipeline", "cp": "context", "tp": "tensor"}
# the first: the default
ENDINGS = {"pp": ("schedule", tuple(SCHEDULES)), "cp": ("attention", HOW), "tp": (None, ())}


@dataclass(frozen=True)
class Layout:
    """How many ranks share a model along each axis; data parallelism takes the rest.

    Raises:
        ValueError: a number below one, or sizes of stages without a pipeline.
    """

    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    attention: str = HOW[0]  # how keys and values travel between ranks that share sequences
    schedule: str = "1f1b"  # of a pipeline
    stages: tuple[int, ...] = ()  # blocks of each stage of a pipeline; default: equally many

    def __post_init__(self) -> None:
        for name in SHORT.values():
            if getattr(self, name) < 1:
                raise ValueError(f"layout {name}={getattr(self, name)}: give 1 rank or more")
        for field, allowed in filter(all, ENDINGS.values()):
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"layout {field}={getattr(self, field)!r}: choose one of {', '.join(allowed)}"
                )
        if self.stages and self.pipeline == 1:
            sizes = " ".join(map(str, self.stages))
            raise ValueError(
                f"stages {sizes}: this layout has no pipeline whose stages these could be: add "
                f"pp{max(2, len(self.stages))}, or leave them out"
            )

    @staticmethod
    def parse(text: str, stages: Sequence[int] = ()) -> "Layout":
        """Parse `tp2,cp2` or `tp2+cp2`; `cp4-ring` is attention by a ring, `pp4-gpipe` another schedule; an empty text
        is a layout of one rank.

        Args:
            stages: blocks of each stage of a pipeline.

        Raises:
            ValueError: anything else.
        """
        given: dict[str, Any] = {}
        for part in re.split("[,+]", text) if text else []:
            found = re.fullmatch("(pp|cp|tp)([1-9][0-9]*)(?:-(.+))?", part.strip())
            short, ranks, ending = found.groups() if found else ("tp", "0", None)
            field, allowed = ENDINGS[short]
            # An ending of one rank would have no effect: it has no schedule, and sends no keys and
            # values.
            has_effect = ending is None or (ending in allowed and int(ranks) > 1)
            if not found or SHORT[short] in given or not has_effect:
                raise ValueError(
                    f"layout {text!r}: give tpN, cpN, ppN or several, such as tp2,cp2 or tp2+cp2; behind cpN, how "
                    f"attention goes over ranks: -{', -'.join(HOW)}; behind ppN, the schedule: -{', -'.join(SCHEDULES)}"
                )
            given |= {SHORT[short]: int(ranks)} | ({field: ending} if ending else {})
        return Layout(**given, stages=tuple(stages))

    @property
    def ranks(self) -> int:
        """Ranks that share one model."""
        return self.pipeline * self.context * self.tensor

    def axes(self, group: ProcessGroup) -> "Axes":
        """Return this rank's groups; call it on every rank, with all ranks of the job.

        They are made once.

        Raises:
            ValueError: a number of ranks that the layout does not divide.
        """
        if self.ranks == 1:
            return Axes(self, group, group)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) % self.ranks:
            raise ValueError(
                f"layout {self}: {self.ranks} ranks share a model, which does not divide the {len(ranks)} ranks of "
                "the job"
            )
        P, C, T = self.pipeline, self.context, self.tensor
        S = len(ranks) // P  # ranks of a stage
        lines = [ranks[first : first + T] for first in range(0, len(ranks), T)]
        # equal places elsewhere
        columns = [ranks[p * S + t : (p + 1) * S : T] for p in range(P) for t in range(T)]
        pipelines = [ranks[first::S] for first in range(S)]
        tensor = partition(group, lines) if T > 1 else None
        context = (
            partition(group, [c[i : i + C] for c in columns for i in range(0, len(c), C)])
            if C > 1
            else None
        )
        pipeline = partition(group, pipelines) if P > 1 else None
        return Axes(self, group, partition(group, columns), context, tensor, pipeline, pipelines)

    def __str__(self) -> str:
        parts = []
        for short, name in SHORT.items():
            field, allowed = ENDINGS[short]
            ending = (
                f"-{getattr(self, field)}" if field and getattr(self, field) != allowed[0] else ""
            )
            if getattr(self, name) > 1:
                parts.append(f"{short}{getattr(self, name)}{ending}")
        return ",".join(parts)


DATA_PARALLEL = Layout()


@dataclass(frozen=True)
class Axes:
    """The groups of one rank.

    Args:
        world: all ranks of the job.
        data: the ranks over which a data strategy averages: data × context.
        context, tensor: the ranks that share a sequence, and the matrices; None for one rank alone.
        pipeline: the ranks that have the stages, in order; None for one rank alone.
        pipelines: the global ranks of all of these groups.
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
        """Whose sequences this rank has, of `batch_ranks`."""
        return self.data.rank() // self.layout.context

    @property
    def batch_ranks(self) -> int:
        """Ranks that have different sequences."""
        return self.data.size() // self.layout.context

    def share(self, batch: Any, dim: int = 1) -> Any:
        """Return this rank's part of the sequences of a batch of tensors `(B, T, …)`: two chunks of each (`ZigZag`).

        Targets are shifted before they come here: the word behind a chunk lies on another rank.

        Raises:
            ValueError: sequences that 2 × context ranks do not divide.
        """
        if self.context is None:
            return batch
        zigzag = ZigZag(self.context)
        if isinstance(batch, Tensor):
            return zigzag.local(batch, dim)
        return type(batch)(self.share(each, dim) for each in batch)
