"""`distlab grade` names the invariant that each planted fault breaks; a public suite sees few."""

from pathlib import Path

import pytest

from distlab.grade.examination import _Copy, _Part
from distlab.grade.hooks import PARTS
from distlab.grade.report import BROKEN
from distlab.testing import RanksFailed, run_ranks
from tests.grade.faults import FAULTS, SUBMISSIONS
from tests.grade.public_suite import passes


def examined(folder, fault):
    """Return title → status of the invariants that share the experiment of the named one.

    Ranks are two, and other experiments are left out, because a complete examination takes a
    minute.
    """
    part = next(part for part in PARTS if part.name == fault.part)
    copy = _Copy(folder)
    try:
        examination = _Part(part, copy, fault.style, "cpu", "gloo", 25.0, print)
        invariants = examination.invariants()
        named = next(each for each in invariants if each.title == fault.title)
        found = {}
        for invariant in invariants:
            is_same = invariant.experiment == named.experiment
            if is_same and invariant.settings == named.settings:
                number = 2 if 2 in invariant.ranks else 0
                found[invariant.title] = examination._examined(invariant, [number])
        return found
    finally:
        copy.remove()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_breaks_the_invariant_that_names_it(fault, tmp_path):
    fault.plant(tmp_path)
    rows = examined(tmp_path, fault)
    others = [title for title, row in rows.items() if row.status == BROKEN and title != fault.title]
    print(f"{len(others)} other invariants of the same experiment are broken: {others}")
    row = rows[fault.title]
    print(f"expected {row.expected}; seen {row.seen}")
    assert row.status == BROKEN, rows


def is_found_by_public_suite(folder, fault):
    """Return whether a suite in the public form fails on one of two ranks."""
    try:
        return not all(
            run_ranks(passes, 2, str(folder), fault.style, fault.part, group_timeout_s=5)
        )
    except RanksFailed as failed:
        print(failed)
        return True


def test_right_solutions_pass_the_public_suite():
    for part in {fault.part for fault in FAULTS}:
        for style in ("classes", "closures", "flat_buffers"):
            assert all(run_ranks(passes, 2, str(SUBMISSIONS), style, part)), (style, part)


@pytest.mark.commands  # a claim about other suites, which no change of the lab can make wrong
def test_a_suite_in_the_public_form_finds_a_third_of_the_faults(tmp_path):
    found = []
    for number, fault in enumerate(FAULTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault.plant(folder)
        if is_found_by_public_suite(folder, fault):
            found.append(fault.name)
    print(f"{len(found)} of {len(FAULTS)}: {found}")
    assert found == [fault.name for fault in FAULTS if fault.is_public]
    assert len(FAULTS) == 24 and len(found) <= 12


def test_the_page_lists_the_faults_and_who_finds_them():
    page = (Path(__file__).parents[2] / "docs" / "learn" / "grade.md").read_text()
    for fault in FAULTS:
        public = "yes" if fault.is_public else "no"
        assert f"| {fault.part} | {fault.name} | {public} | {fault.title} |" in page
