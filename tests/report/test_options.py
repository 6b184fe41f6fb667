"""Types of options refuse what no experiment can use."""

from argparse import ArgumentTypeError

import pytest

from distlab.report.options import names, real, seed, whole


@pytest.mark.parametrize(
    "parse, text, expected",
    [
        (whole(), "0", "0: give a whole number of at least 1"),
        (whole(0), "-5", "-5: give a whole number of at least 0"),
        (whole(), "1.5", "'1.5': give a whole number"),
        (whole(), "nan", "'nan': give a whole number"),
        (whole(0, 32), "33", "at most 32"),
        (seed, str(2**63), "at most"),
        (real(), "nan", "nan: give a finite number"),
        (real(above=0), "0", "0: give a finite number above 0"),
        (real(above=0), "inf", "give a finite number above 0"),
        (real(least=0), "-1", "-1: give a finite number of at least 0"),
        (real(least=0, most=1), "2", "of at least 0 and at most 1"),
        (real(), "many", "'many': give a finite number"),
        (names(("a", "b")), "a,c", "'c' is unknown; allowed: a, b"),
        (names(("a", "b")), "", "'' is unknown; allowed: a, b"),
    ],
)
def test_refused(parse, text, expected):
    with pytest.raises(ArgumentTypeError) as refused:
        parse(text)
    assert expected in str(refused.value)


def test_accepted():
    assert (whole()("1"), whole(0)("0"), seed("0")) == (1, 0, 0)
    assert (real(least=0)("0"), real(above=0)("1e-300"), real(most=1)("-7")) == (0.0, 1e-300, -7.0)
    assert names(("a", "b"))("b, a,b") == ("b", "a")
    assert names(("a", "b"), everything=("a",))("all") == ("a",)
