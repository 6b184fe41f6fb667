"""Leaks: lines that allocate a block in each of several steps and never release it.

The layers of one forward also keep their activations, and a model that is built keeps its
parameters. They are no leak, so a line counts only where the work of a whole step recurs between
its blocks.
"""

from dataclasses import dataclass
from itertools import pairwise

from distlab.snapshot.history import Block, History, is_python
from distlab.snapshot.purposes import phase_of
from distlab.snapshot.reader import Entry

LEAST_BLOCKS = 3
# A leak goes on during most of the recording. State that is made once is made in a short part.
SPREAD = 0.5
LEAST_BYTES = 2**14
# Events of other lines between two growths of a line. With fewer, it is a loop that fills a list.
STEP_EVENTS = 10
# Phases of a step that computes. Everything else may belong to the building of a model.
WORK = {"forward", "backward", "optimizer"}
# Functions that call layers or build them. What recurs inside of one call is no step.
CALLS = ("forward", "_call_impl", "_wrapped_call_impl", "__init__", "_apply")
# Functions of torch/utils/checkpoint.py that repeat a forward inside of backward.
RECOMPUTES = ("unpack_hook", "recompute_fn")


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
    kept: dict[str, list[int]] = {}  # line → numbers of its blocks
    for number, block in enumerate(history.blocks):
        # Allocated in the recording, and held at its end.
        if block.start >= 0 and block.is_held:
            kept.setdefault(block.site, []).append(number)
    found = []
    for site, numbers in kept.items():
        first, last = history.blocks[numbers[0]], history.blocks[numbers[-1]]
        spread = (last.start - first.start) / max(history.count, 1)
        total = sum(history.blocks[number].bytes for number in numbers)
        if spread < SPREAD or total < LEAST_BYTES:
            continue
        steps = _steps(history.blocks, numbers)
        if steps >= LEAST_BLOCKS:
            found.append(Growth(site, total, len(numbers), steps))
    return sorted(found, key=lambda each: -each.bytes)


def _steps(blocks: list[Block], numbers: list[int]) -> int:
    """Return the number of steps in which a line has allocated blocks.

    A step of n layers may leave a block in each of them. Its blocks are nearer to each other than
    to those of the next step.

    Args:
        blocks: all blocks of a history, by their start.
        numbers: numbers of the line's blocks.
    """
    pairs = list(pairwise(numbers))
    gaps = [blocks[after].start - blocks[before].start for before, after in pairs]
    if not gaps:
        return 1
    largest = max(gaps)
    steps = 1
    for (before, after), gap in zip(pairs, gaps, strict=True):
        is_far = gap > largest / 3 and gap > STEP_EVENTS
        if is_far and _has_a_step(blocks[before : after + 1]):
            steps += 1
    return steps


def _has_a_step(blocks: list[Block]) -> bool:
    """Return whether a step has passed from the first of these blocks to the last.

    In training, forward and backward both recur, or the optimizer with one of them. In inference
    only forward does. Then the blocks must come from more than one call of the model.
    """
    phases = {_phase(block.frames) for block in blocks} & WORK
    if len(phases) != 1:
        return len(phases) > 1
    return phases == {"forward"} and not _are_of_one_call(blocks)


def _phase(frames: list[Entry]) -> str:
    """Return the phase of a stack, where a forward that is recomputed is part of backward."""
    if any(frame.get("name") in RECOMPUTES for frame in frames):
        return "backward"
    return phase_of(frames)


def _are_of_one_call(blocks: list[Block]) -> bool:
    """Return whether all blocks were allocated below one call of a module.

    The outermost lines of their stacks are equal down to the loop that makes them. In a loop over
    layers, this loop is inside of a module.
    """
    shared = _outermost_first(blocks[0].frames)
    for block in blocks[1:]:
        lines = _outermost_first(block.frames)
        equal = 0
        while equal < min(len(shared), len(lines)) and shared[equal] == lines[equal]:
            equal += 1
        shared = shared[:equal]
    return any(name in CALLS for _, _, name in shared)


def _outermost_first(frames: list[Entry]) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of each Python frame of a stack."""
    lines = []
    for frame in reversed(frames):
        if is_python(frame):
            place = str(frame.get("filename", "")), frame.get("line", 0)
            lines.append((*place, str(frame.get("name", ""))))
    return lines
