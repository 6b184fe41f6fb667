"""How ranks share a model: four axes over one mesh, and the groups of a rank.

    rank = ((pipeline · D + data) · C + context) · T + tensor        tensor innermost: its messages are the most

    axis       a rank of it has                      who averages or sums
    tensor     a share of every matrix               sums inside of each block (`tensor_parallel.py`)
    context    a share of every sequence             keys and values travel (`context_parallel.py`)
    data       other sequences                       the data strategy averages gradients over data × context

Each axis knows one process group and nothing of the others. A data strategy wraps what the other axes leave on a rank,
an ordinary module with fewer rows, and its group is data × context.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.subgroups import partition
from distlab.parallel.context_parallel import HOW, ZigZag

SHORT = {"pp": "pipeline", "cp": "context", "tp": "tensor"}


@dataclass(frozen=True)
class Layout:
    """How many ranks share a model along each axis; data parallelism takes the rest.

    Raises:
        ValueError: a number below one.
    """

    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    attention: str = "gathered"  # how keys and values travel between ranks that share sequences

    def __post_init__(self) -> None:
        for name in SHORT.values():
            if getattr(self, name) < 1:
                raise ValueError(f"layout {name}={getattr(self, name)}: give 1 rank or more")
        if self.attention not in HOW:
            raise ValueError(f"attention over several ranks {self.attention!r}: choose one of {', '.join(HOW)}")

    @staticmethod
    def parse(text: str) -> "Layout":
        """The layout of `tp2,cp2` or `tp2+cp2`, or `cp4-ring` for attention by a ring; of an empty text, none.

        Raises:
            ValueError: anything else.
        """
        given: dict[str, Any] = {}
        for part in filter(None, re.split("[,+]", text)):
            found = re.fullmatch(rf"(?:tp([1-9][0-9]*)|cp([1-9][0-9]*)(?:-({'|'.join(HOW)}))?)", part.strip())
            new = {} if found is None else dict(zip(("tensor", "context", "attention"), found.groups(), strict=True))
            new = {name: value for name, value in new.items() if value is not None}
            if not new or new.keys() & given.keys():
                raise ValueError(
                    f"layout {text!r}: give tpN, cpN or both, such as tp2,cp2 or tp2+cp2; behind cpN, how attention "
                    f"goes over ranks: -{', -'.join(HOW)}"
                )
            given |= new
        return Layout(**{name: value if name == "attention" else int(value) for name, value in given.items()})

    @property
    def ranks(self) -> int:
        """Ranks that share one model."""
        return self.pipeline * self.context * self.tensor

    def axes(self, group: ProcessGroup) -> "Axes":
        """This rank's groups; call it on every rank, with all ranks of the job. They are made once.

        Raises:
            ValueError: a number of ranks that the layout does not divide.
        """
        if self.ranks == 1:
            return Axes(self, group, group, None, None)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) % self.ranks:
            raise ValueError(
                f"layout {self}: {self.ranks} ranks share a model, which does not divide the {len(ranks)} ranks of "
                "the job"
            )
        C, T = self.context, self.tensor
        lines = [ranks[first : first + T] for first in range(0, len(ranks), T)]
        columns = [list(column) for column in zip(*lines, strict=True)]  # equal places in tensor groups
        tensor = partition(group, lines) if T > 1 else None
        context = partition(group, [c[i : i + C] for c in columns for i in range(0, len(c), C)]) if C > 1 else None
        return Axes(self, group, partition(group, columns), context, tensor)

    def __str__(self) -> str:
        how = "" if self.attention == HOW[0] else f"-{self.attention}"
        parts = {short: getattr(self, name) for short, name in SHORT.items() if getattr(self, name) > 1}
        return ",".join(f"{short}{ranks}{how if short == 'cp' else ''}" for short, ranks in parts.items())


DATA_PARALLEL = Layout()


@dataclass(frozen=True)
class Axes:
    """The groups of one rank.

    Args:
        world: all ranks of the job.
        data: the ranks over which a data strategy averages: data × context.
        context, tensor: the ranks that share a sequence, and the matrices; None for one rank alone.
    """

    layout: Layout
    world: ProcessGroup
    data: ProcessGroup
    context: ProcessGroup | None
    tensor: ProcessGroup | None

    @property
    def batch_rank(self) -> int:
        """Whose sequences this rank has, of `batch_ranks`."""
        return self.data.rank() // self.layout.context

    @property
    def batch_ranks(self) -> int:
        """Ranks that have different sequences."""
        return self.data.size() // self.layout.context

    def share(self, batch: Any, dim: int = 1) -> Any:
        """This rank's part of the sequences of a batch of tensors `(B, T, …)`: two chunks of each (`ZigZag`).

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

