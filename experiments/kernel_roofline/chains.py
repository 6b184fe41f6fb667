"""Chains of operations as one kernel: traffic one by one and fused, predicted and measured.

A chain is a list of names of STEPS, applied one after the other to x (N, D). It is run one by one
in x's own dtype (`builtin`), one by one as the naive forms write it, widened to fp32 (`naive`),
through torch.compile, and by `chain_kernel` where that has such a form.

Nothing is timed here: chains are rows as in `cases`. The traffic one by one and fused is that of
`distlab.theory.fusion`. Next: the kernel is in `chain_kernel`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.experiment import Column, Record, View
from distlab.hardware import H100_SXM, lookup
from distlab.report import (
    FASTER,
    SLOWER,
    grouped,
    is_number,
    prediction_error,
    ratio_metrics,
    verdict_of,
    why_unclear,
    with_interval,
)
from distlab.theory.fusion import POINTWISE, ROWS, Graph, Operator, advise
from kernels import reference

from .cases import Case, Function, Normal, Operation, Shape
from .prediction import naive_bytes
from .tables import headline

# A power of two rounds nothing, in any dtype.
SCALE = 0.125  # factor of the step `scale`


class Step(NamedTuple):
    """A step of a chain, `one(x, *operands)`.

    Args:
        takes: one letter per operand in addition to x: `x` for one of x's shape, `v` for a vector
            of a row's length.
        one: function that calls torch's operator, in x's dtype.
        naive: function in fp32, one launch per line.
        pattern: name of its pattern in the advisor.
        flops: FLOPs per element.
    """

    takes: str
    one: Function
    naive: Function
    pattern: str = POINTWISE
    flops: int = 1


def _plain(takes: str, one: Function) -> Step:
    """Return a step whose naive form is its operator between two casts."""

    def naive(x: Tensor, *operands: Tensor) -> Tensor:
        # All operands are widened, since an operator of mixed dtypes would widen them itself.
        wide_operands = [reference.wide(operand) for operand in operands]
        return one(reference.wide(x), *wide_operands).to(x.dtype)

    return Step(takes=takes, one=one, naive=naive)


def _scale(x: Tensor) -> Tensor:
    return x * SCALE


def _plus_one(x: Tensor) -> Tensor:
    return x + 1


def _normalize(x: Tensor) -> Tensor:
    row_sums = x.sum(-1, keepdim=True)
    # The sum of a row is a number per row, which is broadcast back over it.
    return x / row_sums


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


STEPS = {
    "add": _plain("x", torch.add),
    "multiply": _plain("x", torch.mul),
    "scale": _plain("", _scale),
    "bias": _plain("v", torch.add),
    "relu": _plain("", torch.relu),
    "exp": _plain("", torch.exp),
    "plus_one": _plain("", _plus_one),
    "silu": Step(takes="", one=F.silu, naive=reference.silu, flops=4),
    "gelu": Step(takes="", one=partial(F.gelu, approximate="tanh"), naive=reference.gelu, flops=8),
    "rms_norm": Step(takes="v", one=_rms_norm, naive=reference.rms_norm, pattern=ROWS, flops=4),
    "layer_norm": Step(
        takes="vv", one=_layer_norm, naive=reference.layer_norm, pattern=ROWS, flops=7
    ),
    "softmax": Step(
        takes="", one=partial(F.softmax, dim=-1), naive=reference.softmax, pattern=ROWS, flops=5
    ),
    # x over the sum of its row. torch has no single operator for it, so it takes two launches.
    "normalize": _plain("", _normalize)._replace(pattern=ROWS),
}
Chain = tuple[str, ...]
CHAINS: tuple[Chain, ...] = (
    # Chains that are one kernel here.
    ("add", "rms_norm", "silu"),
    ("add", "layer_norm"),
    ("softmax", "scale", "bias"),
    ("exp", "plus_one", "normalize"),
    # Better left to Inductor, which makes one kernel of them that moves the least bytes:
    ("bias", "gelu"),
    ("scale", "bias", "relu"),
    ("gelu", "multiply"),
    ("bias", "silu", "multiply", "add"),
)


def applied(chain: Chain, naive: bool) -> Function:
    """Return the chain one by one.

    Args:
        chain: names of its steps.
        naive: True for the naive form of each step, in fp32. False for torch's operators in x's
            dtype.
    """

    def run(x: Tensor, *operands: Tensor) -> Tensor:
        # Operands come in the order of the steps that take them.
        used = 0
        for name in chain:
            step = STEPS[name]
            own = operands[used : used + len(step.takes)]
            used += len(own)
            x = step.naive(x, *own) if naive else step.one(x, *own)
        return x

    return run


def in_one_kernel(chain: Chain) -> Function | None:
    """Return the chain by `chain_kernel`. None if the kernel does not have its form.

    The form is [add] → [exp] → [plus_one] → a row operation → [scale] → [bias] → [silu].
    """
    # The kernel holds whole rows once, and has one row operation. Two of them, or none, are not its
    # form.
    rows = [name for name in chain if STEPS[name].pattern == ROWS]
    if len(rows) != 1:
        return None
    kind = rows[0]
    form = ("add", "exp", "plus_one", kind, "scale", "bias", "silu")
    in_the_kernels_order = [name for name in form if name in chain]
    # The kernel applies its steps in one fixed order, so another order is not its form.
    if list(chain) != in_the_kernels_order:
        return None

    def run(x: Tensor, *operands: Tensor) -> Tensor:
        # Imported here, because importing them decides how kernels run.
        from kernels._dispatch import runs_triton

        # Without a GPU and an interpreter, the naive form keeps the row's results comparable.
        if not runs_triton(x):
            return applied(chain, naive=True)(x, *operands)
        from .chain_kernel import launch

        # Operands come in the order of the chain, which is the order of the form: residual, then
        # weight and bias of the norm, then the step `bias`.
        left = list(operands)
        vectors = len(STEPS[kind].takes)  # none, a weight, or a weight and a bias
        residual = left.pop(0) if "add" in chain else None
        w = left.pop(0) if vectors >= 1 else None
        b = left.pop(0) if vectors >= 2 else None
        bias = left.pop(0) if "bias" in chain else None
        return launch(
            x,
            residual=residual,
            exp="exp" in chain,
            plus_one="plus_one" in chain,
            kind=kind,
            w=w,
            b=b,
            scale=SCALE if "scale" in chain else 1.0,
            bias=bias,
            silu="silu" in chain,
        )

    return run


def chain_graph(chain: Sequence[str], shape: Sequence[int], itemsize: int) -> Graph:
    """Return the chain as the advisor takes it: x0 → step 0 → x1 → step 1 → x2.

    Args:
        chain: names of its steps.
        shape: (N, D) of x.
        itemsize: bytes of an element of all tensors.
    """
    rows, width = shape
    count = rows * width
    sizes = {"x0": count * itemsize}
    operators = []
    for number, name in enumerate(chain):
        step = STEPS[name]
        before, after = f"x{number}", f"x{number + 1}"
        operands = []
        for position, kind in enumerate(step.takes):
            operand = f"{name}{number}.{position}"
            operands.append(operand)
            # A vector is read once by each row, but its bytes count once: it stays in the cache.
            sizes[operand] = (count if kind == "x" else width) * itemsize
        sizes[after] = count * itemsize
        pattern = step.pattern
        if name == "normalize":
            # The sum of each row is a kernel of its own, and the division reads the tensor again.
            sums = f"sums{number}"
            sizes[sums] = rows * itemsize
            operators.append(
                Operator(
                    name=f"sum {number}",
                    reads=(before,),
                    writes=(sums,),
                    flops=count,
                    pattern=ROWS,
                    # 4 bytes per element: the row is held in fp32.
                    row_bytes=4 * width,
                )
            )
            operands.append(sums)
            name, pattern = "divide", POINTWISE
        # A row operation holds a whole row, in fp32.
        held_bytes = 4 * width if pattern == ROWS else 0
        operators.append(
            Operator(
                name=f"{name} {number}",
                reads=(before, *operands),
                writes=(after,),
                flops=step.flops * count,
                pattern=pattern,
                row_bytes=held_bytes,
            )
        )
    return Graph(tuple(operators), sizes)


def chain_case(chain: Chain) -> Case:
    """Return the chain as a row of the table, forward."""
    return Case(
        make=partial(chain_operation, chain),
        shape=(8192, 4096),
        tiny=(16, 4096),
        chain=chain,
    )


def chain_operation(chain: Chain, shape: Shape, dtype: torch.dtype) -> Operation:
    """Return the chain over x (N, D) as an operation."""
    width = shape[-1]
    inputs = [Normal(shape)]
    for name in chain:
        for kind in STEPS[name].takes:
            if kind == "x":
                inputs.append(Normal(shape))
            else:
                # Weights are near 1, as norms have them.
                inputs.append(Normal((width,), mean=1.0, deviation=0.1))
    return Operation(
        inputs=inputs,
        ours=in_one_kernel(chain),
        naive=applied(chain, naive=True),
        builtin=applied(chain, naive=False),
        # The least bytes: what enters and leaves the chain, with nothing stored between its steps.
        forward_cost=chain_graph(chain, shape, dtype.itemsize).fused(),
    )


FORMS = {
    "builtin": "one by one",
    "naive": "one by one, in fp32",
    "compile": "fused by Inductor",
    "ours": "fused, ours",
}


def accounting(
    case: Case, rows: dict[str, Record], limits: dict[str, float]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the traffic table of a chain: a row per step, then a row per form with its times.

    Args:
        case: the chain with its shape and dtype.
        rows: variant → its record.
        limits: rates of this run, see `device_times.ceilings`.
    """
    graph = chain_graph(case.chain, case.shape, getattr(torch, case.dtype).itemsize)
    steps = _step_rows(graph, limits)
    # Operators one by one run one after the other, so their times add up.
    one_by_one_ms = sum(metrics["predicted_time_p50_ms"] for _, metrics in steps)
    return steps + _form_rows(case, graph, one_by_one_ms, rows, limits)


