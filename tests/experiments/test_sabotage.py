"""Each mistake is caught by the check that is named for it, and its healthy counterpart passes all
of them.
"""

import pytest

from distlab.report.record import read_json
from distlab.testing import run_ranks
from experiments import sabotage
from experiments.sabotage import ERROR, MISTAKES, MODEL, PAIRS, caught_by, examine, examine_both
from launch.__main__ import main
from tests.commands import ROOT
from tests.experiments.frame import measured

STEPS = 1  # curves are for people; the checks have their own steps


def examine_all(context):
    """Healthy runs that are alike are made once."""
    healthy, results = {}, {}
    for name, mistake in MISTAKES.items():
        key = (mistake.healthy, id(mistake.task), mistake.layout, mistake.max_grad_norm)
        if key not in healthy:
            healthy[key] = examine(context, name, False, 2, STEPS)
        results[name] = healthy[key], examine_broken(context, name)
    return results


def examine_broken(context, name):
    """What is caught by an error raises on all ranks at one place, so that they can go on
    together.
    """
    if MISTAKES[name].check != ERROR:
        return examine(context, name, True, 2, STEPS)
    with pytest.raises(RuntimeError) as caught:
        examine(context, name, True, 2, STEPS)
    return {"error": str(caught.value)}


@pytest.fixture(scope="module")
def examined():
    return run_ranks(examine_all, 2, deadline_s=120.0)[0]


def test_errors_say_what_to_do(examined):
    assert "finish_gradient_synchronization()" in examined["finish forgotten"][1]["error"]
    assert "clip_grad_norm_" in examined["torch's clipping"][1]["error"]


@pytest.mark.parametrize("name", MISTAKES)
def test_its_check_catches_it_and_only_it(examined, name):
    healthy, broken = examined[name]
    assert caught_by(healthy) == []
    assert MISTAKES[name].check in caught_by(broken)


@pytest.mark.parametrize(
    "name", [name for name, mistake in MISTAKES.items() if mistake.layout.ranks > 1]
)
def test_the_first_loss_hides_what_is_wrong_where_ranks_share_a_model(examined, name):
    """It moves by less than a hundredth of 3.47, the logarithm of the vocabulary."""
    healthy, broken = examined[name]
    assert abs(broken["loss"][0] - healthy["loss"][0]) < 0.01


def test_without_zigzag_the_last_rank_sees_most_pairs(examined):
    """All else is right.

    The last two of 2P chunks of c queries see c²(4P − 3) pairs before them, and c(c + 1).
    """
    _, broken = examined["no zig-zag"]
    ranks, chunk = 2, MODEL.context_length // 4
    assert broken["pairs_of_busiest"] == chunk**2 * (4 * ranks - 3) + chunk * (chunk + 1)
    assert caught_by(broken) == [PAIRS]


def test_a_mistake_that_passes_is_reported(monkeypatch, examined, tmp_path, capsys):
    """The verdict is not for show: a run with the mistake that is as healthy as the other is no
    catch.
    """
    healthy, _ = examined["no broadcast"]
    monkeypatch.setattr(sabotage, "run_ranks", lambda *args, **options: [[healthy, healthy]])
    assert main(["run", "sabotage", "--preset", "smoke", "--out", str(tmp_path)]) == 1
    assert "no broadcast: not caught by one process" in capsys.readouterr().out


def test_ranks_that_fail_are_caught_too(monkeypatch, examined, tmp_path):
    healthy, _ = examined["no broadcast"]

    def run_ranks(fn, ranks, name, *args, **options):
        if fn is examine_both:
            raise sabotage.RanksFailed({0: "Traceback\nRuntimeError: became ready twice"})
        return [healthy]

    monkeypatch.setattr(sabotage, "run_ranks", run_ranks)
    (record,) = measured(sabotage.EXPERIMENT, tmp_path)
    assert record.metrics["caught_by"] == ERROR and "ready twice" in record.metrics["error"]


def test_the_committed_record_caught_all():
    records = read_json(ROOT / "records/sabotage/cpu-all.json")
    assert [record.variant for record in records] == list(MISTAKES) and not sabotage.wrong_rows(
        records
    )
