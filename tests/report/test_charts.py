"""Pictures are drawn from numbers alone, look the same each time, and show what could not be
measured.
"""

import math
from types import SimpleNamespace

import pytest

from distlab.report.charts import (
    Panel,
    Series,
    lines,
    memory_areas,
    stacked_bars,
    timeline,
)
from distlab.report.style import WIDTH_PX
from tests.commands import python

MIB = 2**20
PARTS = {"compute": [6.0, 6.0, None, 6.0], "exposed communication": [-0.1, 3.0, "OOM", None]}
LABELS = ["local", "naive", "flat", "fsdp"]
ROWS = {
    "local": {"compute": [(0, 10)], "copies": []},
    "naive": {
        "compute": [(0, 6), (6, 10)],
        "communication": [(8, 14)],
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
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


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
        tmp_path / "a.png",
        ["a"],
        {"x": [2.0], "y": [3.0]},
        title="",
        unit="ms",
        whiskers=[(4.5, 6.0)],
    )
    (segment,) = drawn[0].axes[0].containers[-1].lines[2][0].get_segments()
    assert [x for x, _ in segment] == [4.5, 6.0]


def test_a_total_that_is_not_the_sum_is_written_and_has_the_whisker(tmp_path, drawn):
    """A step of 4 ms whose causes add up to 5, because one is offset by a negative one."""
    parts = {"x": [2.0], "y": [3.0]}
    stacked_bars(
        tmp_path / "a.png", ["a"], parts, title="", unit="ms", whiskers=[(3.5, 4.5)], totals=[4.0]
    )
    (segment,) = drawn[0].axes[0].containers[-1].lines[2][0].get_segments()
    assert [x for x, _ in segment] == [3.5, 4.5]
    assert "4.00" in texts(drawn[0]) and "5.00" not in texts(drawn[0])


def test_timeline_has_a_row_per_strategy_and_says_when_nothing_was_sent(tmp_path, drawn):
    path = tmp_path / "timeline.png"
    timeline(path, ROWS, title="One step")
    assert png_size(path)[0] == WIDTH_PX
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["local", "naive"]
    assert texts(drawn[0]) == ["no communication"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [
        "compute",
        "communication, covered by compute",
        "communication, exposed",
    ]  # no copies ran
    timeline(path, ROWS, title="One step", phases={"naive": {"forward": 0.0, "backward": 4.0}})
    assert {"forward", "backward"} <= set(texts(drawn[1]))
    assert "ms" in axes.get_xlabel() and axes.get_xlim()[0] == 0 and axes.get_xlim()[1] >= 14


def test_timeline_shows_the_host_below_the_device(tmp_path, drawn):
    rows = {"rank 0": {"compute": [(4, 9)], "host waits": [(9, 10)], "host launches": [(1, 1)]}}
    timeline(tmp_path / "timeline.png", rows, title="One step")
    axes = drawn[0].axes[0]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["compute", "host waits", "host launches"]
    (launch,) = axes.collections[-1].get_segments()
    assert [tuple(point) for point in launch] == [(1.0, 1.58), (1.0, 2.42)]


def test_measured_points_take_the_colour_of_their_line(tmp_path, drawn):
    series = [
        # a low end above the point draws no bar below it
        Series("ours", [1, 2], [3.0, 4.0], [2.5, 4.5], [3.5, 5.0]),
        Series("peer", [1, 2], [1.0, math.inf], hollow=True),
        Series("ours, predicted", [1, 2], [3.0, 4.0], line="--", like="ours"),
    ]
    lines(tmp_path / "a.png", [Panel("left", "ranks", "ms", series)], title="")
    (left,) = drawn[0].axes
    line_of = {line.get_label(): line for line in left.lines}
    ours, peer, predicted = (line_of[each.label] for each in series)
    assert ours.get_color() == predicted.get_color() != peer.get_color()
    bars = [bar.tolist() for bar in left.collections[0].get_segments()]
    assert bars == [[[1, 2.5], [1, 3.5]], [[2, 4.0], [2, 5.0]]]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        s.label for s in series
    ]


@pytest.mark.parametrize(
    "lengths, numbers",
    [([128, 65536], {"256", "16,384"}), ([300, 400], {"300", "400"})],
    ids=["long", "without a power"],
)
def test_logarithmic_axes_show_plain_numbers(tmp_path, drawn, lengths, numbers):
    series = [Series("ours", lengths, [0.01, 20.0])]
    base = 2 if lengths[0] == 128 else 10
    lines(tmp_path / "a.png", [Panel("", "length", "ms", series, log_x=base, log_y=True)], title="")
    (axes,) = drawn[0].axes
    along_x = {text.get_text() for text in axes.get_xticklabels(which="both")}
    along_y = {text.get_text() for text in axes.get_yticklabels(which="both")}
    assert numbers <= along_x
    assert {"0.1", "1", "10"} <= along_y
    assert not any("$" in text for text in along_x | along_y)


def test_small_panels_say_what_is_not_finite(tmp_path, drawn):
    panels = [
        Panel("", "step", "loss", [Series("good", [1, 2], [2.0, 1.0], line="-"), bad], log_x=None)
        for bad in (
            Series("bad", [1, 2], [math.nan] * 2),
            Series("bad", [], []),
            Series("bad", [1, 2], [1.0, 900.0]),
        )
    ]
    lines(tmp_path / "a.png", panels, title="")
    notes = []
    for axes in drawn[0].axes:
        notes.append([text.get_text() for text in axes.texts])
    assert notes == [["bad: no finite value"], ["bad: no value"], []]
    assert len(drawn[0].legends) == 1


def test_areas_stand_on_each_other_and_empty_ones_are_left_out(tmp_path, drawn):
    memory = SimpleNamespace(
        curves=lambda: (
            [0.0, 2.0],
            {"parameters": [MIB, MIB], "nothing": [0, 0], "activations": [0, 2 * MIB]},
        ),
        peak=lambda: (2.0, {"parameters": MIB, "activations": 2 * MIB}),
        step_ms=4.0,
        phases={"forward": (0, 4)},
    )
    memory_areas(tmp_path / "a.png", memory, title="")
    axes = drawn[0].axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "activations",
        "parameters",
    ]
    tops = [area.get_paths()[0].get_extents().y1 for area in axes.collections]
    assert tops == [1.0, 3.0] and texts(drawn[0]) == ["forward", "peak 3.0 MiB"]


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, distlab.report.charts; assert 'matplotlib' not in sys.modules"
    assert python("-c", code).returncode == 0
