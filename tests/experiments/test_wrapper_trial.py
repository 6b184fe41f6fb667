"""Twelve wrappers in one run of `ddp_bench`: each has its row, also one that hangs or exits."""

import time

import pytest

from distlab.testing import DIED, LOST_PEER, NO_ANSWER, RAISED, TOO_LARGE, RanksFailed
from experiments import ddp_bench
from experiments.ddp_bench.comparison import wrong_rows
from experiments.ddp_bench.wrapper_trial import what_happened
from tests.experiments.frame import measured

WRAPPERS = "tests.bench.twelve_wrappers:"
TIMEOUT_S = 5.0  # of a collective, after which a rank that hangs is noticed
MEMORY_GIB = 0.7  # most of what others take is torch itself
VERDICTS = {
    "after_backward": "right",
    "hooks": "right",
    "flat_buckets": "right",
    "torch_ddp": "right",
    "fsdp2": "right",
    "summed": "WRONG",
    "no_broadcast": "WRONG",
    "late": "WRONG",
    "raises": "failed",
    "hangs": "failed",
    "exits": "failed",
    "eats_memory": "failed",
}
SENTENCES = {
    "raises": "raised on rank 1: the training step failed at twelve_wrappers.py:",
    "hangs": "hangs: the other ranks waited 5 s for rank 1, which was at twelve_wrappers.py:",
    "exits": "ended the process of rank 1 (exit code 3)",
    "eats_memory": f"took more than {MEMORY_GIB} GiB on rank 1",
}


# The four that fail and one that is wrong. `labs_bucketed` is right. The other seven only repeat
# `right` and `WRONG`: test_own_model.py has their kinds, and tests/test_check.py their mistakes.
OF_EACH_KIND = ["late", "raises", "hangs", "exits", "eats_memory"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OF_EACH_KIND, id="of each kind"),
        pytest.param([*VERDICTS], id="all", marks=pytest.mark.commands),
    ],
)
def test_every_wrapper_has_its_row(names, tmp_path):
    begin = time.monotonic()
    records = measured(
        ddp_bench.EXPERIMENT,
        tmp_path,
        timeout_s=TIMEOUT_S,
        strategies=("local", "bucketed"),
        wraps=tuple(WRAPPERS + name for name in [*names, "labs_bucketed"]),
        wrap_memory_gib=MEMORY_GIB,
        check_steps=1,
        profile_steps=0,
    )
    took_s = time.monotonic() - begin
    rows = {record.variant.removeprefix(WRAPPERS): record.metrics for record in records}
    verdicts = {name: metrics.get("verdict") for name, metrics in rows.items()}
    expected = {"local": None, "bucketed": None, "labs_bucketed": "right"}
    for name in names:
        expected[name] = VERDICTS[name]
    assert verdicts == expected
    for name, sentence in SENTENCES.items():
        assert rows[name]["verdict_detail"].startswith(sentence), rows[name]
        assert rows[name]["step_p50_ms"] == "failed"
    for name in rows.keys() - SENTENCES:  # wrong ones are timed as well
        assert rows[name]["step_p50_ms"] > 0, name
    for name in ("collectives_per_step", "comm_bytes_per_step"):
        assert rows["labs_bucketed"][name] == rows["bucketed"][name]
    assert rows["labs_bucketed"]["vs_local"] > 0
    # A line for each wrong one, and the exit code 1.
    assert len(wrong_rows(records)) == sum(VERDICTS[name] != "right" for name in names)
    # Not one timeout for each wrapper: only one of them hangs.
    assert took_s < 100, took_s


@pytest.mark.parametrize(
    "kind, failures, written, sentence",
    [
        (
            RAISED,
            {0: "SystemExit: 4", 1: "SystemExit: 4"},
            "the wrapper ended the process of rank 0 (sys.exit(4))\n"
            "the wrapper ended the process of rank 1 (sys.exit(4))\n",
            "ended the process of every rank (sys.exit(4))",
        ),
        (  # on NCCL, where rank 1 cannot answer before its collectives have ended
            NO_ANSWER,
            {0: "no answer within 65 s", 1: "no answer within 65 s"},
            "loading\nthe wrapper raised on rank 1: it failed at a.py:3 (ValueError: no)\n",
            "raised on rank 1: it failed at a.py:3 (ValueError: no)",
        ),
        (  # on NCCL, where a thread ends a rank that waits in vain
            DIED,
            {0: "the process died, exit code 1"},
            "rank 0 was in a collective, and rank 1 did not come: it has fewer batches",
            "hangs: a rank waited 5 s in a collective: rank 1 did not come",
        ),
        (
            LOST_PEER,
            {0: "RuntimeError: Timed out", 1: "RuntimeError: Timed out"},
            "",
            "hangs: a rank waited 5 s in a collective, which not every rank joined",
        ),
        (
            TOO_LARGE,
            {1: "the process took more than 0.7 GiB"},
            "",
            "took more than 0.7 GiB on rank 1",
        ),
    ],
)
def test_the_sentence_names_the_cause(kind, failures, written, sentence):
    failed = RanksFailed(failures, "", kind)
    assert what_happened(failed, written, 2, 5.0) == sentence


def test_a_third_value_builds_the_optimizer(tmp_path):
    """torch's ZeRO-1 broadcasts each parameter from the rank that stepped it."""
    wraps = tuple(f"tests.bench.own_wrappers:{name}" for name in ("torch_ddp", "torch_zero"))
    records = measured(
        ddp_bench.EXPERIMENT, tmp_path, strategies=("local",), wraps=wraps, profile_steps=0
    )
    _, ddp, zero = (record.metrics for record in records)
    assert ddp["verdict"] == zero["verdict"] == "right"
    assert zero["collectives_per_step"] > ddp["collectives_per_step"]
    assert zero["comm_bytes_per_step"] > ddp["comm_bytes_per_step"]
