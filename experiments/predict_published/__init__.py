"""Does theory predict the runs that others have published?

    distlab run predict_published
    distlab run predict_published --case docs/learn/case_example.json

Each row says where the figure comes from, what is known and what was assumed. No constant is fitted to a published
figure: constants come from this lab's one-host records and from datasheets. A case file is described in
docs/learn/scale.md, an example is docs/learn/case_example.json.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.model import preset
from distlab.report import read_json
from distlab.simulate.case import Case, from_json, predict, read_case, shortage
from distlab.theory.memory.peak import zero_paper_bytes
from distlab.theory.model_shape import ModelShape
from experiments.predict_published.cases import OWN, PUBLISHED, ZERO_TABLE

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
TIME_BAR, MEMORY_BAR = 15.0, 10.0  # per cent
HOST = "Host-bound: its messages take 16 ms, and NCCL's kernels were active for 90, waiting for the last process"


@dataclass(frozen=True)
class PublishedConfig(Options):
    """What to predict."""

    case: tuple[str, ...] = option((), "files of cases to predict instead of the published ones", metavar="FILE")
    own: bool = option(True, "this lab's own records too")


def measure(config: PublishedConfig, context: RankContext, run: Run) -> None:
    """A row per run."""
    if config.case:
        for path in config.case:
            _add(run, read_case(path))
        return
    for known in PUBLISHED:
        _add(run, from_json(known))
    for stage, gigabytes in ZERO_TABLE.items():
        states = zero_paper_bytes(7.5e9, 64, stage)
        metrics = _compared({"predicted_states_gb": states / 1e9}, {"states_gb": gigabytes})
        run.add(
            f"ZeRO stage {stage}, 7.5 B on 64 GPUs", metrics, source="Rajbhandari et al. 2020, ZeRO, figure 1",
            known="model states, K = 12", assumed="", why="", memory_is="states",
        )  # fmt: skip
    if config.own:
        for case in _own():
            _add(run, case)


def _add(run: Run, case: Case) -> None:
    found, published = predict(case), dict(case.published or {})
    kind = published.pop("memory_is", "allocated")
    tokens = case.batch * case.micro_batches * case.model.context_length
    if "tokens_per_s_per_gpu" in published:
        published["step_ms"] = 1e3 * tokens / published["tokens_per_s_per_gpu"]
    elif "step_ms" in published:
        published["tokens_per_s_per_gpu"] = 1e3 * tokens / published["step_ms"]
    metrics = {
        "predicted_step_ms": 1e3 * found.time.step,
        "predicted_tokens_per_s_per_gpu": found.tokens_per_s,
        "predicted_memory_gib": (found.reserved if kind == "reserved" else found.allocated) / GIB,
        "predicted_allocated_bytes": found.allocated,
        "predicted_reserved_bytes": found.reserved,
        "predicted_peak_phase": found.phase,
        "predicted_compute_ms": 1e3 * found.time.compute,
        "predicted_overhead_ms": 1e3 * found.time.overhead,
        "predicted_comm_ms": 1e3 * found.time.communication,
        "predicted_optimizer_ms": 1e3 * found.time.optimizer,
        "predicted_mfu_pct": None if found.mfu is None else 100 * found.mfu,
        "shortage": shortage(case),
    }
    own = {name: getattr(case, name) for name in ("source", "known", "assumed", "why")}
    run.add(case.name, _compared(metrics, published), memory_is=kind, gpus=case.cluster.gpus, **own)


def _compared(metrics: dict[str, Any], published: Mapping[str, float]) -> dict[str, Any]:
    """With what was published beside what was predicted, and the error in per cent."""
    for name, value in published.items():
        metrics[f"published_{name}"] = value
        metrics[f"{name}_error_pct"] = 100 * (metrics[f"predicted_{name}"] / value - 1)
    return metrics


def _own() -> Iterator[Case]:
    """Rows of this lab's records."""
    for name, variants in OWN:
        for record in read_json(ROOT / "records" / name):
            facts = record.config
            if record.variant not in variants:
                continue
            size = facts["size"]
            model = preset(size)
            ranks = 1 if record.variant == "local" else facts["world_size"]
            shape = vars(ModelShape.of(model)) | {"context": facts.get("context", model.context_length)}
            published = {"step_ms": record.metrics["step_p50_ms"], "memory_is": "allocated"}
            published["memory_gib"] = record.metrics["peak_alloc_bytes"] / GIB
            yield from_json(
                {
                    "name": f"{size}, batch {facts['batch']}, {record.variant}, {ranks} H200",
                    "model": shape, "cluster": f"dgx-h200:{ranks}", "strategy": record.variant,
                    "batch": facts["batch"], "published": published, "source": f"records/{name}",
                    "known": f"{facts['batch']} × {shape['context']} tokens per GPU, bf16, eager",
                    "why": HOST if size == "medium" else "",
                }
            )  # fmt: skip


