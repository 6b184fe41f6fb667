"""Schedules as lists: closed forms of the bubble and of what is held, and what `check` refuses."""

import pytest

from distlab.parallel.schedules import (
    CHUNKS,
    SCHEDULES,
    Action,
    check,
    draw,
    held,
    idle_share,
    interleaved,
    one_f_one_b,
    simulate,
    zero_bubble,
)

SIZES = [(2, 2), (2, 6), (3, 3), (3, 12), (4, 4), (4, 8), (5, 2)]
WHOLE = {"F": 1.0, "B": 2.0}


@pytest.mark.parametrize("ranks, batches", SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_is_the_closed_form(name, ranks, batches):
    """(p − 1)/(v·m + p − 1): Narayanan et al.

    2021, where it is divided by the time without a bubble.
    """
    if batches % ranks and name in CHUNKS:
        with pytest.raises(ValueError, match="not a multiple"):
            SCHEDULES[name](ranks, batches)
        return
    schedule = SCHEDULES[name](ranks, batches)
    check(schedule)
    chunks = CHUNKS.get(name, 1)
    found = idle_share(simulate(schedule, lambda action: WHOLE[action.kind] / chunks))
    assert found == pytest.approx((ranks - 1) / (chunks * batches + ranks - 1))


@pytest.mark.parametrize("ranks, batches", [(2, 2), (2, 6), (3, 3), (4, 8), (4, 12)])
def test_zero_bubble_is_as_published(ranks, batches):
    """ZB-H1 (Qi et al.

    2023, table 1): (p − 1)(F + B − W) idle, and no more held than 1F1B's fullest rank.
    """
    schedule = zero_bubble(ranks, batches)
    check(schedule)
    seconds = {"F": 3.0, "B": 3.0, "W": 2.0}
    end = max(steps[-1].end for steps in simulate(schedule, lambda action: seconds[action.kind]))
    assert end == batches * 8.0 + (ranks - 1) * 4.0
    assert max(map(held, schedule)) == max(map(held, one_f_one_b(ranks, batches))) == ranks


def test_what_is_held():
    assert [held(actions) for actions in SCHEDULES["gpipe"](3, 5)] == [5, 5, 5]
    assert [held(actions) for actions in one_f_one_b(3, 5)] == [3, 2, 1]
    assert [held(actions) for actions in interleaved(3, 6)] == [8, 6, 4]


def test_messages_delay():
    """With a message of 1, two ranks lose the way there and the way back."""
    plain, late = (
        simulate(one_f_one_b(2, 1), lambda action: 1.0, message) for message in (0.0, 1.0)
    )
    assert [steps[-1].end for steps in plain] == [4.0, 3.0] and [
        steps[-1].end for steps in late
    ] == [6.0, 4.0]


def test_a_picture():
    assert (
        draw(simulate(one_f_one_b(2, 2), lambda action: WHOLE[action.kind]))
        == "01..aa.bb\n.0aa1bb.."
    )


def broken(**changes):
    schedule = one_f_one_b(2, 2)
    for rank, actions in changes.items():
        schedule[int(rank[1:])] = actions
    return schedule


F, B, W = (lambda stage, batch, kind=kind: Action(kind, stage, batch) for kind in "FBW")


@pytest.mark.parametrize(
    "schedule, said",
    [
        (
            broken(
                r0=[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], r1=[F(1, 0), F(1, 1), B(1, 0), B(1, 1)]
            ),
            "rank 0 for B0.0",
        ),
        (broken(r0=[F(0, 0), F(0, 1), B(0, 0), B(0, 1), W(0, 0)]), "W0.1, W1.0, W1.1"),
        (
            broken(
                r1=[F(1, 0), F(1, 1), B(1, 1), B(1, 0)], r0=[F(0, 0), F(0, 1), B(0, 1), B(0, 0)]
            ),
            "of stage 0 in",
        ),
        ([[F(1, 0), B(1, 0)], [F(0, 0), B(0, 0)]], "stages of other ranks"),
    ],
)
def test_a_schedule_that_is_refused(schedule, said):
    with pytest.raises(ValueError, match=said):
        check(schedule)