def _step_rows(graph: Graph, limits: dict[str, float]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and metrics of each operator by itself."""
    found = []
    for operator in graph.operators:
        name = operator.name.rpartition(" ")[0]  # "add 0" is the first operator of its chain
        read = sum(graph.sizes[tensor] for tensor in operator.reads)
        written = sum(graph.sizes[tensor] for tensor in operator.writes)
        has_smaller_operand = any(
            graph.sizes[tensor] < graph.sizes["x0"] for tensor in operator.reads
        )
        # The rate of the copy kernel holds only for operators whose tensors all have x's shape.
        if name == "sum":
            rate = limits["reduce_gb_per_s"]
        elif operator.pattern == ROWS:
            rate = limits["rows_gb_per_s"]
        elif has_smaller_operand:
            rate = limits["broadcast_gb_per_s"]
        else:
            rate = limits["copy_gb_per_s"]
        metrics = {
            "read_bytes": read,
            "written_bytes": written,
            "bytes": read + written,
            "predicted_time_p50_ms": (read + written) / rate / 1e6,
        }
        found.append((name, metrics))
    return found


def _form_rows(
    case: Case,
    graph: Graph,
    one_by_one_ms: float,
    rows: dict[str, Record],
    limits: dict[str, float],
) -> list[tuple[str, dict[str, Any]]]:
    """Return label and metrics of each form of the whole chain.

    A form that was not measured has no row, except the chain one by one.
    """
    # A chain without a naive form has no traffic of one.
    widened = naive_bytes(case, "fwd") or {}
    # Each operation of the naive form at the rate of its kind of traffic. bytes / (GB/s) / 1e6 =
    # ms.
    widened_ms = 0.0
    for kind, count in widened.items():
        widened_ms += count / limits[f"{kind}_gb_per_s"]
    fused_bytes = graph.fused().bytes
    fused_ms = fused_bytes / limits["copy_gb_per_s"] / 1e6
    moved = {
        "builtin": graph.unfused().bytes,
        "naive": sum(widened.values()),
        "compile": fused_bytes,
        "ours": fused_bytes,
    }
    without_launch_ms = {
        "builtin": one_by_one_ms,
        "naive": widened_ms / 1e6,
        "compile": fused_ms,
        "ours": fused_ms,
    }
    # Every form pays for at least one launch, which the bandwidth does not include.
    predicted_ms = {
        variant: ms + limits["empty_kernel_ms"] for variant, ms in without_launch_ms.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for variant, label in FORMS.items():
        # The chain one by one has a prediction in any case, also where it was not timed.
        if variant not in rows and variant != "builtin":
            continue
        measured = rows[variant].metrics if variant in rows else {}
        metrics = {
            "bytes": moved[variant],
            "time_p50_ms": measured.get("time_p50_ms"),
            "predicted_time_p50_ms": predicted_ms[variant],
        }
        if variant in ("compile", "ours"):
            for baseline in ("builtin", "naive"):
                # The interval of the ratio is kept as well, because a verdict needs both ends.
                for end in ("", "_low", "_high"):
                    metrics[f"over_{baseline}{end}"] = measured.get(f"over_{baseline}{end}")
                ratio = predicted_ms[variant] / predicted_ms[baseline]
                metrics[f"predicted_over_{baseline}"] = ratio
        found[label] = metrics
    if "ours" in rows and "compile" in rows:
        ratio = ratio_metrics("over_inductor", rows["ours"], rows["compile"], "time")
        found[FORMS["ours"]].update(ratio)
    return list(found.items())


def accounts(records: Sequence[Record]) -> list[Record]:
    """Return the traffic tables of the chains among the rows of a run, or of several."""
    # A run may also have rows of single operations.
    of_chains = [record for record in records if record.config.get("chain")]
    found = []
    for mine in grouped(of_chains, _label).values():
        # Every row has the ceilings of its process. Records of older versions lack those of rows.
        with_ceilings = [record.metrics for record in mine if "rows_gb_per_s" in record.metrics]
        if not with_ceilings:
            continue
        first = mine[0]
        chain, shape = tuple(first.config["chain"]), tuple(first.config["shape"])
        case = replace(chain_case(chain), shape=shape, dtype=first.config["dtype"])
        by_variant = {record.variant: record for record in mine}
        for name, metrics in accounting(case, by_variant, with_ceilings[0]):
            found.append(
                Record(
                    experiment=TRAFFIC.name,
                    variant=name,
                    config=first.config,
                    metrics=metrics,
                    environment=first.environment,
                    commit=first.commit,
                )
            )
    return found


def _label(record: Record) -> str:
    return record.config["label"]


def advice(records: Sequence[Record]) -> list[str]:
    """Return the advisor's fusion of each chain, and whether the measurement shows that it pays."""
    lines = []
    # A chain may have rows of several shapes, and each shape has a label of its own.
    for label, rows in grouped(records, _label).items():
        first = rows[0]
        itemsize = getattr(torch, first.config["dtype"]).itemsize
        graph = chain_graph(first.config["chain"], first.config["shape"], itemsize)
        # The advisor needs the sizes of some GPU. A record of a CPU, or of a GPU without a
        # datasheet here, gets the plan for an H100.
        gpu = lookup(first.environment.get("device_name") or "") or H100_SXM
        groups = []
        for operators in advise(graph, gpu).groups:
            # "add 0" is the name of the first step in the graph.
            names = [operator.name.rpartition(" ")[0] for operator in operators]
            groups.append(" + ".join(names))
        plan = f"the advisor makes {len(groups)} kernel(s) of it, {' | '.join(groups)}"
        lines.append(f"{label}: {plan}{_verdict(rows)}")
    return lines


def _verdict(rows: Sequence[Record]) -> str:
    """Return whether our own kernel pays compared with Inductor's, to end a sentence.

    Empty without Inductor's.

    Args:
        rows: table of traffic of a chain.
    """
    forms = {record.variant: record for record in rows}
    ours = forms.get(FORMS["ours"])
    inductor = forms.get(FORMS["compile"])
    # Inductor is the alternative to a kernel of one's own, so without its time there is no verdict.
    if inductor is None or not inductor.metrics.get("time_p50_ms"):
        return ""
    if ours is None:
        return _compared(
            inductor,
            ratio="over_builtin",
            what="there is no kernel of ours, and Inductor's time over one by one",
            if_faster="the fusion pays",
            if_slower="the fusion does not pay",
        )
    return _compared(
        ours,
        ratio="over_inductor",
        what="our time over Inductor's",
        if_faster="a kernel of one's own pays",
        if_slower="leave it to Inductor",
    )


def _compared(record: Record, ratio: str, what: str, if_faster: str, if_slower: str) -> str:
    """Return a ratio with its interval and the conclusion, to end a sentence.

    Empty without the ratio.
    """
    if not is_number(record.metrics.get(ratio)):
        return ""
    verdict = verdict_of(record, ratio)
    if verdict == FASTER:
        conclusion = if_faster
    elif verdict == SLOWER:
        conclusion = if_slower
    else:
        why = why_unclear([record], ratio).removesuffix(".")
        conclusion = f"this run cannot tell whether that pays. {why}"
    return f"; {what} is {with_interval(record, ratio)}: {conclusion}"


def _mb(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ",.1f", scale=1e-6, missing="")


def _us(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ",.1f", scale=1000, missing="")


def _ratio(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ".3f", missing="")


TRAFFIC = View(
    name="kernel_chains",
    question="What does a chain of operations move one by one and fused, and what does the fusion "
    "bring?",
    columns=[
        Column("config.label", "chain", align="left"),
        Column("variant", "operation or form", align="left"),
        _mb("read_bytes", "read MB"),
        _mb("written_bytes", "written MB"),
        _mb("bytes", "moved MB"),
        _us("time_p50_ms", "time µs"),
        _us("predicted_time_p50_ms", "predicted µs"),
        prediction_error("predicted_time_p50_ms", "time_p50_ms"),
        _ratio("over_builtin", "÷ same dtype"),
        _ratio("predicted_over_builtin", "predicted ÷ same dtype"),
        prediction_error("predicted_over_builtin", "over_builtin", "off % of the ratio"),
        _ratio("over_naive", "÷ fp32"),
        _ratio("predicted_over_naive", "predicted ÷ fp32"),
    ],
    headline=headline,
    terminal=(
        "label",
        "bytes",
        "time_p50_ms",
        "predicted_time_p50_ms",
        "over_builtin",
        "predicted_over_builtin",
    ),
    findings=advice,
    reading="A row for each operation by itself, then for each form of the chain. / same dtype is "
    "its time over that of torch's own operators one by one in the inputs' dtype, / fp32 over "
    "that of the naive form, which widens to fp32 and rounds back after every operation, and "
    "makes every fusion look better.",
    prediction="Bytes over the rate that such operators reach in this run: copies, broadcasts of "
    "a vector, norms and softmax by torch's LayerNorm. The fused kernel moves what enters and "
    "leaves the chain at the copy's rate.",
)