def findings(records: Sequence[Record]) -> list[str]:
    """How many points lie within the bars, and each that does not, with its reason."""
    lines = []
    for metric, bar, unit in (("step_ms", TIME_BAR, "step times"), ("memory_gib", MEMORY_BAR, "peaks of memory")):
        errors = {r.variant: r.metrics[f"{metric}_error_pct"] for r in records if f"{metric}_error_pct" in r.metrics}
        if errors:
            inside = sum(abs(error) <= bar for error in errors.values())
            lines.append(f"{inside} of {len(errors)} {unit} within {bar:g} %.")
    for record in records:
        missed = [
            f"{metric.split('_')[0]} {record.metrics[f'{metric}_error_pct']:+.0f} %"
            for metric, bar in (("step_ms", TIME_BAR), ("memory_gib", MEMORY_BAR))
            if abs(record.metrics.get(f"{metric}_error_pct", 0.0)) > bar
        ]
        if missed:
            lines.append(f"{record.variant}: {', '.join(missed)}. {record.config.get('why') or 'Not explained.'}")
        if record.metrics.get("shortage"):
            lines.append(f"{record.metrics['shortage']}.")
    return lines


headline = headline_from(
    "{count} runs, predicted from datasheets and this lab's one-host records", count=lambda records: len(records)
)

VIEW = View(
    columns=[
        Column("variant", "run"),
        Column("metrics.predicted_step_ms", "step ms", ",.0f", missing=""),
        Column("metrics.published_step_ms", "published", ",.0f", missing=""),
        Column("metrics.step_ms_error_pct", "error %", "+.1f", missing=""),
        Column("metrics.predicted_tokens_per_s_per_gpu", "tokens/s/GPU", ",.0f", missing=""),
        Column("metrics.published_tokens_per_s_per_gpu", "published", ",.0f", missing=""),
        Column("metrics.predicted_memory_gib", "GiB", ",.1f", missing=""),
        Column("metrics.published_memory_gib", "published", ",.1f", missing=""),
        Column("metrics.memory_gib_error_pct", "error %", "+.1f", missing=""),
        Column("metrics.predicted_states_gb", "states GB", ",.1f", missing="", optional=True),
        Column("metrics.published_states_gb", "published", ",.1f", missing="", optional=True),
        Column("config.memory_is", "memory is", align="left"),
        Column("metrics.predicted_reserved_bytes", "reserved GiB", ",.1f", scale=2**-30, missing=""),
        Column("metrics.predicted_overhead_ms", "overhead ms", ",.0f", missing=""),
        Column("metrics.predicted_mfu_pct", "MFU %", ".0f", missing=""),
        Column("config.source", "source", align="left"),
        Column("config.known", "known", align="left"),
        Column("config.assumed", "assumed", align="left"),
    ],
    headline=headline,
    terminal=(
        *("predicted_step_ms", "step_ms_error_pct", "predicted_tokens_per_s_per_gpu", "predicted_memory_gib"),
        *("memory_gib_error_pct", "predicted_reserved_bytes"),
    ),
    findings=findings,
    reading="A row per run. `allocated` is the peak of tensors; `reserved` what torch's allocator holds, the larger. "
    "Errors are predicted over published.",
    prediction="Operators, collectives and memory in closed form; constants from one-host records and datasheets.",
    noise="Nothing was measured here. Published rows of one configuration differ by up to 9 % among themselves.",
)

EXPERIMENT = Experiment(PublishedConfig, measure, VIEW, presets={"smoke": {"own": False}}, ranks="none")
