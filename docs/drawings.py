"""Drawings of the learn pages, from the lab's own code and lists: `python docs/drawings.py` writes
docs/images/*.svg.

A drawing is rows of cells: a cell begins somewhere, has a width, a text and a colour.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from distlab.comm import ring
from distlab.parallel.buckets import plan_buckets
from distlab.parallel.context_parallel import zigzag_chunks
from distlab.parallel.fsdp.layout import RowLayout
from distlab.parallel.schedules import SCHEDULES, simulate

IMAGES = Path(__file__).parent / "images"
RANKS, BATCHES, WIDTH, HEIGHT, LEFT = 4, 6, 640, 26, 96
FILLS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7")

Cell = tuple[float, float, str, int]  # where it begins, how long it is, text, colour
Row = tuple[str, Sequence[Cell]]


def svg(rows: Sequence[Row]) -> str:
    """Return a picture of these rows, as wide as their furthest cell."""
    scale = WIDTH / max(start + length for _, cells in rows for start, length, _, _ in cells)
    size = f'width="{LEFT + WIDTH + 10}" height="{HEIGHT * len(rows) + 10}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    ]
    for number, (label, cells) in enumerate(rows):
        top = 5 + number * HEIGHT
        parts.append(f'<text x="4" y="{top + 17}" fill="#888888">{label}</text>')
        for start, length, text, colour in cells:
            place = f'x="{LEFT + start * scale:.1f}" y="{top}"'
            size = f'width="{length * scale:.1f}" height="{HEIGHT - 3}"'
            parts.append(f'<rect {place} {size} fill="{FILLS[colour]}" stroke="#ffffff"/>')
            middle = LEFT + (start + length / 2) * scale
            if length * scale > 6 * len(text):
                place = f'x="{middle:.1f}" y="{top + 17}"'
                parts.append(f'<text {place} text-anchor="middle" fill="#111111">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def ring_rows() -> list[Row]:
    """What each rank of a ring passes on in each round of an all-reduce."""
    rows = []
    for rank in range(RANKS):
        cells: list[Cell] = []

        def note(outgoing: torch.Tensor, *_: object, cells: list[Cell] = cells) -> None:
            chunk = outgoing.storage_offset()
            cells.append((len(cells), 1, f"chunk {chunk}", chunk))

        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: RANKS)
        with patch.object(ring, "_pass_on", note):
            ring.all_reduce(torch.zeros(RANKS), group)
        rows.append((f"rank {rank}", cells))
    return rows


def bucket_rows() -> list[Row]:
    """Parameters of two small blocks in buckets of 1 MiB, in the order in which gradients come."""
    names = [f"{name} {block}" for block in (0, 1) for name in ("norm", "qkv", "out", "w1", "w2")]
    numels = [4_000, 90_000, 60_000, 140_000, 140_000] * 2
    rows = []
    for number, plan in enumerate(plan_buckets(numels, [torch.float32] * len(numels), 1.0)):
        cells, start = [], 0
        for index in plan.indices:
            cells.append((start, numels[index], names[index], index % 5))
            start += numels[index]
        rows.append((f"bucket {number}", cells))
    return rows


def shard_rows() -> list[Row]:
    """Which rows of three parameters each rank has under FSDP."""
    sizes = ((6, 8), (10, 8), (8,))
    layout = RowLayout(sizes, RANKS)
    rows = []
    for rank in range(RANKS):
        cells: list[Cell] = []
        for index, name in enumerate(("a", "b", "c")):
            first, last = layout.shard_range(index, rank)
            if last > first:
                row = layout.row_numels[index]
                text = f"{name}[{first // row}:{last // row}]"
                cells.append((sum(length for _, length, _, _ in cells), last - first, text, index))
        rows.append((f"rank {rank}", cells))
    return rows


def zigzag_rows() -> list[Row]:
    """Which chunks of a sequence lie on which rank."""
    pairs = enumerate(zigzag_chunks(RANKS))
    return [
        (f"rank {rank}", [(chunk, 1, f"chunk {chunk}", rank) for chunk in chunks])
        for rank, chunks in pairs
    ]


def schedule_rows() -> list[Row]:
    """Return the times at which each rank of a pipeline does what.

    A forward takes 1, a backward 2, each part of a split backward 1.
    """
    rows = []
    for name, backward in (("1f1b", 2.0), ("zero-bubble", 1.0)):
        took = {"F": 1.0, "B": backward, "W": 1.0}
        timeline = simulate(
            SCHEDULES[name](RANKS, BATCHES), lambda action, took=took: took[action.kind]
        )
        for rank, steps in enumerate(timeline):
            done = [
                (f"{kind}{batch}", "FBW".index(kind), start, end)
                for (kind, _, batch), start, end in steps
            ]
            rows.append(
                (
                    f"{name}, {rank}",
                    [(start, end - start, text, colour) for text, colour, start, end in done],
                )
            )
    return rows


DRAWINGS: dict[str, Callable[[], list[Row]]] = {
    "ring": ring_rows,
    "buckets": bucket_rows,
    "shards": shard_rows,
    "zigzag": zigzag_rows,
    "schedules": schedule_rows,
}

if __name__ == "__main__":
    for drawing, rows_of in DRAWINGS.items():
        (IMAGES / f"drawn_{drawing}.svg").write_text(svg(rows_of()), encoding="utf-8")
