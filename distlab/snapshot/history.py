"""Blocks of memory over time, from the events of an allocator."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from distlab.snapshot.reader import ALLOC, FREES, MAPS, UNMAPS, Entry, Snapshot

# Files that are not the user's code: of a stack, the innermost line outside of them is named.
LIBRARIES = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python",
    "<frozen ",
    "<string>",
    # A torch that is imported from its source. A project may be in a folder `torch`, so only files
    # and folders that torch has are named.
    "/torch/_compile.py",
    "/torch/_dynamo/",
    "/torch/_functorch/",
    "/torch/_inductor/",
    "/torch/_ops.py",
    "/torch/_tensor.py",
    "/torch/_utils.py",
    "/torch/autograd/",
    "/torch/cuda/",
    "/torch/distributed/",
    "/torch/functional.py",
    "/torch/fx/",
    "/torch/nn/functional.py",
    "/torch/nn/init.py",
    "/torch/nn/modules/",
    "/torch/nn/parallel/",
    "/torch/nn/parameter.py",
    "/torch/nn/utils/",
    "/torch/optim/",
    "/torch/serialization.py",
    "/torch/utils/_contextlib.py",
    "/torch/utils/_device.py",
    "/torch/utils/checkpoint.py",
    "/torch/utils/data/_utils/",
)
NO_STACK = "(no Python stack)"


@dataclass
class Block:
    """A block of memory.

    Attributes:
        bytes: size.
        start, end: numbers of the events of its allocation and release. -1 for before the
            recording, and the number of events if its release was not recorded.
        frames: Python stack of its allocation, innermost first.
        stream: stream that it was allocated on.
        is_held: True if it is held when the snapshot was taken. A block whose release was not
            recorded may have been released after the recording.
    """

    bytes: int
    start: int
    end: int
    frames: list[Entry]
    stream: int
    is_held: bool

    @property
    def site(self) -> str:
        """Line of the user's code that allocated it, as `file.py:12 function`."""
        return site_of(self.frames)


@dataclass
class History:
    """Memory of one device.

    Attributes:
        device: number of the GPU.
        blocks: all blocks that were held at some time, by their start.
        count: number of events.
        times_us: time of each event in microseconds; zeros where the file has none.
        reserved: (number of the event, reserved bytes from then on), by event.
        segments: segments that the allocator holds at the end.
        has_stacks: False if the program has recorded events, and none of them has a stack.
    """

    device: int
    blocks: list[Block]
    count: int
    times_us: list[int]
    reserved: list[tuple[int, int]]
    segments: list[Entry] = field(default_factory=list)
    has_stacks: bool = True

    def allocated(self) -> list[tuple[int, int]]:
        """Return (number of the event, allocated bytes from then on) of each change, by event."""
        changes: dict[int, int] = {}
        for block in self.blocks:
            changes[block.start] = changes.get(block.start, 0) + block.bytes
            changes[block.end] = changes.get(block.end, 0) - block.bytes
        held = 0
        found = []
        # Only the sums after an event matter: a block that is freed by the event at which another
        # one starts does not count together with it.
        for event in sorted(changes):
            held += changes[event]
            found.append((event, held))
        return found

    def peak(self) -> tuple[int, int]:
        """Return the number of the event at which most bytes are allocated, and these bytes."""
        most, where = -1, -1
        for event, held in self.allocated():
            if held > most:
                most, where = held, event
        return where, max(most, 0)

    def held_at(self, event: int) -> list[Block]:
        """Return the blocks that are held after an event."""
        return [block for block in self.blocks if block.start <= event < block.end]

    def reserved_at(self, event: int) -> int:
        """Return the reserved bytes after an event."""
        position = bisect_right([each for each, _ in self.reserved], event)
        return self.reserved[max(position - 1, 0)][1]


def histories(snapshot: Snapshot) -> list[History]:
    """Return the history of each device that has memory."""
    devices = {int(segment.get("device", 0)) for segment in snapshot.segments}
    devices |= {number for number, trace in enumerate(snapshot.traces) if trace}
    # Of all devices: one of them may have few events, all of autograd's threads.
    events = [event for trace in snapshot.traces for event in trace]
    has_stacks = not events or any(map(is_python, _all_frames(events, snapshot.segments)))
    found = []
    for device in sorted(devices):
        trace = snapshot.traces[device] if device < len(snapshot.traces) else []
        segments = [each for each in snapshot.segments if int(each.get("device", 0)) == device]
        found.append(_history(device, trace, segments, has_stacks))
    return found


