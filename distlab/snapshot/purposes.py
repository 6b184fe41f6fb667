"""What a block of memory is for, from its stack and its life.

A snapshot does not say. The stack of an allocation says in which phase of a step it was made, and
how long a block lives says the rest: an activation is made in forward and released in backward, a
gradient is made in backward and kept. Autograd's own threads have no Python stack, so a block
without one is one of backward. If no block has one, the program has recorded none, and nothing is
concluded.
"""

from collections import Counter

from distlab.snapshot.history import NO_STACK, Block, History, is_python
from distlab.snapshot.reader import Entry

PARAMETERS = "parameters and other state"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
ACTIVATIONS = "activations"
COMMUNICATION = "communication buffers"
WORKSPACES = "workspaces of libraries"  # for example cuBLAS
TEMPORARY = "temporary"
BEFORE = "from before the recording"
UNKNOWN = "unknown: recorded without stacks"
PURPOSES = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    COMMUNICATION,
    WORKSPACES,
    TEMPORARY,
    BEFORE,
    UNKNOWN,
)

# A phase is told by the files and functions of torch on a stack.
OPTIMIZER_FILES = ("/torch/optim/", "/optim/", "optimizer.py")
COMMUNICATION_FILES = (
    "/torch/distributed/distributed_c10d",
    "/torch/nn/parallel/distributed",
    "/torch/distributed/fsdp",
    "/torch/distributed/_composable",
    "/deepspeed/runtime/comm",
    "/megatron/core/distributed",
)
BACKWARD_FUNCTIONS = ("_engine_run_backward", "backward")
FORWARD_FUNCTIONS = ("forward", "_call_impl", "__call__")
# Temporary memory is released before as many events have passed as this part of all.
SHORT = 0.02


def phase_of(frames: list[Entry]) -> str:
    """Return the phase in which a stack allocates.

    It is `optimizer`, `communication`, `backward`, `forward` or `other`.
    """
    # With stacks of C++, autograd's threads have frames as well, and none of them is Python's.
    frames = [frame for frame in frames if is_python(frame)]
    # From the innermost frame outwards, so a hook that communicates inside of backward is
    # communication.
    for frame in frames:
        filename, name = str(frame.get("filename", "")), str(frame.get("name", ""))
        if any(part in filename for part in COMMUNICATION_FILES) and name not in FORWARD_FUNCTIONS:
            return "communication"
        if any(part in filename for part in OPTIMIZER_FILES):
            return "optimizer"
        if name in BACKWARD_FUNCTIONS:
            return "backward"
    names = [str(frame.get("name", "")) for frame in frames]
    if any(name in FORWARD_FUNCTIONS for name in names):
        return "forward"
    # Without a stack it is one of autograd's threads, see above.
    return "other" if frames else "backward"


def purposes(history: History) -> list[str]:
    """Return the purpose of each block of a history, in its order."""
    if not history.has_stacks:
        return [UNKNOWN] * len(history.blocks)
    phases = [phase_of(block.frames) for block in history.blocks]
    found = []
    for block, phase in zip(history.blocks, phases, strict=True):
        found.append(_purpose(block, phase, history))
    return found


def _purpose(block: Block, phase: str, history: History) -> str:
    """Return the purpose of one block."""
    if block.start < 0 and not block.frames:
        return BEFORE
    # Lengths of life are shares of all recorded events, as steps of different models have different
    # numbers.
    lives = (block.end - block.start) / max(history.count, 1)
    stays = block.end >= history.count
    if phase == "communication":
        return COMMUNICATION
    if phase == "optimizer":
        return OPTIMIZER if stays or lives > 0.5 else TEMPORARY
    if phase == "backward" and stays and lives > 0.5:
        return WORKSPACES  # gradients are allocated again in each step
    if phase == "backward":
        return GRADIENTS if lives > SHORT or stays else TEMPORARY
    if phase == "forward":
        # It was there before the recording and stays, so it is a parameter, although forward
        # allocated it.
        if stays and block.start < 0:
            return PARAMETERS
        return ACTIVATIONS if lives > SHORT / 10 else TEMPORARY
    return PARAMETERS if stays or lives > 0.5 else TEMPORARY


def by_purpose(history: History, event: int) -> Counter:
    """Return purpose → bytes that are held after an event."""
    held: Counter = Counter()
    for block, purpose in zip(history.blocks, purposes(history), strict=True):
        if block.start <= event < block.end:
            held[purpose] += block.bytes
    return held


def by_site(history: History, event: int) -> list[tuple[str, str, int, int]]:
    """Return (line, purpose, bytes, blocks) of what is held after an event, the largest first."""
    sums: dict[tuple[str, str], list[int]] = {}
    for block, purpose in zip(history.blocks, purposes(history), strict=True):
        if block.start <= event < block.end:
            total = sums.setdefault((block.site, purpose), [0, 0])
            total[0] += block.bytes
            total[1] += 1
    found = [(site, purpose, size, count) for (site, purpose), (size, count) in sums.items()]
    # Among equal sizes, lines with a stack first.
    return sorted(found, key=lambda each: (-each[2], each[0] == NO_STACK))
