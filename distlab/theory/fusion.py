"""Should two operators be one kernel? The decision, step by step, over a chain or a block.

The bytes come first. Unfused, every operator reads its inputs from device memory and writes its
outputs to it. Fused, a value that only the chain uses stays in registers: what remains are the
tensors that come from outside, once each, and those that leave. The roofline (`distlab.theory.gpu`)
turns FLOPs and bytes into seconds, and their ratio is the predicted speed-up.

`advise` then asks these questions about each operator and the group before it, in this order:

1. *Memory-bound?* A matmul waits for arithmetic, so it gains nothing if a neighbour saves it bytes.
   An element-wise operation behind a matmul may join it as its epilogue, because then the neighbour
   is what is saved. It joins if 4 holds, and if it would not save more together with the operators
   after it (a residual addition with the norm behind it).
2. *Same parallel pattern?* Programs that own elements and programs that own rows go together (rows
   decide). Two matmuls, or a matmul and a whole row, do not.
3. *Does it fit?* What the fused kernel keeps on the chip must stay within 0.6 of an SM's shared
   memory and registers. Otherwise too few warps are left to hide latency, and values spill.
4. *Is it worth it?* The group, with what can join it next, must take at least 1.5 times as long one
   by one as in one kernel. Where all of it waits for memory, that is 1.5 times the bytes. An
   epilogue is a small part of a compute-bound matmul's time.
5. *Is an intermediate used elsewhere?* Then it is written all the same, which counts in 4.

The answers: "fuse" with the group before. "split": a new group begins here, because the two cannot
be one. "leave": they could be one, but it would not pay.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distlab.hardware import GPUSpec
from distlab.theory.checks import at_least_one
from distlab.theory.gpu import Roofline, roofline
from kernels.cost import Cost

# Patterns of an operator, see `Operator`.
POINTWISE = "pointwise"
ROWS = "rows"
MATMUL = "matmul"
OPAQUE = "opaque"
# Rules of thumb.
CHIP_SHARE = 0.6  # share of an SM's registers and shared memory that a fused kernel may use
LEAST_SAVING = 1.5  # speed-up from which a fusion is worth it


@dataclass(frozen=True)
class Operator:
    """One node of a graph.

    Args:
        name: name of the operation, unique in its graph.
        reads: names of the tensors that it reads.
        writes: names of the tensors that it writes.
        flops: number of its FLOPs.
        pattern: division of the work among programs: POINTWISE (each element alone), ROWS (whole
            rows, such as a norm), MATMUL (tiles of a matmul), OPAQUE (a library's kernel, for
            example attention, that takes no neighbour).
        row_bytes: bytes of one row in fp32, which has to stay on the chip, for ROWS.
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
        # `leaves` and OURS find operators by their names.
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

        That is so if other operators read it, or if it is a result of the graph.

        Args:
            tensor: name of the tensor.
            group: operators, one of which writes the tensor.
        """
        inside = {op.name for op in group}
        readers = [op.name for op in self.operators if tensor in op.reads]
        # No operator reads it: it is a result of the graph.
        if not readers:
            return True
        return any(reader not in inside for reader in readers)

    def alone(self, op: Operator) -> Cost:
        """Return an operator's FLOPs and bytes by itself, each tensor once."""
        tensors = {*op.reads, *op.writes}
        return Cost(op.flops, self._bytes(tensors))

    def unfused(self) -> Cost:
        """Return the FLOPs and bytes of all operators one by one."""
        total = Cost(0, 0)
        for op in self.operators:
            total += self.alone(op)
        return total

    def fused(self, group: Sequence[Operator] | None = None) -> Cost:
        """Return the FLOPs and bytes of operators as one kernel.

        Every tensor that enters and every tensor that leaves counts once.

        Args:
            group: operators of the kernel. None: all.
        """
        if group is None:
            group = self.operators
        written = _written_by(group)
        entering = set()
        for op in group:
            entering.update(op.reads)
        # What an operator of the group writes need not come from memory.
        entering -= written
        leaving = {tensor for tensor in written if self.leaves(tensor, group)}
        flops = sum(op.flops for op in group)
        return Cost(flops, self._bytes(entering | leaving))

    def speed_up(self, roof: Roofline, group: Sequence[Operator]) -> float:
        """Return the predicted time of operators one by one over fused, launches left out.

        Args:
            roof: peak and bandwidth of the GPU.
            group: operators to fuse.
        """
        one_by_one_s = sum(roof.seconds(self.alone(op)) for op in group)
        fused_s = roof.seconds(self.fused(group))
        return one_by_one_s / fused_s

    def _bytes(self, tensors: Iterable[str]) -> int:
        """Return the bytes of tensors."""
        return sum(self.sizes[tensor] for tensor in tensors)


