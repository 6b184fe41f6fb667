"""The memory study of attention: predictions, resuming and its command, without a GPU."""

import json

import pytest
import torch

from distlab.report import read_json, write_json
from experiments import attention_memory as study
from kernels.flash_attention.peers import naive


def test_predicted_memory_is_quadratic_for_naive_and_linear_for_ours():
    small, large = (study.predicted_memory("naive", 8, t, 64, torch.float32)[1] for t in (8192, 16384))
    assert 3.9 < large / small <= 4.0
    small, large = (study.predicted_memory("ours", 8, t, 64, torch.float32)[1] for t in (8192, 16384))
    assert large == 2 * small
    before, _ = study.predicted_memory("ours", 8, 1024, 64, torch.float32)
    assert before == 5 * 8 * 1024 * 64 * 4 + 8 * 1024 * 4  # q, k, v, o, do and the log-sum-exp


def test_a_cut_off_study_resumes_and_failures_keep_their_prediction(tmp_path, monkeypatch):
    def refuse(variant, length, device):
        if variant == "sdpa":
            raise torch.OutOfMemoryError("too large")
        return naive

    monkeypatch.setattr(study, "build", refuse)
    path = tmp_path / "records.json"
    first = study.run(study.SMOKE, path)
    assert [(r.variant, r.metrics["status"]) for r in first] == [("naive", "ok"), ("sdpa", "OOM"), ("ours", "ok")]
    assert first[0].metrics["fwd_p50_ms"] > 0
    assert all(r.metrics["predicted_peak_bytes"] > r.metrics["predicted_before_bwd_bytes"] > 0 for r in first)
    write_json(first[:1], path)
    again = study.run(study.SMOKE, path)
    assert again[:1] == read_json(path)[:1] == first[:1]
    assert len(again) == 3


def test_command_prints_a_table_and_one_line_of_json(tmp_path, capsys):
    assert study.main(["--smoke", "--variants", "naive", "--out", str(tmp_path), "--stamp", "run"]) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["experiment"] == "attention_memory"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the message without a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    assert study.main(["--out", str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["naive", "ours"])
def test_the_count_by_hand_is_the_allocators(variant):
    config = study.Config(batch=2, passes=2)
    found = study.memory(config, 8192, 64, "bfloat16", variant)
    counted = study.predicted_memory(variant, 2, 8192, 64, torch.bfloat16)
    measured = found["before_bwd_alloc_bytes"], found["peak_alloc_bytes"]
    assert measured == pytest.approx(counted, abs=2**20)
