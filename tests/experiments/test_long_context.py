"""The scaled model, rounds that later runs add, comparisons of rows, and what is wrong."""

import shutil

import pytest

from distlab.experiment import Record
from distlab.model import preset
from distlab.report.record import read_json
from distlab.simulate.plan import Plan
from experiments.long_context import (
    EXPERIMENT,
    ROWS,
    LongContextConfig,
    compare,
    failure_of,
    predicted,
    worth_timing,
    wrong_rows,
)
from tests.commands import ROOT
from tests.experiments.frame import measured


def test_the_model_is_the_presets_or_a_fraction_of_it():
    assert LongContextConfig().model() == preset("8B", ops="triton")
    eighth = LongContextConfig(scale="1/8", size="llama-8B", context=100).model()
    assert (eighth.d_model, eighth.d_ff, eighth.num_layers) == (512, 1792, 4)
    assert (eighth.num_heads, eighth.kv_heads, eighth.head_dim) == (4, 1, 128)
    assert eighth.context_length == 100  # given dimensions are not scaled


@pytest.mark.parametrize("case", ["full", "short", "gqa"])
def test_the_plan_is_what_was_measured(case):
    """Within 2 %, on two H200s."""
    for record in read_json(ROOT / f"records/long_context/h200x2-{case}.json"):
        row = LongContextConfig.of(record.config).variant(
            record.variant, checkpointing=record.metrics["keeps"]
        )
        planned = (
            row.options.planned(ROWS[record.variant][0])
            .memory(world_size=2, on_gpu=True)
            .peak.total
        )
        assert planned == pytest.approx(record.metrics["peak_alloc_bytes"], rel=0.02), (
            record.variant
        )


def test_peers_are_set_up_as_their_users_would():
    config = LongContextConfig(attention="flash", checkpointing="qkv", kv_heads=8)
    ours, peer = config.variant("fsdp"), config.variant("fsdp2 attention")
    assert (ours.options.attention, ours.options.ops, ours.options.checkpointing) == (
        "flash",
        "triton",
        "qkv",
    )
    assert peer.strategy.name == "fsdp2" and peer.options.compile == "blocks"
    assert (peer.options.attention, peer.options.ops, peer.options.checkpointing) == (
        "sdpa",
        "torch",
        "attention",
    )
    assert peer.options.model().loss_in_head  # in chunks, as ours


def test_a_run_that_was_cut_off_goes_on_elsewhere(tmp_path):
    """With no time at all only plans are written.

    Of them two files are enough to do what is left on another disk.
    """
    known = {"keeps", "predicted_peak_bytes", "free_bytes"}
    assert all(set(r.metrics) == known for r in measured(EXPERIMENT, tmp_path, minutes=1e-9))
    copied = tmp_path / "elsewhere" / "long_context" / "run"
    copied.mkdir(parents=True)
    for name in ("run.json", "records.json"):
        shutil.copy(tmp_path / "long_context" / "run" / name, copied)
    records = measured(EXPERIMENT, tmp_path / "elsewhere")
    assert "failure" not in records[0].metrics
    assert (copied / "report.html").is_file()
    for record in records:
        assert record.metrics["rounds"] == 1 and len(record.metrics["step_samples_ms"]) == 5
        assert record.metrics["loss_rel_diff"] == pytest.approx(0, abs=1e-5)


def test_rows_are_held_against_the_fastest_of_torchs():
    rows = [
        row(
            name,
            status="ok",
            step_p50_ms=ms,
            step_samples_ms=[ms, ms + 0.1] * 3,
            loss_after_steps=loss,
        )
        for name, ms, loss in (
            ("fsdp", 9.0, 2.0),
            ("fsdp2 block", 12.0, 2.0),
            ("fsdp2 qkv", 10.0, 2.1),
        )
    ]
    rows = compare(rows)
    assert [round(r.metrics["vs_peer"], 2) for r in rows] == [0.9, 1.2, 1.0]
    assert wrong_rows(rows) == ["fsdp2 qkv: its loss differs by 5.0 % from that of fsdp"]


def row(name, **metrics):
    """A record of this experiment."""
    return Record("long_context", name, {}, metrics, {}, None)


def test_further_rounds_time_the_fastest_peers_alone():
    ours = row("fsdp", status="ok", step_p50_ms=9.0)
    fastest = row("fsdp2 qkv", status="ok", step_p50_ms=5.0)
    close = row("fsdp2 auto", status="ok", step_p50_ms=5.1)
    slow = row("fsdp2 block", status="ok", step_p50_ms=5.2)
    full = row("fsdp2 attention", status="OOM")
    failed = row("fsdp2 block", status="failed")
    new = row("fsdp2 block")
    records = [ours, fastest, close, slow, full]
    for each in (ours, fastest, close, new):
        assert worth_timing(each, records), each
    for each in (slow, full, failed):
        assert not worth_timing(each, records), each


def test_what_cannot_fit_by_its_plan_is_not_tried():
    step = LongContextConfig(scale="1/32", attention="auto").variant("fsdp").options.planned("fsdp")
    needs = step.memory(2).peak.total
    assert "status" not in predicted(Plan(step, step.memory(2), needs, None))
    assert predicted(Plan(step, step.memory(2), needs - 1, None))["status"] == "OOM"


def test_what_fails_beside_the_measurement_is_said():
    error = RuntimeError("no such kernel\nsecond line")
    new, timed = row("fsdp2 qkv"), row("fsdp2 block", status="ok", step_p50_ms=5.0)
    peer = new.with_metrics(failure_of(new, error))
    assert peer.metrics["status"] == peer.metrics["step_p50_ms"] == "failed"
    assert timed.with_metrics(failure_of(timed, error)).metrics["status"] == "ok"
    assert wrong_rows([peer]) == ["fsdp2 qkv: RuntimeError: no such kernel"]
