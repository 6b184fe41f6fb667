"""Pictures are drawn from numbers alone, look the same each time, and show what could not be measured."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from distlab.report import plot
from distlab.report.figure import GREYS, OKABE_ITO, WIDTH_PX
from distlab.report.plot import stacked_bars, timeline

PARTS = {"compute": [6.0, 6.0, None, 6.0], "exposed communication": [-0.1, 3.0, "OOM", None]}
LABELS = ["local", "naive", "flat", "fsdp"]
ROWS = {
    "local": {"compute": [(0, 10)], "copies": []},
    "naive": {
        "compute": [(0, 6), (6, 10)],
        "communication": [SimpleNamespace(start_ms=8, end_ms=14)],
        "exposed": [(10, 14)],
    },
}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, so that tests can ask what they show."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1]
    )
    return figures


def png_size(path):
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_bars_show_totals_and_gaps(tmp_path, drawn):
    path = tmp_path / "step_time.png"
    whiskers = [(5.5, 6.2), None, None, (5.0, 7.0)]
    stacked_bars(path, LABELS, PARTS, title="Step", unit="ms", whiskers=whiskers)
    assert png_size(path)[0] == WIDTH_PX
    shown = texts(drawn[0])
    assert {"5.90", "9.00", "OOM", "≥ 6.00"} <= set(shown)
    stacked_bars(path, ["a"], {"compute": [None]}, title="Step", unit="ms")
    assert texts(drawn[1]) == ["n/a"]


def test_the_whisker_stands_on_the_total(tmp_path, drawn):
    stacked_bars(
        tmp_path / "a.png", ["a"], {"x": [2.0], "y": [3.0]}, title="", unit="ms", whiskers=[(4.5, 6.0)]
    )
    (segment,) = drawn[0].axes[0].containers[-1].lines[2][0].get_segments()
    assert [tuple(point) for point in segment] == [(4.5, 0.0), (6.0, 0.0)]


def test_parts_stand_one_after_the_other_and_negative_ones_are_not_drawn(tmp_path, drawn):
    stacked_bars(tmp_path / "a.png", LABELS[:2], {n: v[:2] for n, v in PARTS.items()}, title="", unit="ms")
    bars = sorted((bar.get_y(), bar.get_x(), bar.get_width()) for bar in drawn[0].axes[0].patches)
    assert [(x, width) for _, x, width in bars] == [(0, 6), (6, 0), (0, 6), (6, 3)]


def test_timeline_has_a_row_per_strategy_and_says_when_nothing_was_sent(tmp_path, drawn):
    path = tmp_path / "timeline.png"
    timeline(path, ROWS, title="One step", marks={"naive": [("forward", 0, 4), ("backward", 4, 10)]})
    assert png_size(path)[0] == WIDTH_PX
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["local", "naive"]
    assert {"forward", "backward", "no communication"} == set(texts(drawn[0]))
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [
        "compute",
        "communication, covered by compute",
        "communication, exposed",
    ]  # no copies ran
    assert "ms" in axes.get_xlabel() and axes.get_xlim()[0] == 0 and axes.get_xlim()[1] >= 14


def test_touching_intervals_become_one_bar():
    assert plot._merged([(6, 10), (0, 6), (12, 13), (12.2, 12.5)]) == [(0, 10), (12, 1)]


def test_pictures_are_deterministic(tmp_path):
    for name in ("a.png", "b.png"):
        timeline(tmp_path / name, ROWS, title="One step")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_colours_tell_the_parts_apart():
    names = ["compute", "exposed communication", "optimizer", "first other", "second other"]
    assert len({plot._colour(name, names) for name in names}) == len(names)
    assert set(plot.COLOURS.values()) <= {*OKABE_ITO.values(), *GREYS.values()}


def test_mistakes_are_refused_and_leave_no_file(tmp_path):
    path = tmp_path / "a.png"
    with pytest.raises(ValueError, match="compute"):
        stacked_bars(path, LABELS, {"compute": [1.0]}, title="", unit="ms")
    with pytest.raises(ValueError, match="lanes among"):
        timeline(path, {"a": {"kommunikation": []}}, title="")
    with pytest.raises(ValueError, match="ends before"):
        timeline(path, {"a": {"compute": [(2, 1)]}}, title="")
    with pytest.raises(ValueError, match="rows"):
        timeline(path, {}, title="")
    assert not list(tmp_path.iterdir())


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, distlab.report.plot; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
