"""Should two operators be one kernel?

The decision, step by step, over a chain or a Transformer block.

For each operator and the group before it, in this order:

1. *Memory-bound?* A matmul gains nothing from a neighbour that saves it bytes it does not wait for;
   an element-wise operation behind one may join it as its epilogue, though, because it is the
   neighbour that is saved: if 4 holds, and if it would not save more together with what follows it
   (a residual addition with the norm behind it).
2. *Does it fit?* What the fused kernel keeps on the chip must stay within 0.6 of an SM's shared
   memory and registers, or too few warps are left to hide latency, and values spill.
3. *Same parallel pattern?* Programs that own elements and programs that own rows go together (rows
   decide); two matmuls, or a matmul and a whole row, do not.
4. *Is it worth it?* The group, with what can join it next, must take at least 1.5 times as long one
   by one as in one kernel, by the roofline: where all of it waits for memory, 1.5 times the bytes.
   An epilogue is a small part of a compute-bound matmul's time.
5. *Is an intermediate used elsewhere?* Then it is written all the same, which counts in 4.

The answers: "fuse" with the group before; "split", a new group begins here because the two cannot
be one; "leave", they could, but it would not pay.

Bytes through device memory of a chain of operators, launched one by one and fused, and the speed-up
that predicts.

Unfused, every operator reads its inputs and writes its outputs. Fused, a value that only the chain
uses stays in registers: what remains are the tensors that come from outside, once each, and those
that leave.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distlab.hardware import GPUSpec
from distlab.theory.checks import at_least_one
from distlab.theory.gpu import Roofline, roofline
from kernels.cost import Cost

POINTWISE, ROWS, MATMUL, OPAQUE = "pointwise", "rows", "matmul", "opaque"


@dataclass(frozen=True)
class Operator:
    """One node of a graph.

    Args:
        name: name of the operation, unique in its graph.
        reads, writes: names of tensors.
        flops: number of its FLOPs.
        pattern: division of the work among programs: POINTWISE (each element alone), ROWS (whole
            rows, such as a norm), MATMUL (tiles of a matmul), OPAQUE (a library's kernel, for
            example attention, that takes no neighbour).
        row_bytes: bytes of one row that has to stay on the chip, in fp32, for ROWS.
        eager_kernels: number of launches of its plain eager form.
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
        operators: operators with unique names.
        sizes: bytes of each tensor.

    Raises:
        ValueError: a tensor without a size, or two operators of one name.
    """

    operators: tuple[Operator, ...]
    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        names = [op.name for op in self.operators]
        if len(set(names)) != len(names):
            raise ValueError(f"operators must have different names, got {names}")
        for op in self.operators:
            for tensor in (*op.reads, *op.writes):
                if tensor not in self.sizes:
                    raise ValueError(
                        f"operator {op.name!r} uses tensor {tensor!r}, which has no size"
                    )

    def leaves(self, tensor: str, group: Iterable[Operator]) -> bool:
        """Return whether a tensor that `group` writes is needed outside of it.

        That is so if others read it, or if it is a result of the graph.
        """
        inside = {op.name for op in group}
        users = [op.name for op in self.operators if tensor in op.reads]
        return not users or any(user not in inside for user in users)

    def alone(self, op: Operator) -> Cost:
        """An operator's FLOPs and bytes by itself, each tensor once."""
        return Cost(op.flops, sum(self.sizes[t] for t in {*op.reads, *op.writes}))

    def unfused(self) -> Cost:
        """All operators one by one."""
        return sum(map(self.alone, self.operators), Cost(0, 0))

    def fused(self, group: Sequence[Operator] | None = None) -> Cost:
        """Operators (all by default) as one kernel: what enters and what leaves, once each."""
        group = self.operators if group is None else group
        written = {tensor for op in group for tensor in op.writes}
        entering = {tensor for op in group for tensor in op.reads} - written
        leaving = {tensor for tensor in written if self.leaves(tensor, group)}
        return Cost(sum(op.flops for op in group), sum(self.sizes[t] for t in entering | leaving))

    def speed_up(self, roof: Roofline, group: Sequence[Operator]) -> float:
        """Predicted time of operators unfused over fused, launches left out."""
        return sum(roof.seconds(self.alone(op)) for op in group) / roof.seconds(self.fused(group))


CHIP_SHARE = 0.6
LEAST_SAVING = 1.5


