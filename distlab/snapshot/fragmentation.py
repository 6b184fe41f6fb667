"""Memory that the allocator has reserved and no tensor uses, by kind, with what would help."""

from dataclasses import dataclass

from distlab.snapshot.history import History

FREE = "segments that are free as a whole"
PARTLY = "gaps in segments that are partly used"
STREAMS = "gaps in segments of side streams"
PENDING = "freed, and waiting for another stream"
ROUNDED = "rounding of sizes"
MIB = 2**20

REMEDIES = {
    FREE: "torch.cuda.empty_cache() returns it, or a garbage_collection_threshold",
    PARTLY: "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or equal sizes in every step",
    STREAMS: "other streams cannot use it: allocate on one stream, or reuse the side one's buffers",
    PENDING: "record_stream() delays the reuse: keep a reference and wait for an event instead",
    ROUNDED: "roundup_power2_divisions is too coarse, or many tensors have less than 512 bytes",
}


@dataclass(frozen=True)
class Unused:
    """Reserved memory of one kind that no tensor uses.

    Attributes:
        kind: one of the kinds above.
        bytes: how much.
        places: number of gaps or segments.
        largest: bytes of the largest of them.
    """

    kind: str
    bytes: int
    places: int
    largest: int

    @property
    def remedy(self) -> str:
        """Advice that would help, as a clause."""
        return REMEDIES[self.kind]


def unused(history: History) -> list[Unused]:
    """Return what is reserved and not used when the snapshot was taken, the largest first."""
    streams = {}
    for segment in history.segments:
        stream = segment.get("stream", 0)
        streams[stream] = streams.get(stream, 0) + segment["total_size"]
    # The stream with the most reserved memory. The allocator gives a stream's free blocks to that
    # stream only.
    main_stream = max(streams, key=lambda stream: streams[stream], default=0)
    gaps: dict[str, list[int]] = {kind: [] for kind in REMEDIES}
    for segment in history.segments:
        entries = segment.get("blocks", [])
        # Free as a whole: it can be given back to the driver, unlike a gap next to a block that is
        # used.
        if not any(entry["state"].startswith("active") for entry in entries):
            gaps[FREE].append(segment["total_size"])
            continue
        on_side = segment.get("stream", 0) != main_stream
        for entry in entries:
            if entry["state"] == "inactive":
                gaps[STREAMS if on_side else PARTLY].append(entry["size"])
            elif entry["state"] != "active_allocated":
                # active_pending_free: the tensor is gone, and another stream may still read the
                # memory.
                gaps[PENDING].append(entry["size"])
            else:
                requested = entry.get("requested_size", entry["size"])
                if requested < entry["size"]:
                    gaps[ROUNDED].append(entry["size"] - requested)
    found = []
    for kind, sizes in gaps.items():
        if sizes:
            found.append(Unused(kind, sum(sizes), len(sizes), max(sizes)))
    return sorted(found, key=lambda each: -each.bytes)
