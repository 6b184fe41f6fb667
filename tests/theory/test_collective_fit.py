"""Fits on made-up machines whose constants are known."""

import pytest

from distlab.theory.collective_time import CollectiveFit, Piece, fit_collective, relative_errors

SIZES = [4096 * 4**k for k in range(10)]


def test_a_change_of_algorithm_takes_a_second_piece():
    small, large = Piece(1e9, 1e-5), Piece(300e9, 1e-4, 1e6)
    true = CollectiveFit((small, large))
    seconds = [true.seconds(size) for size in SIZES]
    fit = fit_collective(SIZES, seconds)
    assert len(fit.pieces) == 2
    assert max(map(abs, relative_errors(fit, SIZES, seconds))) < 1e-6
    assert fit.seconds(1) == pytest.approx(small.seconds(1))
    assert fit.seconds(1e12) == pytest.approx(large.seconds(1e12))


def test_small_sizes_count_as_much_as_large_ones():
    """A least-squares fit of the seconds would miss the latency of this machine by any factor."""
    seconds = [2e-5 + size / 1e11 for size in SIZES]
    seconds[-1] *= 1.05  # noise of the largest: 0.5 ms, 27 times the latency
    (piece,) = fit_collective(SIZES, seconds).pieces
    assert piece.seconds(4096) == pytest.approx(2e-5, rel=0.05)


def test_what_nothing_explains_does_not_spoil_the_rest():
    """Milliseconds of a ring of whole tensors on four H200s (NCCL), 4 KiB to 2 GiB: the first two
    met a busy host.
    """
    times = [
        0.414,
        0.412,
        0.242,
        0.241,
        0.235,
        0.232,
        0.243,
        0.232,
        0.239,
        0.226,
        0.237,
        0.237,
        0.449,
        0.797,
        1.494,
        2.881,
        3.369,
        5.936,
        11.7,
        23.221,
    ]
    sizes, seconds = [4096 * 2**k for k in range(20)], [ms / 1e3 for ms in times]
    errors = relative_errors(fit_collective(sizes, seconds), sizes, seconds)
    assert max(map(abs, errors)) > 0.2
    assert (
        max(abs(error) for size, error in zip(sizes, errors, strict=True) if size >= 2**20) < 0.08
    )