@dataclass(frozen=True)
class Decision:
    """Decision about one operator.

    Args:
        operator: name of the operator.
        action: "start", "fuse", "split" or "leave".
        reason: reason, in words.
    """

    operator: str
    action: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The decisions and the groups they lead to, one kernel each."""

    decisions: tuple[Decision, ...]
    groups: tuple[tuple[Operator, ...], ...]


def chip_bytes(spec: GPUSpec) -> int:
    """Return the bytes that one row may occupy: CHIP_SHARE of an SM's registers or shared memory.

    The smaller of the two counts.
    """
    return int(CHIP_SHARE * min(spec.registers_per_sm * 4, spec.shared_memory_per_sm))


def advise(graph: Graph, spec: GPUSpec, dtype: str = "bf16") -> Plan:
    """Walk over the graph and decide for every operator."""
    roof = roofline(spec, dtype)
    decisions = []
    groups = []
    for index, op in enumerate(graph.operators):
        behind = graph.operators[index:]
        decision = (
            _decide(graph, groups[-1], behind, roof, spec)
            if groups
            else Decision(op.name, "start", "the first")
        )
        decisions.append(decision)
        if decision.action != "fuse":
            groups.append([])
        groups[-1].append(op)
    return Plan(tuple(decisions), tuple(tuple(group) for group in groups))


def _chain(operators: Sequence[Operator]) -> list[Operator]:
    """Return the first operator, and those after it that Inductor merges with it.

    They are neither matmuls nor a library's, and read a tensor that the chain writes.
    """
    chain = [operators[0]]
    for op in operators[1:]:
        if op.pattern not in (POINTWISE, ROWS) or not {
            t for each in chain for t in each.writes
        } & set(op.reads):
            break
        chain.append(op)
    return chain


def _decide(
    graph: Graph, group: list[Operator], behind: Sequence[Operator], roof: Roofline, spec: GPUSpec
) -> Decision:
    op = behind[0]
    written = {tensor for member in group for tensor in member.writes}
    shared = written & set(op.reads)
    if not shared:
        return Decision(op.name, "split", "reads nothing that the group before it writes")
    patterns = {member.pattern for member in group}
    if op.pattern == OPAQUE or OPAQUE in patterns:
        return Decision(op.name, "split", "a library's kernel takes no neighbours")
    epilogue = MATMUL in patterns and op.pattern == POINTWISE
    if not epilogue and roof.bound(graph.alone(op)) == "compute":
        intensity = (
            f"{graph.alone(op).intensity:.0f} FLOPs per byte, the ridge is at {roof.ridge:.0f}"
        )
        return Decision(
            op.name, "split", f"compute-bound: {intensity}; bytes are not what it waits for"
        )
    if op.pattern == MATMUL or (MATMUL in patterns and not epilogue):
        return Decision(
            op.name, "split", "another parallel pattern: a matmul's tiles do not hold whole rows"
        )
    together = [*group, op]
    need = sum(member.row_bytes for member in together if member.pattern == ROWS)
    if need > chip_bytes(spec):
        return Decision(
            op.name,
            "split",
            f"rows of {need:,} bytes exceed {CHIP_SHARE} of an SM ({chip_bytes(spec):,})",
        )
    saving = graph.speed_up(roof, together)
    kept = sorted(t for t in shared if graph.leaves(t, together))
    note = f"; {', '.join(kept)} is used elsewhere and is written all the same" if kept else ""
    chain = _chain(behind)
    if not epilogue and len(chain) > 1 and saving < LEAST_SAVING:
        saving = graph.speed_up(roof, [*group, *chain])
        note += f"; with {', '.join(each.name for each in chain[1:])}, which follows"
    if epilogue and graph.speed_up(roof, chain) >= max(saving, LEAST_SAVING):
        return Decision(
            op.name,
            "leave",
            f"saves {graph.speed_up(roof, chain):.2f} × with {chain[1].name}, which "
            f"follows, and {saving:.2f} × as an epilogue",
        )
    what = "as an epilogue" if epilogue else "memory-bound, same pattern:"
    if saving < LEAST_SAVING:
        return Decision(
            op.name, "leave", f"{what} saves {saving:.2f} ×, less than {LEAST_SAVING}{note}"
        )
    return Decision(op.name, "fuse", f"{what} saves {saving:.2f} ×{note}")


def transformer_block(
    batch: int,
    context: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    itemsize: int = 2,
    autocast: bool = False,
) -> Graph:
    """The forward of one pre-norm block with SwiGLU, as this lab's model runs it.

    Args:
        batch, context: sequences, and tokens in each.
        itemsize: bytes per element of the computation.
        autocast: parameters, the residual stream and norms are fp32: each matrix is cast, and each
            norm's result.

    Raises:
        ValueError: a size below one, or heads that do not divide d_model.
    """
    at_least_one(batch=batch, context=context, d_model=d_model, d_ff=d_ff, num_heads=num_heads)
    if d_model % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide d_model={d_model}")
    tokens, d, f = batch * context, d_model, d_ff
    stored = 4 if autocast else itemsize
    wide, inner, stream = tokens * d * itemsize, tokens * f * itemsize, tokens * d * stored
    weights = {"w_qkv": 3 * d * d, "w_o": d * d, "w1": d * f, "w3": d * f, "w2": d * f}
    tensors = dict.fromkeys(("n1", "n2", "a", "o", "m"), wide) | dict.fromkeys(
        ("x", "x2", "y"), stream
    )
    tensors |= dict.fromkeys(("gate", "up", "act", "h"), inner) | {"qkv": 3 * wide, "qk": 2 * wide}
    tensors |= {name: count * itemsize for name, count in weights.items()} | {
        "g1": d * stored,
        "g2": d * stored,
    }
    casts = ()
    if autocast:
        tensors |= {f"{name} fp32": count * 4 for name, count in weights.items()}
        tensors |= {"n1 fp32": stream, "n2 fp32": stream}
        casts = tuple(Operator(f"cast_{name}", (f"{name} fp32",), (name,)) for name in weights)

    def matmul(name: str, x: str, w: str, y: str, depth: int, cols: int) -> Operator:
        return Operator(name, (x, w), (y,), 2 * tokens * depth * cols, MATMUL)

    def norm(number: str, x: str) -> tuple[Operator, ...]:
        result = f"n{number} fp32" if autocast else f"n{number}"
        alone = Operator(f"norm{number}", (x, f"g{number}"), (result,), 4 * tokens * d, ROWS, 4 * d)
        return (
            (alone, Operator(f"cast{number}", (result,), (f"n{number}",))) if autocast else (alone,)
        )

    return Graph(
        (
            *casts,
            *norm("1", "x"),
            matmul("qkv_matmul", "n1", "w_qkv", "qkv", d, 3 * d),
            Operator(
                "rope",
                ("qkv",),
                ("qk",),
                6 * tokens * d,
                POINTWISE,
                eager_kernels=4 + (itemsize < 4),
            ),
            Operator("attention", ("qk", "qkv"), ("a",), 2 * tokens * context * d, OPAQUE),
            matmul("out_matmul", "a", "w_o", "o", d, d),
            Operator("add1", ("x", "o"), ("x2",), tokens * d),
            *norm("2", "x2"),
            matmul("gate_matmul", "n2", "w1", "gate", d, f),
            matmul("up_matmul", "n2", "w3", "up", d, f),
            Operator("silu", ("gate",), ("act",), 5 * tokens * f),
            Operator("multiply", ("act", "up"), ("h",), tokens * f),
            matmul("down_matmul", "h", "w2", "m", f, d),
            Operator("add2", ("x2", "m"), ("y",), tokens * d),
        ),
        tensors,
    )


# one kernel of this lab
OURS = (("norm1", "cast1"), ("add1", "norm2"), ("norm2", "cast2"), ("silu", "multiply"))


def kernel_counts(graph: Graph, spec: GPUSpec, dtype: str = "bf16") -> dict[str, int]:
    """Count the launches of a `transformer_block` in four forms.

    They are eager; compiled, where every operator but library calls is merged with the ones it
    reads along the order, as Inductor does; with `--ops triton`, whose kernels are in OURS; and by
    the advice.
    """
    rest, compiled = graph.operators, 0
    while rest:
        rest, compiled = (
            rest[len(_chain(rest)) if rest[0].pattern in (POINTWISE, ROWS) else 1 :],
            compiled + 1,
        )
    names = [op.name for op in graph.operators]
    return {
        "eager": sum(op.eager_kernels for op in graph.operators),
        "compiled": compiled,
        "ours": len(names) - sum(pair in OURS for pair in itertools.pairwise(names)),
        "advised": len(advise(graph, spec, dtype).groups),
    }