def _all_frames(events: list[Entry], segments: list[Entry]) -> Iterable[Entry]:
    """Yield the frames of all events and of all blocks of the segments."""
    for event in events:
        yield from event.get("frames") or []
    for segment in segments:
        for _, entry in addressed(segment):
            yield from frames_of(entry)


def _history(device: int, trace: list[Entry], segments: list[Entry], has_stacks: bool) -> History:
    """Replay the events of one device, and add what was held before them."""
    blocks = []
    opened: dict[int, Block] = {}  # address → block that is held
    for number, event in enumerate(trace):
        address = event.get("addr", 0)
        if event["action"] == ALLOC:
            block = Block(
                event["size"],
                number,
                len(trace),
                event.get("frames") or [],
                event.get("stream", 0),
                is_held=True,
            )
            opened[address] = block
            blocks.append(block)
        elif event["action"] in FREES:
            # free_requested comes first and free_completed later, when other streams have finished.
            # The memory is held until then.
            block = opened.pop(address, None)
            if block is not None:
                block.end = number
                block.is_held = False
            else:
                # Its allocation was not recorded, so it has been held since before the first event
                # (−1).
                stream = event.get("stream", 0)
                blocks.append(Block(event["size"], -1, number, [], stream, is_held=False))
    # What the end of the recording holds, and no event has allocated.
    active = set()
    for segment in segments:
        for address, entry in addressed(segment):
            if entry["state"].startswith("active"):
                active.add(address)
            if entry["state"] == "active_allocated" and address not in opened:
                frames = frames_of(entry)
                stream = segment.get("stream", 0)
                blocks.append(Block(entry["size"], -1, len(trace), frames, stream, is_held=True))
    # If the recording was stopped before the snapshot was taken, later releases are no events. The
    # segments have what is really held.
    for address, block in opened.items():
        block.is_held = address in active
    blocks.sort(key=lambda block: block.start)
    times_us = [int(event.get("time_us", 0)) for event in trace]
    return History(
        device, blocks, len(trace), times_us, _reserved(trace, segments), segments, has_stacks
    )


def addressed(segment: Entry) -> Iterable[tuple[int, Entry]]:
    """Yield the blocks of a segment with their addresses."""
    address = segment.get("address", 0)
    for entry in segment.get("blocks", ()):
        # Where a file has no addresses of blocks, they follow from the sizes: blocks fill a segment
        # without gaps.
        yield entry.get("address", address), entry
        address += entry["size"]


def frames_of(entry: Entry) -> list[Entry]:
    """Return the stack of a block in a segment. Older files have it in a history."""
    if entry.get("frames"):
        return entry["frames"]
    past = entry.get("history") or []
    return past[0].get("frames") or [] if past else []


def _reserved(trace: list[Entry], segments: list[Entry]) -> list[tuple[int, int]]:
    """Return the reserved bytes after each event that changes them, counted back from the end.

    They are wrong where the recording misses changes, as those after it was stopped.
    """
    changes = []
    for number, event in enumerate(trace):
        if event["action"] in MAPS:
            changes.append((number, event["size"]))
        elif event["action"] in UNMAPS:
            changes.append((number, -event["size"]))
    at_end = sum(segment["total_size"] for segment in segments)
    # The file has the reserved bytes at the end only. Taking back all recorded changes gives those
    # at the beginning.
    held = at_end - sum(size for _, size in changes)
    found = [(-1, held)]
    for number, size in changes:
        held += size
        found.append((number, held))
    return found


def is_python(frame: Entry) -> bool:
    """Return whether a frame is one of Python. Stacks of torch may also have those of C++."""
    filename = str(frame.get("filename", ""))
    # `<stdin>` and `<ipython-input-1>` are files of an interactive Python.
    return filename.endswith(".py") or filename.startswith("<")


def site_of(frames: list[Entry]) -> str:
    """Return the innermost line of a stack that is the user's, or else the innermost line."""
    for frame in frames:
        filename = str(frame.get("filename", ""))
        is_library = any(part in filename for part in LIBRARIES)
        if filename.endswith(".py") and not is_library:
            return _place(frame)
    for frame in frames:
        if str(frame.get("filename", "")).endswith(".py"):
            return _place(frame)
    return NO_STACK


def _place(frame: Entry) -> str:
    """Return a line as `folder/file.py:12 function`."""
    short = "/".join(str(frame["filename"]).split("/")[-2:])
    return f"{short}:{frame.get('line', 0)} {frame.get('name', '')}".strip()
