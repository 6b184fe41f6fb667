"""Leaks: lines whose blocks are allocated again and again, and not released."""

from dataclasses import dataclass
from itertools import pairwise

from distlab.snapshot.history import Block, History

LEAST_BLOCKS = 3
# A leak goes on during most of the recording. State that is made once is made in a short part.
SPREAD = 0.5
LEAST_BYTES = 2**14
# Events of other lines between two growths of a line. With fewer, it is a loop that fills a list.
STEP_EVENTS = 10


@dataclass(frozen=True)
class Growth:
    """A line whose memory grows.

    Attributes:
        site: line of the user's code.
        bytes: bytes that it has allocated in the recording and not released.
        blocks: number of these blocks.
        steps: number of times that it grew, where blocks of one burst count once.
    """

    site: str
    bytes: int
    blocks: int
    steps: int

    @property
    def bytes_per_step(self) -> float:
        """Bytes that each time adds."""
        return self.bytes / self.steps


def growing(history: History) -> list[Growth]:
    """Return the lines whose memory grows, the fastest first."""
    kept: dict[str, list[Block]] = {}
    for block in history.blocks:
        # Allocated in the recording, and not released until its end.
        if block.start >= 0 and block.end >= history.count:
            kept.setdefault(block.site, []).append(block)
    found = []
    for site, blocks in kept.items():
        bursts = _bursts([block.start for block in blocks])
        total = sum(block.bytes for block in blocks)
        spread = (blocks[-1].start - blocks[0].start) / max(history.count, 1)
        if bursts >= LEAST_BLOCKS and spread >= SPREAD and total >= LEAST_BYTES:
            found.append(Growth(site, total, len(blocks), bursts))
    return sorted(found, key=lambda each: -each.bytes)


def _bursts(starts: list[int]) -> int:
    """Return the number of groups of events that are far from each other.

    A step of n layers may leave a block in each of them. Its blocks are nearer to each other than
    to those of the next step.
    """
    gaps = [after - before for before, after in pairwise(starts)]
    if not gaps:
        return 1
    largest = max(gaps)
    return 1 + sum(gap > largest / 3 and gap > STEP_EVENTS for gap in gaps)
