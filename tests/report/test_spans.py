"""The page's zoomable timeline: small, and in a browser it zooms and names what is pointed at."""

import json

import pytest

from distlab.report import page, write
from distlab.report.spans import FILE, Span, zoomable
from tests.report.browser import chromium, visit
from tests.report.test_view import RECORDS, VIEW

SPANS = [
    Span("compute", "aten::mm <b>", 0.0, 10.0),
    Span("compute", "aten::add", 2.0, 2.01),  # inside the other, and shorter
    Span("communication", "ncclDevKernel_AllReduce", 5.0, 15.0, "bucket 1 of 2, 25.2 MB"),
]
POINT = """((x, y) => {
  const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x, clientY: box.top + y}));
  return document.querySelector(".zoom output").textContent;
})"""


def test_short_neighbours_become_one_where_there_are_too_many():
    many = [Span("compute", f"kernel {n}", n * 0.001, n * 0.001 + 0.0009) for n in range(20_000)]
    data = zoomable({"naive": many, "few": SPANS})
    assert len(json.dumps(data)) < 100_000
    (naive, few) = data["rows"]
    assert "short ones" in data["names"][naive["spans"][0][3]]
    covered = sum(length for _, _, length, _, _ in naive["spans"])
    assert covered == pytest.approx(20_000, rel=0.15) and len(few["spans"]) == 3


def test_an_empty_step():
    assert zoomable({"local": []})["rows"] == [{"name": "local", "end_us": 0, "spans": []}]


@pytest.mark.skipif(chromium() is None, reason="needs Chromium, and none of its usual names is on the PATH")
def test_the_timeline_in_a_browser(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(zoomable({"bucketed": SPANS, "zero1": SPANS})))
    file = write(VIEW, RECORDS, tmp_path)
    assert file.stat().st_size < 1_000_000 and "<b>" not in file.read_text()
    seen = visit(
        file,
        f"""(() => {{
      const point = {POINT}, canvas = document.querySelector("canvas"), wide = canvas.clientWidth - 110;
      const whole = [point(110 + wide * 0.3, 8), point(110 + wide * 0.5, 24), point(110 + wide * 0.9, 8), point(40, 8)];
      const second = point(110 + wide * 0.5, 24 + 40);
      const inside = point(110 + wide * 2.005 / 15, 8);
      document.querySelector(".zoom button[value='0.5']").click();  // now from 3.75 to 11.25 ms
      const zoomed = [point(112, 8), point(112, 24)];
      document.querySelector(".zoom button[value='0']").click();
      const pen = canvas.getContext("2d");
      const colour = [...pen.getImageData(canvas.width * 0.5, 24 * devicePixelRatio, 1, 1).data];
      return {{whole, second, inside, zoomed, again: point(110 + wide * 0.3, 8), colour}};
    }})()""",
    )
    assert (seen.problems, seen.console) == ([], [])
    answer = seen.answer
    message = (
        "bucketed: ncclDevKernel_AllReduce (communication), 10.0 ms from 5.000 ms, bucket 1 of 2, 25.2 MB"
    )
    assert answer["whole"] == ["bucketed: aten::mm <b> (compute), 10.0 ms from 0.000 ms", message, "", ""]
    assert answer["second"] == message.replace("bucketed:", "zero1:")
    assert answer["inside"] == "bucketed: aten::add (compute), 0.010 ms from 2.000 ms"
    assert answer["zoomed"][0].startswith("bucketed: aten::mm") and answer["zoomed"][1] == ""
    assert answer["again"] == answer["whole"][0] and answer["colour"] == [86, 180, 233, 255]


def test_a_page_without_a_step_has_no_timeline():
    assert "canvas class" not in page.page(VIEW, RECORDS)
