"""Chains of operations as one kernel: traffic one by one and fused, predicted and measured.

A chain is a list of names of STEPS, applied one after the other to x (N, D). It is run one by
one in x's own dtype (`builtin`), one by one as the naive forms write it, widened to fp32 (`naive`),
through torch.compile, and by `chain_kernel` where that has such a form. The traffic one by one and
fused is that of `distlab.theory.fusion`.
"""

import itertools
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
    UNCLEAR,
    Ratio,
    grouped,
    is_number,
    prediction_error,
    row_of,
    verdict_of,
    why_unclear,
    with_interval,
)
from distlab.theory.fusion import POINTWISE, ROWS, Graph, Operator, advise
from kernels import reference

from .cases import Case, Function, Normal, Operation, Shape
from .prediction import naive_bytes
from .view import headline

SCALE = 0.125


class Step(NamedTuple):
    """A step of a chain, `one(x, *operands)`.

    Args:
        takes: operands in addition to x: `x` for one of x's shape, `v` for a vector of a row's
            length.
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
        wide_operands = [reference.wide(operand) for operand in operands]
        return one(reference.wide(x), *wide_operands).to(x.dtype)

    return Step(takes=takes, one=one, naive=naive)


def _scale(x: Tensor) -> Tensor:
    return x * SCALE


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
    "silu": Step(takes="", one=F.silu, naive=reference.silu, flops=4),
    "gelu": Step(takes="", one=partial(F.gelu, approximate="tanh"), naive=reference.gelu, flops=8),
    "rms_norm": Step(takes="v", one=_rms_norm, naive=reference.rms_norm, pattern=ROWS, flops=4),
    "layer_norm": Step(
        takes="vv", one=_layer_norm, naive=reference.layer_norm, pattern=ROWS, flops=7
    ),
    "softmax": Step(
        takes="", one=partial(F.softmax, dim=-1), naive=reference.softmax, pattern=ROWS, flops=5
    ),
}
Chain = tuple[str, ...]
CHAINS: tuple[Chain, ...] = (
    # one kernel here
    ("add", "rms_norm", "silu"),
    ("add", "layer_norm"),
    ("softmax", "scale", "bias"),
    # Better left to Inductor, which makes one kernel of them that moves the least bytes:
    ("bias", "gelu"),
    ("scale", "bias", "relu"),
    ("gelu", "multiply"),
    ("bias", "silu", "multiply", "add"),
)


def applied(chain: Chain, how: str) -> Function:
    """The chain one by one: `one` in x's dtype, or `naive`."""

    def run(x: Tensor, *operands: Tensor) -> Tensor:
        rest = iter(operands)
        for name in chain:
            x = getattr(STEPS[name], how)(x, *itertools.islice(rest, len(STEPS[name].takes)))
        return x

    return run


def in_one_kernel(chain: Chain) -> Function | None:
    """Return the chain by `chain_kernel`. None if the kernel does not have its form.

    The form is [add] → a row operation → [scale] → [bias] → [silu].
    """
    rows = [name for name in chain if STEPS[name].pattern == ROWS]
    if len(rows) != 1:
        return None
    (kind,) = rows
    if chain != tuple(name for name in ("add", kind, "scale", "bias", "silu") if name in chain):
        return None

    def run(x: Tensor, *operands: Tensor) -> Tensor:
        from kernels._dispatch import runs_triton

        if not runs_triton(x):
            return applied(chain, "naive")(x, *operands)
        from .chain_kernel import launch

        rest = iter(operands)
        residual = next(rest) if "add" in chain else None
        w, b = [*itertools.islice(rest, len(STEPS[kind].takes)), None, None][:2]
        scale = SCALE if "scale" in chain else 1.0
        return launch(
            x, residual, kind, w, b, scale, next(rest) if "bias" in chain else None, "silu" in chain
        )

    return run


