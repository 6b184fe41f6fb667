"""Memory as the CUDA caching allocator counts it, and what a set of tensors takes of it.

What autograd saves for backward, block by block, and what gradients take.

A saved tensor is seen as it is handed to autograd (`torch.autograd.graph.saved_tensors_hooks`): by
eager operators, by hand-written Functions and by compiled graphs alike, which is what makes the
three comparable. Parameters are left out (they are there anyway), and a storage that several nodes
save counts once, for the block that saved it first.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass
class PeakMemory:
    """Peak of memory in the block: most bytes allocated at once, with those allocated before.

    `peak_alloc_bytes` is None while the block runs, and on devices whose allocator does not count
    (the CPU), because "not measured" is not zero.
    """

    peak_alloc_bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[PeakMemory]:
    """Measure the block; the result is there afterwards, also after an exception.

    Blocks must not nest.

    The count is the allocator's (tensors), not the device's: CUDA's context and NCCL's buffers are
    not in it.
    """
    peak = PeakMemory()
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield peak
    finally:
        if on_cuda:
            peak.peak_alloc_bytes = torch.cuda.max_memory_allocated(device)


def allocated_bytes(device: torch.device | str) -> int | None:
    """Bytes that tensors hold now; None where the allocator keeps no count."""
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else None


def free_bytes(device: torch.device | str, root: Path = Path("/")) -> int | None:
    """Return the bytes that could be allocated on a device now. None if they are not known.

    On a GPU these are the driver's free bytes and the allocator's reserve. On a CPU they are the
    bytes that Linux calls available, or that the control group of a container or job still allows,
    if that is less.

    Args:
        root: root of the file system with /proc and /sys.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *_allowed(root)], default=None)


def _allowed(root: Path) -> Iterator[int]:
    """Yield the bytes that control groups leave. Their page cache counts as free."""
    for folder, limit, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most, now = (int((root / folder / name).read_text()) for name in (limit, used))
            lines = (root / folder / "memory.stat").read_text().splitlines()
            cached = next((int(line.split()[1]) for line in lines if line.split()[0] == cache), 0)
            yield max(0, most - now + cached)
            return


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors on this rank, each storage once.

    Views of one buffer count as the whole buffer. For a DTensor the local part counts.
    """
    return sum(storage_bytes(tensors).values())


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address → bytes of the storages behind these tensors; of a DTensor the local part's."""
    storages = (getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield a model's parameters and its optimizer's, which are others under some strategies."""
    yield from model.parameters()
    for group in optimizer.param_groups:
        yield from group["params"]


OUTSIDE = "outside the blocks"


@dataclass(frozen=True)
class Saved:
    """One tensor kept for backward.

    Attributes:
        shape, dtype: shape and dtype of the tensor. Its storage may be larger.
        bytes: bytes of its storage.
        made_by: autograd node that computed it (``SiluBackward0``), through views and casts, with
            ``(cast)`` if there was one. ``leaf`` for a tensor from outside or the copy of a
            parameter, and ``detached`` if the history does not say: masks, statistics, the inside
            of a compiled graph.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    made_by: str


def saved_for_backward(
    forward: Callable[[], object], model: nn.Module, blocks: Mapping[str, nn.Module]
) -> dict[str, list[Saved]]:
    """Run ``forward()`` once and list what it saves, by the block in which it happens.

    Args:
        forward: runs the model with gradients enabled; its result is kept until all is listed.
        model: whose parameters (and buffers) do not count.
        blocks: name → module; modules that run one after the other and not inside each other.

    Returns:
        name → its saved tensors, the largest first; `OUTSIDE` holds what was saved elsewhere:
            embedding, norm, head
        and loss. Under activation checkpointing a block's input counts and what is recomputed does
            not.
    """
    own = {
        tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]
    }
    seen = set()
    found = defaultdict(list)
    kept = []  # storages stay alive, so that no address is used twice
    inside = [OUTSIDE]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            kept.append(storage)
            found[inside[-1]].append(
                Saved(tuple(tensor.shape), tensor.dtype, storage.nbytes(), _maker(tensor))
            )
        return tensor

    with ExitStack() as undo:
        for name, block in blocks.items():
            before = block.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            after = block.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
            undo.callback(before.remove)
            undo.callback(after.remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept.append(forward())
    return {
        name: sorted(found[name], key=lambda saved: -saved.bytes) for name in [*blocks, OUTSIDE]
    }


_VIEWS = (
    "View",
    "UnsafeView",
    "T",
    "Transpose",
    "Permute",
    "Expand",
    "Squeeze",
    "Unsqueeze",
    "Unbind",
    "Split",
    "SplitWithSizes",
    "Reshape",
    "ReshapeAlias",
    "Alias",
    "AsStrided",
    "Select",
    "Slice",
)


def _maker(tensor: Tensor) -> str:
    node, cast = tensor.grad_fn, ""
    if node is None:
        return "leaf" if tensor.requires_grad else "detached"
    while (kind := node.name().rstrip("0123456789").removesuffix("Backward")) in (
        *_VIEWS,
        "ToCopy",
    ):
        cast = " (cast)" if kind == "ToCopy" else cast
        following = [inner for inner, _ in node.next_functions if inner is not None]
        if not following:
            break
        node = following[0]
    name = "leaf" if "AccumulateGrad" in node.name() else node.name()
    return name + cast


def gradient_bytes(blocks: Mapping[str, nn.Module]) -> dict[str, int]:
    """Bytes of the gradients of each block's parameters, those without a gradient left out."""
    return {
        name: sum(
            p.grad.numel() * p.grad.element_size() for p in block.parameters() if p.grad is not None
        )
        for name, block in blocks.items()
    }
