"""Should two operators be one kernel? The decision, step by step, over a chain or a Transformer block.

For each operator and the group before it, in this order:

1. *Memory-bound?* A matmul gains nothing from a neighbour that saves it bytes it does not wait for; an element-wise
   operation behind one may join it as its epilogue, though, because it is the neighbour that is saved.
2. *Does it fit?* What the fused kernel keeps on the chip must stay within 0.6 of an SM's shared memory and registers,
   or too few warps are left to hide latency, and values spill.
3. *Same parallel pattern?* Programs that own elements and programs that own rows go together (rows decide); two
   matmuls, or a matmul and a whole row, do not.
4. *Is it worth it?* The group's bytes one by one must be at least 1.5 times the bytes of the fused kernel.
5. *Is an intermediate used elsewhere?* Then it is written all the same, which counts in 4.

The answers: "fuse" with the group before; "split", a new group begins here because the two cannot be one; "leave", they
could, but it would not pay.

Bytes through device memory of a chain of operators, launched one by one and fused, and the speed-up that predicts.

Unfused, every operator reads its inputs and writes its outputs. Fused, a value that only the chain uses stays in
registers: what remains are the tensors that come from outside, once each, and those that leave.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distlab.hardware import GPUSpec
from distlab.theory.checks import at_least_one
from distlab.theory.gpu import Roofline, roofline
from kernels.cost import Cost

POINTWISE, ROWS, MATMUL, OPAQUE = "pointwise", "rows", "matmul", "opaque"


@dataclass(frozen=True)
class Operator:
    """One node of a graph.

    Args:
        name: of the operation, unique in its graph.
        reads, writes: names of tensors.
        flops: it does.
        pattern: how its programs divide the work: POINTWISE (each element alone), ROWS (whole rows, such as a norm),
            MATMUL (tiles of a matmul), OPAQUE (a library's kernel, attention say, that takes no neighbour).
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

    def leaves(self, tensor: str, group: Iterable[Operator]) -> bool:
        """Whether a tensor that `group` writes is needed outside of it."""
        inside = {op.name for op in group}
        users = [op.name for op in self.operators if tensor in op.reads]
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

    def speed_up(self, roof: Roofline) -> float:
        """Predicted time unfused over time fused, launches left out."""
        return sum(roof.seconds(self.alone(op)) for op in self.operators) / roof.seconds(self.fused())


def pointwise_chain(count: int, elements: int, itemsize: int, flops_each: int = 1) -> Graph:
    """`count` element-wise operations one after the other on one tensor: x0 → x1 → … ."""
    operators = tuple(Operator(f"f{i}", (f"x{i}",), (f"x{i + 1}",), flops_each * elements) for i in range(count))
    return Graph(operators, {f"x{i}": elements * itemsize for i in range(count + 1)})


CHIP_SHARE = 0.6
LEAST_SAVING = 1.5


@dataclass(frozen=True)
class Decision:
    """What to do with one operator.

    Args:
        operator: its name.
        action: "start", "fuse", "split" or "leave".
        reason: why, for people.
        saving: bytes one by one over bytes fused, of the group with this operator; None where it was not asked.
    """

    operator: str
    action: str
    reason: str
    saving: float | None = None


@dataclass(frozen=True)
class Plan:
    """The decisions and the groups they lead to, one kernel each."""

    decisions: tuple[Decision, ...]
    groups: tuple[tuple[Operator, ...], ...]


def chip_bytes(spec: GPUSpec) -> int:
    """What one row may occupy: the smaller of registers and shared memory of an SM, times CHIP_SHARE."""
    return int(CHIP_SHARE * min(spec.registers_per_sm * 4, spec.shared_memory_per_sm))


def advise(graph: Graph, spec: GPUSpec, dtype: str = "bf16") -> Plan:
    """Walk over the graph and decide for every operator."""
    roof = roofline(spec, dtype)
    decisions: list[Decision] = []
    groups: list[list[Operator]] = []
    for op in graph.operators:
        decision = _decide(graph, groups[-1], op, roof, spec) if groups else Decision(op.name, "start", "the first")
        decisions.append(decision)
        if decision.action != "fuse":
            groups.append([])
        groups[-1].append(op)
    return Plan(tuple(decisions), tuple(tuple(group) for group in groups))


def _decide(graph: Graph, group: list[Operator], op: Operator, roof: Roofline, spec: GPUSpec) -> Decision:
    written = {tensor for member in group for tensor in member.writes}
    shared = written & set(op.reads)
    if not shared:
        return Decision(op.name, "split", "reads nothing that the group before it writes")
    patterns = {member.pattern for member in group}
    if op.pattern == OPAQUE or OPAQUE in patterns:
        return Decision(op.name, "split", "a library's kernel takes no neighbours")
    epilogue = MATMUL in patterns and op.pattern == POINTWISE
    if not epilogue and roof.bound(graph.alone(op)) == "compute":
        intensity = f"{graph.alone(op).intensity:.0f} FLOPs per byte, the ridge is at {roof.ridge:.0f}"
        return Decision(op.name, "split", f"compute-bound: {intensity}; bytes are not what it waits for")
    if op.pattern == MATMUL or (MATMUL in patterns and not epilogue):
        return Decision(op.name, "split", "another parallel pattern: a matmul's tiles do not hold whole rows")
    together = [*group, op]
    need = sum(member.row_bytes for member in together if member.pattern == ROWS)
    if need > chip_bytes(spec):
        return Decision(op.name, "split", f"rows of {need:,} bytes exceed {CHIP_SHARE} of an SM ({chip_bytes(spec):,})")
    saving = graph.unfused(together).bytes / graph.fused(together).bytes
    kept = sorted(t for t in shared if graph.leaves(t, together))
    note = f"; {', '.join(kept)} is used elsewhere and is written all the same" if kept else ""
    if epilogue:
        return Decision(op.name, "fuse", f"epilogue on the accumulator: its own pass over memory is gone{note}", saving)
    if saving < LEAST_SAVING:
        return Decision(op.name, "leave", f"saves {saving:.2f} × the traffic, less than {LEAST_SAVING}{note}", saving)
    return Decision(op.name, "fuse", f"memory-bound, same pattern, saves {saving:.2f} × the traffic{note}", saving)


def transformer_block(batch: int, context: int, d_model: int, d_ff: int, num_heads: int, itemsize: int = 2) -> Graph:
    """The forward of one pre-norm block with SwiGLU, as this lab's model runs it.

    Raises:
        ValueError: a size below one, or heads that do not divide d_model.
    """
    at_least_one(batch=batch, context=context, d_model=d_model, d_ff=d_ff, num_heads=num_heads)
    if d_model % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide d_model={d_model}")
    tokens, d, f = batch * context, d_model, d_ff
    wide, inner = tokens * d * itemsize, tokens * f * itemsize
    tensors = {name: wide for name in ("x", "n1", "a", "o", "x2", "n2", "m", "y")}
    tensors |= {"qkv": 3 * wide, "qk": 2 * wide, "gate": inner, "up": inner, "act": inner, "h": inner,
                "w_qkv": 3 * d * d * itemsize, "w_o": d * d * itemsize, "w1": d * f * itemsize,
                "w3": d * f * itemsize, "w2": d * f * itemsize, "g1": d * itemsize, "g2": d * itemsize}
    row = 4 * d

    def matmul(name: str, x: str, w: str, y: str, depth: int, cols: int) -> Operator:
        return Operator(name, (x, w), (y,), 2 * tokens * depth * cols, MATMUL)

    return Graph((
        Operator("norm1", ("x", "g1"), ("n1",), 4 * tokens * d, ROWS, row),
        matmul("qkv_matmul", "n1", "w_qkv", "qkv", d, 3 * d),
        Operator("rope", ("qkv",), ("qk",), 6 * tokens * d, POINTWISE, eager_kernels=5),
        Operator("attention", ("qk", "qkv"), ("a",), 2 * tokens * context * d, OPAQUE),
        matmul("out_matmul", "a", "w_o", "o", d, d),
        Operator("add1", ("x", "o"), ("x2",), tokens * d),
        Operator("norm2", ("x2", "g2"), ("n2",), 4 * tokens * d, ROWS, row),
        matmul("gate_matmul", "n2", "w1", "gate", d, f),
        matmul("up_matmul", "n2", "w3", "up", d, f),
        Operator("silu", ("gate",), ("act",), 5 * tokens * f),
        Operator("multiply", ("act", "up"), ("h",), tokens * f),
        matmul("down_matmul", "h", "w2", "m", f, d),
        Operator("add2", ("x2", "m"), ("y",), tokens * d),
    ), tensors, frozenset({"y"}))


def kernel_counts(graph: Graph, spec: GPUSpec, dtype: str = "bf16") -> dict[str, int]:
    """Launches of a graph: eager; compiled, where everything that is no library call is merged along the order as
    Inductor does; with `--ops triton`, where RoPE, residual + norm, and SwiGLU are one kernel each; and by the advice.
    """
    plain = [op.pattern in (POINTWISE, ROWS) for op in graph.operators]
    compiled = len(plain) - sum(before and this for before, this in itertools.pairwise(plain))
    names = [op.name for op in graph.operators]
    ours = len(names) - sum(a in names and b in names for a, b in (("add1", "norm2"), ("silu", "multiply")))
    return {
        "eager": sum(op.eager_kernels for op in graph.operators),
        "compiled": compiled,
        "ours": ours,
        "advised": len(advise(graph, spec, dtype).groups),
    }