def _written_by(group: Iterable[Operator]) -> set[str]:
    """Return the names of all tensors that some operators write."""
    written = set()
    for op in group:
        written.update(op.writes)
    return written


@dataclass(frozen=True)
class Decision:
    """Decision about one operator.

    Args:
        operator: name of the operator.
        action: "start" for the first operator, "fuse", "split" or "leave".
        reason: reason, in words.
    """

    operator: str
    action: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Decisions over a graph, and the kernels that they lead to.

    Args:
        decisions: decision about each operator, in order.
        groups: operators of each kernel, in order.
    """

    decisions: tuple[Decision, ...]
    groups: tuple[tuple[Operator, ...], ...]


def advise(graph: Graph, spec: GPUSpec, dtype: str = "bf16") -> Plan:
    """Return the decision about every operator of a graph, and the kernels that follow.

    Args:
        graph: operators and sizes of their tensors.
        spec: GPU that runs them.
        dtype: dtype of the matmuls, for the peak.

    Raises:
        ValueError: the GPU has no peak for that dtype.
    """
    roof = roofline(spec, dtype)
    decisions = []
    groups = []
    for index, op in enumerate(graph.operators):
        if groups:
            decision = _decide(graph, groups[-1], graph.operators[index:], roof, spec)
        else:
            decision = Decision(op.name, "start", "the first")
        decisions.append(decision)
        # "start", "split" and "leave" begin a new kernel.
        if decision.action != "fuse":
            groups.append([])
        groups[-1].append(op)
    return Plan(tuple(decisions), tuple(tuple(group) for group in groups))


def _decide(
    graph: Graph, group: list[Operator], behind: Sequence[Operator], roof: Roofline, spec: GPUSpec
) -> Decision:
    """Decide about one operator.

    Args:
        graph: operators and sizes of their tensors.
        group: operators of the kernel before it.
        behind: the operator, and all after it.
        roof: peak and bandwidth of the GPU.
        spec: datasheet of the GPU.
    """
    op = behind[0]
    obstacle = _obstacle(graph, group, op, roof, spec)
    if obstacle is not None:
        return Decision(op.name, "split", obstacle)
    together = [*group, op]
    saving = graph.speed_up(roof, together)
    note = ""
    shared = _written_by(group) & set(op.reads)
    written_all_the_same = sorted(tensor for tensor in shared if graph.leaves(tensor, together))
    if written_all_the_same:
        names = ", ".join(written_all_the_same)
        note += f"; {names} is used elsewhere and is written all the same"
    # What Inductor would merge behind the matmul if this operator did not join the matmul.
    chain = _chain(behind)
    if _is_epilogue(group, op):
        saving_of_chain = graph.speed_up(roof, chain)
        # Joining the matmul would break up a chain that saves more without it.
        if saving_of_chain >= max(saving, LEAST_SAVING):
            reason = (
                f"saves {saving_of_chain:.2f} × with {chain[1].name}, which "
                f"follows, and {saving:.2f} × as an epilogue"
            )
            return Decision(op.name, "leave", reason)
        kind = "as an epilogue"
    else:
        if len(chain) > 1 and saving < LEAST_SAVING:
            # What joins next may make it worth it.
            saving = graph.speed_up(roof, [*group, *chain])
            note += f"; with {', '.join(each.name for each in chain[1:])}, which follows"
        kind = "memory-bound, same pattern:"
    if saving < LEAST_SAVING:
        reason = f"{kind} saves {saving:.2f} ×, less than {LEAST_SAVING}{note}"
        return Decision(op.name, "leave", reason)
    return Decision(op.name, "fuse", f"{kind} saves {saving:.2f} ×{note}")


def _obstacle(
    graph: Graph, group: list[Operator], op: Operator, roof: Roofline, spec: GPUSpec
) -> str | None:
    """Return the reason why an operator cannot join the group before it, or None.

    Args:
        graph: operators and sizes of their tensors.
        group: operators of the kernel before it.
        op: operator that may join.
        roof: peak and bandwidth of the GPU.
        spec: datasheet of the GPU.
    """
    if not _written_by(group) & set(op.reads):
        return "reads nothing that the group before it writes"
    patterns = {member.pattern for member in group}
    if op.pattern == OPAQUE or OPAQUE in patterns:
        return "a library's kernel takes no neighbours"
    is_epilogue = _is_epilogue(group, op)
    cost = graph.alone(op)
    if not is_epilogue and roof.bound(cost) == "compute":
        return (
            f"compute-bound: {cost.intensity:.0f} FLOPs per byte, the ridge is at "
            f"{roof.ridge:.0f}; bytes are not what it waits for"
        )
    if op.pattern == MATMUL or (MATMUL in patterns and not is_epilogue):
        return "another parallel pattern: a matmul's tiles do not hold whole rows"
    rows = [member for member in (*group, op) if member.pattern == ROWS]
    # A program holds a row for each of the row operations in one kernel.
    row_bytes = sum(member.row_bytes for member in rows)
    limit = chip_bytes(spec)
    if row_bytes > limit:
        return f"rows of {row_bytes:,} bytes exceed {CHIP_SHARE} of an SM ({limit:,})"
    return None


def _is_epilogue(group: list[Operator], op: Operator) -> bool:
    """Return whether an operator is element-wise and the group before it has a matmul."""
    return op.pattern == POINTWISE and any(member.pattern == MATMUL for member in group)


def _chain(operators: Sequence[Operator]) -> list[Operator]:
    """Return the first operator, and those after it that Inductor merges with it.

    They are neither matmuls nor a library's, and read a tensor that the chain writes.
    """
    chain = [operators[0]]
    for op in operators[1:]:
        reads_of_chain = _written_by(chain) & set(op.reads)
        if op.pattern not in (POINTWISE, ROWS) or not reads_of_chain:
            break
        chain.append(op)
    return chain


def chip_bytes(spec: GPUSpec) -> int:
    """Return the bytes that one row may occupy: CHIP_SHARE of an SM's registers or shared memory.

    The smaller of the two counts. A register has 4 bytes.
    """
    return int(CHIP_SHARE * min(spec.registers_per_sm * 4, spec.shared_memory_per_sm))


# -- one block of this lab's model -----------------------------------------------------------------

# Neighbouring operators that one kernel of this lab runs, with `--ops triton`.
OURS = (("norm1", "cast1"), ("add1", "norm2"), ("norm2", "cast2"), ("silu", "multiply"))


def transformer_block(
    batch: int,
    context: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    itemsize: int = 2,
    autocast: bool = False,
) -> Graph:
    """Return the forward of one pre-norm block with SwiGLU, as this lab's model runs it.

    Args:
        batch: number of sequences.
        context: number of tokens in each sequence.
        d_model: width of the residual stream, d.
        d_ff: inner width of the feed-forward block, f.
        num_heads: number of heads, which must divide d.
        itemsize: bytes per element of the computation.
        autocast: True if parameters, the residual stream and norms are fp32: each matrix is cast,
            and each norm's result.

    Raises:
        ValueError: a size below one, or heads that do not divide d_model.
    """
    at_least_one(batch=batch, context=context, d_model=d_model, d_ff=d_ff, num_heads=num_heads)
    if d_model % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide d_model={d_model}")
    n, d, f = batch * context, d_model, d_ff
    # Matrix → number of its elements.
    weights = {"w_qkv": 3 * d * d, "w_o": d * d, "w1": d * f, "w3": d * f, "w2": d * f}
    sizes = _block_sizes(n, d, f, weights, itemsize, autocast)

    casts = []
    if autocast:
        for name in weights:
            casts.append(Operator(f"cast_{name}", reads=(f"{name} fp32",), writes=(name,)))
    rope = Operator(
        "rope",
        reads=("qkv",),
        writes=("qk",),
        # Queries and keys, 2·n·d elements: two products with the tables and a sum each.
        flops=6 * n * d,
        eager_kernels=5 if itemsize < 4 else 4,  # the result is cast back
    )
    # Attention is causal, so only half of the scores are computed.
    attention = Operator(
        "attention",
        reads=("qk", "qkv"),
        writes=("a",),
        flops=2 * n * context * d,
        pattern=OPAQUE,
    )
    operators = (
        *casts,
        *_norm("1", "x", n, d, autocast),
        _matmul("qkv_matmul", "n1", "w_qkv", "qkv", n, d, 3 * d),
        rope,
        attention,
        _matmul("out_matmul", "a", "w_o", "o", n, d, d),
        Operator("add1", reads=("x", "o"), writes=("x2",), flops=n * d),
        *_norm("2", "x2", n, d, autocast),
        _matmul("gate_matmul", "n2", "w1", "gate", n, d, f),
        _matmul("up_matmul", "n2", "w3", "up", n, d, f),
        # g/(1 + exp(−g)): negation, exponential, sum, reciprocal, product.
        Operator("silu", reads=("gate",), writes=("act",), flops=5 * n * f),
        Operator("multiply", reads=("act", "up"), writes=("h",), flops=n * f),
        _matmul("down_matmul", "h", "w2", "m", n, f, d),
        Operator("add2", reads=("x2", "m"), writes=("y",), flops=n * d),
    )
    return Graph(operators, sizes)


def _block_sizes(
    n: int, d: int, f: int, weights: Mapping[str, int], itemsize: int, autocast: bool
) -> dict[str, int]:
    """Return the bytes of every tensor of a block.

    Args:
        n: number of tokens.
        d: width of the residual stream.
        f: inner width of the feed-forward block.
        weights: elements of each matrix.
        itemsize: bytes per element of the computation.
        autocast: True if parameters, the residual stream and norms are fp32.
    """
    stored_itemsize = 4 if autocast else itemsize
    # Bytes of a tensor of width d, of width f, and of the residual stream.
    activation = n * d * itemsize
    inner = n * f * itemsize
    stream = n * d * stored_itemsize
    sizes = {
        "n1": activation,
        "n2": activation,
        "a": activation,
        "o": activation,
        "m": activation,
        "x": stream,
        "x2": stream,
        "y": stream,
        "gate": inner,
        "up": inner,
        "act": inner,
        "h": inner,
        "qkv": 3 * activation,
        "qk": 2 * activation,
    }
    for name, elements in weights.items():
        sizes[name] = elements * itemsize
    sizes["g1"] = d * stored_itemsize
    sizes["g2"] = d * stored_itemsize
    if autocast:
        for name, elements in weights.items():
            sizes[f"{name} fp32"] = elements * 4
        sizes["n1 fp32"] = stream
        sizes["n2 fp32"] = stream
    return sizes


def _matmul(
    name: str, x: str, weight: str, result: str, n: int, inputs: int, outputs: int
) -> Operator:
    """Return a matmul of n rows.

    Args:
        name: name of the operator.
        x, weight, result: names of the tensors that it reads and writes.
        n: number of rows.
        inputs: columns of `x`.
        outputs: columns of `result`.
    """
    return Operator(
        name,
        reads=(x, weight),
        writes=(result,),
        flops=2 * n * inputs * outputs,
        pattern=MATMUL,
    )


def _norm(number: str, x: str, n: int, d: int, autocast: bool) -> list[Operator]:
    """Return a norm, and the cast of its result under autocast.

    Args:
        number: number of the norm in its block.
        x: name of the tensor that it reads.
        n: number of rows.
        d: elements of a row.
        autocast: True if the norm's result is fp32.
    """
    result = f"n{number}"
    written = f"{result} fp32" if autocast else result
    norm = Operator(
        f"norm{number}",
        reads=(x, f"g{number}"),
        writes=(written,),
        # Per element: square, sum over the row, scale by its root mean square, and by the weight.
        flops=4 * n * d,
        pattern=ROWS,
        row_bytes=4 * d,
    )
    if not autocast:
        return [norm]
    return [norm, Operator(f"cast{number}", reads=(written,), writes=(result,))]


def kernel_counts(graph: Graph, spec: GPUSpec, dtype: str = "bf16") -> dict[str, int]:
    """Return the number of launches of a `transformer_block` in four forms.

    - `eager`: each operator by itself.
    - `compiled`: every operator but library calls is merged with the ones it reads along the order,
      as Inductor does.
    - `ours`: with `--ops triton`, whose kernels are in OURS.
    - `advised`: the groups of `advise`.

    Args:
        graph: operators of the block.
        spec: GPU that runs them.
        dtype: dtype of the matmuls, for the peak.
    """
    compiled = 0
    rest = graph.operators
    while rest:
        can_merge = rest[0].pattern in (POINTWISE, ROWS)
        # Inductor merges along the order. Matmuls and library calls are launches of their own.
        merged = len(_chain(rest)) if can_merge else 1
        rest = rest[merged:]
        compiled += 1
    names = [op.name for op in graph.operators]
    ours = len(names)
    for pair in itertools.pairwise(names):
        # Two operators in one kernel are one launch fewer.
        if pair in OURS:
            ours -= 1
    return {
        "eager": sum(op.eager_kernels for op in graph.operators),
        "compiled": compiled,
        "ours": ours,
        "advised": len(advise(graph, spec, dtype).groups),
    }
