"""Small multiples: one panel per configuration, one line per variant."""

from distlab.report import Record
from distlab.report.panels import panels


def test_a_panel_per_shape_and_none_for_missing_numbers(tmp_path, monkeypatch):
    import matplotlib.figure

    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path, **_: (drawn.append(self),
                                                                                     path.write_bytes(b"x")))
    records = [
        Record("x", variant, {"dtype": "a", "head_dim": d, "length": n}, {"ms": None if n == 8 else n / d}, {}, None)
        for variant in ("ours", "peer") for d in (128, 16) for n in (8, 4, 2)
    ]  # fmt: skip
    panels(records, tmp_path / "picture.png", "ms", "time, ms")
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["dtype a, head_dim 16", "dtype a, head_dim 128"]
    for axes, d in zip(figure.axes, (16, 128), strict=True):
        assert [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == [
            (variant, [2, 4], [2 / d, 4 / d]) for variant in ("ours", "peer")
        ]
