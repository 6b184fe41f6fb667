"""Sentences made by rules from a page's figures, and the commands that follow."""

import pytest

from distlab.report import Record
from distlab.report.meaning import meaning

GPU, CPU = {"device_name": "H200", "cuda": "13.0"}, {"device_name": "AMD EPYC", "cuda": None}


def row(variant, environment=CPU, config=None, **metrics):
    return Record(
        "ddp_bench",
        variant,
        {"size": "tiny", "steps": 5, "rounds": 2} | (config or {}),
        metrics,
        environment,
        "c",
    )


def said(*records, commands=()):
    sentences, then = meaning(records, commands)
    return " ".join(sentences), then


def test_noise_that_is_too_large():
    text, then = said(row("a", noise_pct=3.0), row("b", noise_pct=31.0))
    assert text.startswith("Noise is too large in 1 of 2 rows, up to 31 % (b)")
    assert then[0] == "distlab run ddp_bench --size tiny --steps 10 --rounds 4"
    assert "Noise" not in said(row("a", noise_pct=3.0))[0]


def test_a_gpu_that_waits_for_its_host():
    busy = {"idle_ms": 1.0, "profiled_step_ms": 20.0}
    text, then = said(row("local", GPU, **busy | {"idle_ms": 5.0}))
    assert (
        "host-bound" in text and "idles 25 %" in text and "model_benchmark --size tiny --profile" in then[0]
    )
    assert "host-bound" not in said(row("local", GPU, **busy))[0]
    assert "host-bound" not in said(row("local", CPU, **busy | {"idle_ms": 5.0}))[0]  # its host is the device
    assert (
        "1 of 1 rows are host-bound" in said(row("ours", GPU, host_p50_ms=2.0, fwd_bwd_device_p50_ms=1.0))[0]
    )


def test_kernels_that_reach_the_copy():
    assert (
        "1 of 2 rows are bandwidth-bound" in said(row("a", of_copy_pct=92.0), row("b", of_copy_pct=30.0))[0]
    )


def test_communication_in_the_way_and_hidden():
    shares = {
        "exposed_uncovered_ms": 3.0,
        "exposed_slowdown_ms": 1.0,
        "exposed_copies_ms": 0.5,
        "exposed_idle_ms": -1.0,
    }
    text, then = said(row("bucketed", step_p50_ms=20.0, exposed_comm_ms=4.5, **shares))
    assert (
        "exposes 4.5 ms, 22 % of its step, most of it communication that no compute covers (3.0 ms)" in text
    )
    assert then[0] == "distlab run bucket_sweep --size tiny"
    assert "Communication is hidden: fsdp" in said(row("fsdp", step_p50_ms=20.0, exposed_comm_ms=0.4))[0]
    tie = {"vs_local_low": 0.9, "vs_local_high": 1.6}
    assert "is hidden" in said(row("bucketed", step_p50_ms=20.0, exposed_comm_ms=4.5, **tie))[0]


@pytest.mark.parametrize(
    ("ratio", "low", "high", "words"),
    [
        (
            1.25,
            1.2,
            1.3,
            "The peer is ahead: torch DDP's fastest row beats bucketed, the fastest of ours, by 20.0 %",
        ),
        (0.9, 0.85, 0.95, "bucketed is ahead of torch DDP's fastest row by 10.0 %"),
        (0.99, 0.9, 1.1, "Level with torch DDP: bucketed"),
    ],
)
def test_the_peer(ratio, low, high, words):
    interval = {"vs_torch_ddp": ratio, "vs_torch_ddp_low": low, "vs_torch_ddp_high": high}
    other = row("naive", vs_torch_ddp=2.0, vs_torch_ddp_low=1.9, vs_torch_ddp_high=2.1)
    text, then = said(row("bucketed", **interval), other, row("torch-ddp", vs_torch_ddp=1.0))
    assert words in text
    assert ("--strategies local bucketed torch-ddp-tuned" in then[0]) == (ratio > 1)


def test_out_of_memory_and_a_prediction_that_is_off():
    text, then = said(row("local", step_p50_ms="OOM"), row("fsdp", step_p50_ms=10.0, predicted_step_ms=14.0))
    assert "Out of memory: local." in text and "A prediction is off: step_ms by +40 % at fsdp" in text
    assert then[0] == "distlab run memory_breakdown --size tiny"


def test_there_are_always_two_commands_and_a_users_model_stays_theirs():
    assert said(row("a"))[1] == ["distlab runs ddp_bench", "distlab compare --history ddp_bench"]
    assert said(row("a"), commands=("distlab list",))[1] == ["distlab list", "distlab runs ddp_bench"]
    assert "--model a:b --steps" in said(row("a", config={"factory": "a:b"}, noise_pct=40.0))[1][0]
