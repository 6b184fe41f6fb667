"""Runs that others have published, and this lab's own, each compared with theory."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from distlab.experiment import Metrics, Records, Run
from distlab.model import preset
from distlab.report import read_json
from distlab.simulate.case import Case, from_json, predict, shortage
from distlab.theory.memory.peak import zero_paper_bytes
from experiments.predict.known_runs import OWN, PUBLISHED, ZERO_TABLE

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
# Bars are the errors that a prediction without fitted constants is expected to stay within.
TIME_BAR, MEMORY_BAR = 15.0, 10.0  # per cent
HOST = (
    "Host-bound: its messages take 16 ms, and NCCL's kernels were active for 90, waiting for the "
    "last process"
)


def add_published(run: Run) -> None:
    """Add a row per published run and per row of our own records."""
    for known in PUBLISHED:
        add(run, from_json(known))
    # The ZeRO paper gives states alone, so these rows have no step.
    for stage, gigabytes in ZERO_TABLE.items():
        states = zero_paper_bytes(7.5e9, 64, stage)
        metrics = _compared({"predicted_states_gb": states / 1e9}, {"states_gb": gigabytes})
        run.add(
            f"ZeRO stage {stage}, 7.5 B on 64 GPUs",
            metrics,
            source="Rajbhandari et al. 2020, ZeRO, figure 1",
            known="model states, K = 12",
            assumed="",
            why="",
            memory_is="states",
        )
    for case in _own():
        add(run, case)


def add(run: Run, case: Case) -> None:
    """Add a row: the prediction of a case, and the published figures."""
    found = predict(case)
    published = dict(case.published or {})
    # The default is the peak of tensors, which a run of this lab reports.
    kind = published.pop("memory_is", "allocated")
    # Sources give one of the two. Each follows from the other by the tokens of a step on a GPU.
    if "tokens_per_s_per_gpu" in published:
        published["step_ms"] = 1e3 * case.tokens / published["tokens_per_s_per_gpu"]
    elif "step_ms" in published:
        published["tokens_per_s_per_gpu"] = 1e3 * case.tokens / published["step_ms"]
    metrics = {
        "predicted_step_ms": 1e3 * found.time.step,
        "predicted_tokens_per_s_per_gpu": found.tokens_per_s,
        # The allocator reserves more than tensors use, and sources differ in which of them they
        # state.
        "predicted_memory_gib": (found.reserved if kind == "reserved" else found.allocated) / GIB,
        "predicted_allocated_bytes": found.allocated,
        "predicted_reserved_bytes": found.reserved,
        "predicted_overhead_ms": 1e3 * found.time.overhead,
        "predicted_comm_ms": 1e3 * found.time.communication,
        "predicted_mfu_pct": None if found.mfu is None else 100 * found.mfu,
        "shortage": shortage(case),
    }
    run.add(
        case.name,
        _compared(metrics, published),
        memory_is=kind,
        gpus=case.cluster.gpus,
        source=case.source,
        known=case.known,
        assumed=case.assumed,
        why=case.why,
    )


def _compared(metrics: Metrics, published: Mapping[str, float]) -> Metrics:
    """Add the published figures, the predicted ones, and the error in per cent."""
    for name, value in published.items():
        metrics[f"published_{name}"] = value
        metrics[f"{name}_error_pct"] = 100 * (metrics[f"predicted_{name}"] / value - 1)
    return metrics


def _own() -> Iterator[Case]:
    """Yield the rows of this lab's records as cases."""
    for name, variants in OWN:
        for record in read_json(ROOT / "records" / name):
            facts = record.config
            if record.variant not in variants:
                continue
            size = facts["size"]
            model = preset(size)
            # Ranks of `local` do not communicate, so the step is that of one.
            ranks = 1 if record.variant == "local" else facts["world_size"]
            shape = vars(model) | {"context_length": facts.get("context", model.context_length)}
            published = {"step_ms": record.metrics["step_p50_ms"], "memory_is": "allocated"}
            published["memory_gib"] = record.metrics["peak_alloc_bytes"] / GIB
            yield from_json(
                {
                    "name": f"{size}, batch {facts['batch']}, {record.variant}, {ranks} H200",
                    "model": shape,
                    "cluster": f"dgx-h200:{ranks}",
                    "strategy": record.variant,
                    "batch": facts["batch"],
                    "published": published,
                    "source": f"records/{name}",
                    "known": f"{facts['batch']} × {shape['context_length']} tokens per GPU, bf16, "
                    "eager",
                    "why": HOST if size == "medium" else "",
                }
            )


def findings(records: Records) -> list[str]:
    """Count the points within the bars, and name each that is not, with its reason."""
    lines = []
    bars = (
        ("step_ms_error_pct", TIME_BAR, "step times"),
        ("memory_gib_error_pct", MEMORY_BAR, "peaks of memory"),
    )
    for name, bar, unit in bars:
        # Not every row has both figures.
        errors = [record.metrics[name] for record in records if name in record.metrics]
        if errors:
            inside = sum(abs(error) <= bar for error in errors)
            lines.append(f"{inside} of {len(errors)} {unit} within {bar:g} %.")
    for record in records:
        missed = []
        step_error = record.metrics.get("step_ms_error_pct", 0.0)
        if abs(step_error) > TIME_BAR:
            missed.append(f"step {step_error:+.0f} %")
        memory_error = record.metrics.get("memory_gib_error_pct", 0.0)
        if abs(memory_error) > MEMORY_BAR:
            missed.append(f"memory {memory_error:+.0f} %")
        if missed:
            why = record.config.get("why") or "Not explained."
            lines.append(f"{record.variant}: {', '.join(missed)}. {why}")
        if record.metrics.get("shortage"):
            lines.append(f"{record.metrics['shortage']}.")
    return lines