def chain_graph(chain: Sequence[str], shape: Sequence[int], itemsize: int) -> Graph:
    """The chain as the advisor takes it."""
    n, d = shape
    sizes, operators, count = {"x0": n * d * itemsize}, [], n * d
    for step, name in enumerate(chain):
        operation, operands = STEPS[name], []
        for number, kind in enumerate(operation.takes):
            operands.append(f"{name}{step}.{number}")
            sizes[operands[-1]] = (count if kind == "x" else d) * itemsize
        sizes[f"x{step + 1}"] = count * itemsize
        operators.append(
            Operator(
                f"{name} {step}",
                (f"x{step}", *operands),
                (f"x{step + 1}",),
                operation.flops * count,
                operation.pattern,
                4 * d * (operation.pattern == ROWS),
            )
        )
    return Graph(tuple(operators), sizes)


def chain_case(chain: Chain) -> Case:
    """Return the chain as a row of the table, forward."""
    return Case(
        name="+".join(chain),
        make=partial(chain_operation, chain),
        shape=(8192, 4096),
        tiny=(16, 4096),
        directions=("fwd",),
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
                inputs.append(Normal((width,), mean=1.0, deviation=0.1))
    return Operation(
        inputs=inputs,
        ours=in_one_kernel(chain),
        naive=applied(chain, "naive"),
        builtin=applied(chain, "one"),
        forward_cost=chain_graph(chain, shape, dtype.itemsize).fused(),
    )


FORMS = {
    "builtin": "one by one",
    "naive": "one by one, in fp32",
    "compile": "fused by Inductor",
    "ours": "fused, ours",
}
OVER_INDUCTOR = Ratio("over_inductor", row_of("compile"), "time")


def accounting(
    case: Case, rows: dict[str, Record], limits: dict[str, float]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the traffic table of a chain: a row per operation, then a row per form with its times.

    Args:
        rows: variant → its record.
        limits: rates of this run, see `timing.ceilings`.
    """
    chain = case.chain
    graph = chain_graph(chain, case.shape, getattr(torch, case.dtype).itemsize)
    empty, found, apart_ms = limits["empty_kernel_ms"], [], 0.0
    for name, operator in zip(chain, graph.operators, strict=True):
        read = sum(graph.sizes[tensor] for tensor in operator.reads)
        written = sum(graph.sizes[tensor] for tensor in operator.writes)
        kind = (
            "rows"
            if operator.pattern == ROWS
            else "broadcast"
            if "v" in STEPS[name].takes
            else "copy"
        )
        ms = (read + written) / limits[f"{kind}_gb_per_s"] / 1e6
        apart_ms += ms
        found.append(
            (
                name,
                {
                    "read_bytes": read,
                    "written_bytes": written,
                    "bytes": read + written,
                    "predicted_time_p50_ms": ms,
                },
            )
        )
    widened = naive_bytes(case, "fwd") or {}
    least = graph.fused().bytes
    moved = {
        "builtin": graph.unfused().bytes,
        "naive": sum(widened.values()),
        "compile": least,
        "ours": least,
    }
    fused_ms = least / limits["copy_gb_per_s"] / 1e6
    ms = {
        "builtin": apart_ms,
        "compile": fused_ms,
        "ours": fused_ms,
        "naive": sum(count / limits[f"{kind}_gb_per_s"] for kind, count in widened.items()) / 1e6,
    }
    for variant, label in FORMS.items():
        if variant in rows or variant == "builtin":
            measured = rows[variant].metrics if variant in rows else {}
            metrics = {
                "bytes": moved[variant],
                "time_p50_ms": measured.get("time_p50_ms"),
                "predicted_time_p50_ms": ms[variant] + empty,
            }
            for baseline in ("builtin", "naive") if label.startswith("fused") else ():
                for end in ("", "_low", "_high"):
                    metrics[f"over_{baseline}{end}"] = measured.get(f"over_{baseline}{end}")
                metrics[f"predicted_over_{baseline}"] = (ms[variant] + empty) / (
                    ms[baseline] + empty
                )
            found.append((label, metrics))
    if "ours" in rows and "compile" in rows:
        metrics = dict(found)[FORMS["ours"]]
        ratio = OVER_INDUCTOR.of(rows["ours"], rows["compile"]) or ()
        names = (OVER_INDUCTOR.name, f"{OVER_INDUCTOR.name}_low", f"{OVER_INDUCTOR.name}_high")
        metrics.update(zip(names, ratio, strict=False))
    return found


def accounts(records: Sequence[Record]) -> list[Record]:
    """The traffic tables of the chains among the rows of a run, or of several."""
    found = []
    for mine in grouped(
        [r for r in records if r.config.get("chain")], lambda r: r.config["label"]
    ).values():
        first, limits = (
            mine[0],
            next((r.metrics for r in mine if "rows_gb_per_s" in r.metrics), None),
        )
        if limits is not None:
            chain, shape = tuple(first.config["chain"]), tuple(first.config["shape"])
            case = replace(chain_case(chain), shape=shape, dtype=first.config["dtype"])
            found += [
                Record(TRAFFIC.name, name, first.config, metrics, first.environment, first.commit)
                for name, metrics in accounting(case, {r.variant: r for r in mine}, limits)
            ]
    return found


def advice(records: Sequence[Record]) -> list[str]:
    """Return the advisor's fusion of each chain, and whether the measurement shows that it pays."""
    lines = []
    for label, rows in grouped(records, lambda r: r.config["label"]).items():
        first = rows[0]
        itemsize = getattr(torch, first.config["dtype"]).itemsize
        graph = chain_graph(first.config["chain"], first.config["shape"], itemsize)
        plan = advise(graph, lookup(first.environment.get("device_name") or "") or H100_SXM)
        groups = " | ".join(
            " + ".join(op.name.rpartition(" ")[0] for op in group) for group in plan.groups
        )
        lines.append(
            f"{label}: the advisor makes {len(plan.groups)} kernel(s) of it, {groups}{_verdict(rows)}"
        )
    return lines


def _verdict(rows: Sequence[Record]) -> str:
    """Return whether our own kernel pays compared with Inductor's, to end a sentence.

    Empty without Inductor's.

    Args:
        rows: table of traffic of a chain.
    """
    forms = {record.variant: record for record in rows}
    ours, inductor = forms.get(FORMS["ours"]), forms.get(FORMS["compile"])
    if inductor is None or not inductor.metrics.get("time_p50_ms"):
        return ""
    if ours is None:
        what = "there is no kernel of ours, and Inductor's time over one by one"
        return _compared(
            inductor, "over_builtin", what, "the fusion pays", "the fusion does not pay"
        )
    what = "our time over Inductor's"
    return _compared(
        ours, OVER_INDUCTOR.name, what, "a kernel of one's own pays", "leave it to Inductor"
    )


def _compared(record: Record, ratio: str, what: str, if_faster: str, if_slower: str) -> str:
    """Return a ratio with its interval and the conclusion, to end a sentence.

    Empty without the ratio.
    """
    if not is_number(record.metrics.get(ratio)):
        return ""
    doubt = (
        f"this run cannot tell whether that pays. {why_unclear([record], ratio).removesuffix('.')}"
    )
    told = {FASTER: if_faster, SLOWER: if_slower, UNCLEAR: doubt}[verdict_of(record, ratio)]
    return f"; {what} is {with_interval(record, ratio)}: {told}"


def _us(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ",.1f", scale=1000, missing="")


def _ratio(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ".3f", missing="")


TRAFFIC = View(
    name="kernel_chains",
    question="What does a chain of operations move one by one and fused, and what does the fusion bring?",
    columns=[
        Column("config.label", "chain", align="left"),
        Column("variant", "operation or form", align="left"),
        *(
            Column(f"metrics.{name}", title, ",.1f", scale=1e-6, missing="")
            for name, title in (
                ("read_bytes", "read MB"),
                ("written_bytes", "written MB"),
                ("bytes", "moved MB"),
            )
        ),
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
    reading="A row for each operation by itself, then for each form of the chain. / same dtype is its time over that "
    "of torch's own operators one by one in the inputs' dtype, / fp32 over that of the naive form, which widens to "
    "fp32 and rounds back after every operation, and makes every fusion look better.",
    prediction="Bytes over the rate that such operators reach in this run: copies, broadcasts of a vector, norms and "
    "softmax by torch's LayerNorm. The fused kernel moves what enters and leaves the chain at the copy's rate.",
)
