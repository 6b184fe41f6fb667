"""Published runs: the bars, a case from a file, and what is refused."""

import itertools
import json

import pytest

from distlab.simulate.case import from_json, predict, read_case, shortage
from experiments.predict import EXPERIMENT
from experiments.predict.known_runs import ZERO_TABLE
from tests.commands import ROOT
from tests.experiments.frame import measured, refused

EXAMPLE = ROOT / "docs" / "learn" / "case_example.json"
CASE = {
    "model": "llama-8B",
    "cluster": "grand-teton:8",
    "strategy": "fsdp2",
    "batch": 2,
    "recompute": "selective",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    records = measured(EXPERIMENT, tmp_path_factory.mktemp("published"), "published")
    return {record.variant: record for record in records}


def test_the_bars(rows):
    """Step time within 15 % and memory within 10 % of torchtitan's; other misses have their reason,
    as have those of long sequences that four and eight GPUs share."""
    for name, record in rows.items():
        if name.startswith("Llama 3.1 8B") and name[-4:] not in ("CP 4", "CP 8"):
            assert abs(record.metrics["step_ms_error_pct"]) <= 15, name
            assert abs(record.metrics["memory_gib_error_pct"]) <= 10, name
        elif abs(record.metrics.get("step_ms_error_pct", 0)) > 15:
            assert record.config["why"], name
        if "405B" not in name:
            assert abs(record.metrics.get("memory_gib_error_pct", 0)) <= 10, name
    assert len(rows) >= 12
    assert all(record.config["source"] and record.config["known"] for record in rows.values())


def test_interleaving_is_predicted_to_gain_what_its_bubble_says(rows):
    """More than was published, 1.28: the reason is given.

    Memory of both is short of what torchtitan keeps whole.
    """
    plain, interleaved = (
        rows[f"Llama 3.1 405B, {schedule}"].metrics for schedule in ("pp8", "pp8-interleaved")
    )
    assert plain["predicted_step_ms"] / interleaved["predicted_step_ms"] == pytest.approx(
        1.43, abs=0.02
    )
    assert plain["predicted_memory_gib"] > interleaved["predicted_memory_gib"]


def test_zero_table(rows):
    for stage, gigabytes in ZERO_TABLE.items():
        assert rows[f"ZeRO stage {stage}, 7.5 B on 64 GPUs"].metrics[
            "predicted_states_gb"
        ] == pytest.approx(gigabytes, abs=0.05)


def test_what_muon_adds_to_a_step(rows):
    """Its products, and messages to the owners of matrices and back.

    It keeps one moment of a matrix, not two.
    """
    adamw, muon = (
        rows[f"3.4 B, ZeRO-1 with {name}, 2 H200"].metrics for name in ("AdamW", "Muon, exchanged")
    )
    assert muon["predicted_step_ms"] - adamw["predicted_step_ms"] > 100
    assert muon["memory_gib_error_pct"] == pytest.approx(adamw["memory_gib_error_pct"], abs=0.5)


def test_a_case_of_a_file(tmp_path):
    (record,) = measured(EXPERIMENT, tmp_path, "published", case=(str(EXAMPLE),))
    metrics = record.metrics
    seconds = metrics["predicted_step_ms"] / 1e3
    assert metrics["predicted_tokens_per_s_per_gpu"] == pytest.approx(2 * 8192 / seconds)
    assert metrics["predicted_reserved_bytes"] > metrics["predicted_allocated_bytes"]


def test_a_cluster_of_ones_own_and_smaller_gradients():
    """Slower cards and larger gradients take longer; the object says the same as the name."""
    own = {"gpu": "a100", "hosts": 16, "card_bytes_per_s": 12.5e9, "cards_per_host": 4}
    case = {"model": "llama2-7B", "strategy": "fsdp2", "batch": 2}
    slow, named, halved = (
        predict(from_json(case | more)).time.step
        for more in (
            {"cluster": own},
            {"cluster": "dgx-a100:128"},
            {"cluster": own, "reduce": "bf16"},
        )
    )
    assert named < halved < slow
    like = own | {"card_bytes_per_s": 25e9, "cards_per_host": 8}
    assert predict(from_json(case | {"cluster": like})).time.step == pytest.approx(named)


def test_what_does_not_fit_says_by_how_much_and_what_would():
    text = shortage(
        from_json({"model": "llama-70B", "cluster": "dgx-h100:8", "strategy": "fsdp", "batch": 1})
    )
    assert "too few" in text and "need 16 GPUs" in text  # 16 bytes × 70.6 B parameters over 75.2 GB
    text = shortage(from_json(CASE | {"batch": 8}))
    assert "What fits" in text and "batch 1" in text


def test_gpus_that_share_a_sequence_take_longer_than_ones_own_and_as_much_memory(rows):
    """Each has 32,768 tokens, whose attention sees all others.

    Torchtitan's peaks, too, differ by 1 % at most.
    """
    shared = [record for name, record in rows.items() if "CP" in name]
    for less, more in itertools.pairwise(shared):
        assert 1.4 < more.metrics["predicted_step_ms"] / less.metrics["predicted_step_ms"] < 2
        assert more.metrics["predicted_memory_gib"] == pytest.approx(
            less.metrics["predicted_memory_gib"], rel=0.01
        )
    alone, shared = from_json(CASE), from_json(CASE | {"batch": 4, "layout": "tp2"})
    assert (shared.tokens, shared.shards) == (alone.tokens, 4) and predict(shared).mfu < predict(
        alone
    ).mfu


@pytest.mark.parametrize(
    "change, says",
    [
        ({"speed": 1}, "unknown.*speed.*fields: model"),
        ({"strategy": "magic"}, "allowed.*hsdp"),
        ({"strategy": "hsdp", "group": 3}, "groups of 3 do not divide 8 ranks.*1, 2, 4, 8"),
        ({"layout": "tp3"}, "3 do not divide 8 GPUs"),
        ({"model": {"d_model": 8}}, "a model takes d_model"),
        ({"cluster": "abacus:8"}, "cluster 'abacus' is unknown"),
        ({"cluster": {"gpu": "a100", "speed": 1}}, "a cluster takes name, gpu, hosts"),
        ({"reduce": "int8"}, "fp32, bf16"),
        ({"recompute": "half"}, "gate-up, none, selective, full"),
    ],
)
def test_refused_cases(change, says):
    with pytest.raises(ValueError, match=says):
        from_json(CASE | change)


def test_refused_files(tmp_path, capsys):
    broken, lacking = tmp_path / "a.json", tmp_path / "b.json"
    broken.write_text("{")
    lacking.write_text(json.dumps({"model": "8B"}))
    assert "is not JSON" in refused(
        capsys, "predict", "--case", str(broken), "--out", str(tmp_path)
    )
    assert "lacks" in refused(capsys, "predict", "--case", str(lacking), "--out", str(tmp_path))
    assert read_case(EXAMPLE).cluster.gpus == 64
