"""Bytes through device memory of a chain of operators, launched one by one and fused, and the speed-up that predicts.

Unfused, every operator reads its inputs and writes its outputs. Fused, a value that only the chain uses stays in
registers: what remains are the tensors that come from outside, once each, and those that leave.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distlab.theory.roofline import Roofline
from kernels.cost import Cost

POINTWISE, ROWS, PRODUCT, OPAQUE = "pointwise", "rows", "product", "opaque"


@dataclass(frozen=True)
class Operator:
    """One node of a graph.

    Args:
        name: of the operation, unique in its graph.
        reads, writes: names of tensors.
        flops: it does.
        pattern: how its programs divide the work: POINTWISE (each element alone), ROWS (whole rows, such as a norm),
            PRODUCT (tiles of a matrix product), OPAQUE (a library's kernel, attention say, that takes no neighbour).
        row_bytes: of one row that has to stay on the chip, in fp32; for ROWS.
        eager_kernels: launches of its plain eager form.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: float = 0.0
    pattern: str = POINTWISE
    row_bytes: int = 0
    eager_kernels: int = 1


@dataclass(frozen=True)
class Graph:
    """Operators in the order in which they run.

    Args:
        operators: see `Operator`.
        sizes: bytes of each tensor.
        results: tensors that are needed after the graph; a tensor that nobody in it reads is one anyway.

    Raises:
        ValueError: a tensor without a size, or two operators of one name.
    """

    operators: tuple[Operator, ...]
    sizes: Mapping[str, int] = field(hash=False)
    results: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = [op.name for op in self.operators]
        if len(set(names)) != len(names):
            raise ValueError(f"operators must have different names, got {names}")
        for op in self.operators:
            for tensor in (*op.reads, *op.writes):
                if tensor not in self.sizes:
                    raise ValueError(f"operator {op.name!r} uses tensor {tensor!r}, which has no size")

    def users(self, tensor: str) -> list[str]:
        """Operators that read a tensor."""
        return [op.name for op in self.operators if tensor in op.reads]

    def leaves(self, tensor: str, group: Iterable[Operator]) -> bool:
        """Whether a tensor that `group` writes is needed outside of it."""
        inside = {op.name for op in group}
        users = self.users(tensor)
        return tensor in self.results or not users or any(user not in inside for user in users)

    def alone(self, op: Operator) -> Cost:
        """An operator's FLOPs and bytes by itself, each tensor once."""
        return Cost(op.flops, sum(self.sizes[t] for t in {*op.reads, *op.writes}))

    def unfused(self, group: Sequence[Operator] | None = None) -> Cost:
        """Operators one by one (all of them by default)."""
        costs = [self.alone(op) for op in (self.operators if group is None else group)]
        return sum(costs, Cost(0, 0))

    def fused(self, group: Sequence[Operator] | None = None) -> Cost:
        """The same operators as one kernel: what enters and what leaves, once each."""
        group = self.operators if group is None else group
        written = {tensor for op in group for tensor in op.writes}
        entering = {tensor for op in group for tensor in op.reads} - written
        leaving = {tensor for tensor in written if self.leaves(tensor, group)}
        return Cost(sum(op.flops for op in group), sum(self.sizes[t] for t in entering | leaving))

    def speed_up(self, roof: Roofline, group: Sequence[Operator] | None = None, launch_s: float = 0.0) -> float:
        """Predicted time unfused over time fused; `launch_s` is added for every kernel."""
        group = self.operators if group is None else group
        apart = sum(roof.seconds(self.alone(op)) + launch_s * op.eager_kernels for op in group)
        return apart / (roof.seconds(self.fused(group)) + launch_s)


def pointwise_chain(count: int, elements: int, itemsize: int, flops_each: int = 1) -> Graph:
    """`count` element-wise operations one after the other on one tensor: x0 → x1 → … ."""
    operators = tuple(Operator(f"f{i}", (f"x{i}",), (f"x{i + 1}",), flops_each * elements) for i in range(count))
    return Graph(operators, {f"x{i}": elements * itemsize for i in range(count + 1)})
