"""The memory study of attention: predictions, resuming and its command, without a GPU."""

import pytest
import torch

from distlab.runs import Header, Run
from experiments import attention_memory as study
from experiments._attention import naive
from kernels.flash_attention import hopper
from tests.experiments.frame import measured


def test_predicted_memory_is_quadratic_for_naive_and_linear_for_ours():
    small, large = (study.predicted_memory("naive", 8, t, 64, torch.float32)[1] for t in (8192, 16384))
    assert 3.9 < large / small <= 4.0
    small, large = (study.predicted_memory("ours", 8, t, 64, torch.float32)[1] for t in (8192, 16384))
    assert large == 2 * small
    before, _ = study.predicted_memory("ours", 8, 1024, 64, torch.float32)
    assert before == 5 * 8 * 1024 * 64 * 4 + 8 * 1024 * 4  # q, k, v, o, do and the log-sum-exp


@pytest.mark.skipif(not hopper.installed(), reason="no Triton with Gluon")
def test_the_hopper_backward_keeps_a_sum_of_dq(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    peaks = []
    for generation in ("sm_80", "sm_90"):
        monkeypatch.setattr(hopper, "generation", lambda index, generation=generation: generation)
        peaks.append([study.predicted_memory("ours", 8, t, 64, torch.bfloat16)[1] for t in (1024, 8192)])
    assert peaks[1][0] == peaks[0][0]  # too short
    assert peaks[1][1] - peaks[0][1] == 4 * 8 * 8192 * 64


def test_failures_keep_their_prediction(tmp_path, monkeypatch):
    def refuse(variant, shape, device):
        if variant == "sdpa":
            raise torch.OutOfMemoryError("too large")
        return naive

    monkeypatch.setattr(study, "build", refuse)
    first = measured(study.EXPERIMENT, tmp_path)
    assert [(r.variant, r.metrics["status"]) for r in first] == [("naive", "ok"), ("sdpa", "OOM"), ("ours", "ok")]
    assert first[0].metrics["fwd_p50_ms"] > 0
    assert all(r.metrics["predicted_peak_bytes"] > r.metrics["predicted_before_bwd_bytes"] > 0 for r in first)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["naive", "ours"])
def test_the_count_by_hand_is_the_allocators(variant, tmp_path):
    run = Run(Header("attention_memory", {}, 1, {}, None), tmp_path)
    found = study.memory(study.Config(batch=2, passes=2), run, "cuda", 8192, 64, "bfloat16", variant)
    counted = study.predicted_memory(variant, 2, 8192, 64, torch.bfloat16)
    measured = found["before_bwd_alloc_bytes"], found["peak_alloc_bytes"]
    assert measured == pytest.approx(counted, abs=2**20)
