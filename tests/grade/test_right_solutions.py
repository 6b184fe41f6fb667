"""`distlab grade` on right solutions: no false alarm at two and three ranks."""

import os
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from distlab.grade import grade
from distlab.grade.examination import _Part
from distlab.grade.report import BROKEN, HOLDS, NOT_EXAMINED, NOT_HANDED_IN, REFUSED
from tests.commands import python

SUBMISSIONS = Path(__file__).parent / "submissions"
# Parts that torch has no class for.
TORCH_LACKS = [
    "ddp-individual",
    "attention-pytorch",
    "attention-triton",
    "rmsnorm-pytorch",
    "rmsnorm-triton",
]


def not_right(report):
    """Return the rows of what was handed in that are not right, in one line each."""
    wrong = []
    for row in report.rows:
        if row.status in (BROKEN, NOT_EXAMINED):
            wrong.append(f"{row.part}: {row.invariant} on {row.ranks}: {row.seen}")
    return wrong


@pytest.mark.parametrize(
    "style, part",
    [
        ("classes", "fsdp"),
        ("closures", "ddp-bucketed"),
        ("flat_buffers", "sharded-optimizer"),
        ("labs_own", "attention-pytorch"),
    ],
)
def test_a_right_solution_keeps_every_invariant_of_a_part(style, part, monkeypatch):
    """Each kind of part, and each style but torch's own, which starts slowly: see below.

    Three ranks divide parameters unevenly, and take each path that two take. So an invariant of
    both is examined on three, and below on both.
    """
    on_all = _Part._examined

    def on_most(examination, invariant, ranks):
        return on_all(examination, invariant, ranks[-1:])

    monkeypatch.setattr(_Part, "_examined", on_most)
    report = grade(SUBMISSIONS, adapters=style, only=[part])
    assert not_right(report) == []
    assert report.counts()[HOLDS] >= 9


@pytest.mark.commands
@pytest.mark.parametrize("style", ["classes", "closures", "flat_buffers", "labs_own"])
def test_a_right_solution_keeps_every_invariant_of_every_part(style):
    report = grade(SUBMISSIONS, adapters=style)
    assert not_right(report) == []
    counts = report.counts()
    # Errors are accepted where they do no harm: `closures` refuses layers without a gradient.
    assert counts[NOT_HANDED_IN] == 0 and counts[REFUSED] <= 6 and counts[HOLDS] >= 190


@pytest.mark.commands
def test_torchs_own_wrappers_keep_every_invariant():
    report = grade(SUBMISSIONS, adapters="torch_own")
    assert not_right(report) == []
    missing = [row.part for row in report.rows if row.status == NOT_HANDED_IN]
    assert missing == TORCH_LACKS


def test_children_interpret_triton_on_a_cpu_without_a_variable(monkeypatch):
    seen = []
    start = ForkServerProcess.start

    def noting_start(process):
        seen.append(os.environ["TRITON_INTERPRET"])
        start(process)

    monkeypatch.setattr(ForkServerProcess, "start", noting_start)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    report = grade(SUBMISSIONS, adapters="classes", only=["rmsnorm-triton"])
    assert not_right(report) == [] and report.counts()[HOLDS] == 17
    assert set(seen) == {"1"} and os.environ["TRITON_INTERPRET"] == "0"


@pytest.mark.commands  # the same, with a fork server that imports Triton for this command
def test_the_command_interprets_triton_on_a_cpu(tmp_path):
    words = ["grade", str(SUBMISSIONS), "--adapters", "classes", "--only", "rmsnorm-triton"]
    words += ["--out", str(tmp_path)]
    code = f"import sys; from launch.__main__ import main; sys.exit(main({words}))"
    done = python("-c", code, TRITON_INTERPRET="0")
    assert done.returncode == 0 and "17 of 17 hold" in done.stdout, done.stdout + done.stderr
