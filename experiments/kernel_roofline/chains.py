"""Chains of operations as one kernel: traffic one by one and fused, predicted and measured.

A chain is a list of names of OPERATIONS, applied one after the other to x (N, D). It is run one by
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
from kernels.cost import Cost

from .cases import NORM, Case, Function, Operand
from .prediction import naive_bytes
from .view import headline

SCALE = 0.125


class Operation(NamedTuple):
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


def _widened(one: Function) -> Function:
    return lambda x, *operands: one(reference.wide(x), *map(reference.wide, operands)).to(x.dtype)


def _plain(takes: str, one: Function) -> Operation:
    return Operation(takes, one, _widened(one))


OPERATIONS = {
    "add": _plain("x", torch.add),
    "multiply": _plain("x", torch.mul),
    "scale": _plain("", lambda x: x * SCALE),
    "bias": _plain("v", torch.add),
    "relu": _plain("", torch.relu),
    "silu": Operation("", F.silu, reference.silu, flops=4),
    "gelu": Operation("", partial(F.gelu, approximate="tanh"), reference.gelu, flops=8),
    "rms_norm": Operation(
        "v", lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), reference.rms_norm, ROWS, 4
    ),
    "layer_norm": Operation(
        "vv", lambda x, w, b: F.layer_norm(x, w.shape, w, b), reference.layer_norm, ROWS, 7
    ),
    "softmax": Operation("", partial(F.softmax, dim=-1), reference.softmax, ROWS, 5),
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
            x = getattr(OPERATIONS[name], how)(
                x, *itertools.islice(rest, len(OPERATIONS[name].takes))
            )
        return x

    return run


def in_one_kernel(chain: Chain) -> Function | None:
    """Return the chain by `chain_kernel`. None if the kernel does not have its form.

    The form is [add] → a row operation → [scale] → [bias] → [silu].
    """
    rows = [name for name in chain if OPERATIONS[name].pattern == ROWS]
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
        w, b = [*itertools.islice(rest, len(OPERATIONS[kind].takes)), None, None][:2]
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
        operation, operands = OPERATIONS[name], []
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
    """The chain as a row of the table, forward."""

    def operands(n: int, d: int) -> list[Operand]:
        kinds = [kind for name in chain for kind in OPERATIONS[name].takes]
        return [
            Operand((n, d)),
            *(Operand((n, d)) if kind == "x" else Operand((d,), 0.1, 1.0) for kind in kinds),
        ]

    def least(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
        return chain_graph(chain, shape, dtype.itemsize).fused()

    variants = {
        "naive": applied(chain, "naive"),
        "builtin": applied(chain, "one"),
        "ours": in_one_kernel(chain),
    }
    found = {name: function for name, function in variants.items() if function is not None}
    return Case("+".join(chain), NORM, (16, 4096), "bfloat16", operands, least, found, ("fwd",))


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
    chain = tuple(case.name.split("+"))
    graph = chain_graph(chain, case.shape, getattr(torch, case.dtype).itemsize)
    empty, found, apart_ms = limits["empty_kernel_ms"], [], 0.0
    for name, operator in zip(chain, graph.operators, strict=True):
        read = sum(graph.sizes[tensor] for tensor in operator.reads)
        written = sum(graph.sizes[tensor] for tensor in operator.writes)
        kind = (
            "rows"
            if operator.pattern == ROWS
            else "broadcast"
            if "v" in OPERATIONS[name].takes
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
            of_its_size = {"shape": tuple(first.config["shape"]), "dtype": first.config["dtype"]}
            case = replace(chain_case(tuple(first.config["chain"])), **of_its_size)
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
