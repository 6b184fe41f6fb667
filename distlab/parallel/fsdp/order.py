"""The order in which units run, which all ranks must share."""

from collections.abc import Hashable, Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.parallel.fsdp.unit import Unit


class UnitOrder:
    """The order of units in each kind of pass: learned once, compared between the ranks, and then held.

    A collective that is matched with another unit's collective on a peer does not fail by itself:
    with equal sizes it mixes two units' weights silently. So the first pass of each kind exchanges
    the name of every unit before gathering it (blocking, that one time) and remembers the order.
    Later passes send nothing: a rank compares what it is about to gather with its own memory, and
    raises at the first difference, before it sends. The remembered order also says which unit to
    fetch ahead.

    Args:
        units: whose names messages say.
        group: the ranks to agree with.
    """

    def __init__(self, units: Sequence[Unit], group: ProcessGroup):
        self._names = [unit.name for unit in units]
        self._group = group
        # The fake group of simulations has no peers that could answer.
        self._alone = group.size() == 1 or dist.get_backend(group) == "fake"
        self._known: dict[Hashable, list[int]] = {}
        self.forget()

    def forget(self) -> None:
        """Learn every kind of pass again."""
        self._known.clear()
        self.begin(None)

    def begin(self, kind: Hashable) -> None:
        """Begin a pass; passes of one `kind` run the same units."""
        self._kind = kind
        self._expected = self._known.get(kind)
        self._seen: list[int] = []

    def advance(self, unit: int) -> int | None:
        """Note that the pass reaches `unit`; returns the one that follows it, if that is known.

        Raises:
            RuntimeError: another rank runs another unit now, or another unit ran here last time.
        """
        position = len(self._seen)
        self._seen.append(unit)
        if self._expected is None:
            self._compare(self._names[unit])
            return None
        expected = self._expected[position] if position < len(self._expected) else None
        if unit != expected:
            raise RuntimeError(self._changed(f"unit '{self._names[unit]}' runs", expected))
        return self._expected[position + 1] if position + 1 < len(self._expected) else None

    def end(self) -> None:
        """End the pass.

        Raises:
            RuntimeError: another rank goes on, or units that ran last time did not.
        """
        if self._expected is None:
            self._compare(None)
            self._known[self._kind] = self._seen
        elif len(self._seen) < len(self._expected):
            raise RuntimeError(self._changed("the pass ends", self._expected[len(self._seen)]))

    def _compare(self, name: str | None) -> None:
        if self._alone:
            return
        names = collectives.gather_objects(name, self._group)
        for rank, other in enumerate(names):
            if other != names[0]:
                raise RuntimeError(
                    f"FSDP: ranks run different units: rank 0 {_runs(names[0])} and rank {rank} {_runs(other)}; "
                    "every rank must run the same units in the same order"
                )

    def _changed(self, what: str, expected: int | None) -> str:
        before = "the pass ended" if expected is None else f"unit '{self._names[expected]}' ran"
        if ".parametrizations." in before:
            before += " (parametrize.cached(), which computes a parametrized weight once, is not for sharded modules)"
        return (
            f"FSDP: {what} where {before} the last time: every rank must run the same units in the same order "
            "in every step. If all ranks change it together, call relearn_order() on each first"
        )


def _runs(name: str | None) -> str:
    return "ends its pass" if name is None else f"runs unit '{name}'"
