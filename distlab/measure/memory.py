"""Memory: its peak, its free part, the bytes of tensors, and what autograd saves for backward.

Peaks are those of the CUDA caching allocator. `memory_timeline` shows memory over time.

`saved_for_backward` sees a tensor when it is handed to autograd
(`torch.autograd.graph.saved_tensors_hooks`). Eager operators, hand-written Functions and compiled
graphs all do this in the same way, so the three can be compared. Parameters are left out, because
they are in memory anyway. A storage that several nodes save counts once, for the block that saved
it first.
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
    """Peak of memory in a block.

    Attributes:
        peak_alloc_bytes: maximum of bytes allocated at one time, including those from before the
            block. None while the block runs, and on a CPU, whose allocator does not count.
    """

    peak_alloc_bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[PeakMemory]:
    """Measure the peak of memory in the block. The result is set afterwards, even if it raises.

    Blocks must not nest, because each resets the allocator's peak.

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
    """Return the bytes that tensors hold now. None on a CPU, whose allocator does not count."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    return None


def free_bytes(device: torch.device | str, root: Path = Path("/")) -> int | None:
    """Return the bytes that could be allocated on a device now. None if they are not known.

    On a GPU these are the driver's free bytes and the allocator's reserve. On a CPU they are the
    bytes that Linux calls available, or that the control group of a container or job still allows,
    if that is less.

    Args:
        device: GPU or CPU.
        root: root of the file system with /proc and /sys.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Blocks that the caching allocator keeps. The driver counts them as taken.
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reserve
    limits = [_available_bytes(root), _control_group_bytes(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _available_bytes(root: Path) -> int | None:
    """Return the bytes that Linux calls available. None if it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                kib = int(line.split()[1])
                return 1024 * kib
    return None


@dataclass(frozen=True)
class _ControlGroup:
    """Files of one version of Linux' control groups, below /sys."""

    folder: str
    limit: str
    used: str
    page_cache: str  # name of a line of memory.stat


_CONTROL_GROUPS = (
    _ControlGroup(
        folder="fs/cgroup",  # version 2
        limit="memory.max",
        used="memory.current",
        page_cache="file",
    ),
    _ControlGroup(
        folder="fs/cgroup/memory",  # version 1
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        page_cache="total_cache",
    ),
)


def _control_group_bytes(root: Path) -> int | None:
    """Return the bytes that the control group still allows. None without a limit.

    The page cache counts as free, because the kernel drops it when memory becomes scarce.
    """
    for version in _CONTROL_GROUPS:
        folder = root / "sys" / version.folder
        # A file of the other version is missing, and a limit of "max" is not a number.
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / version.limit).read_text())
            used = int((folder / version.used).read_text())
            page_cache = 0
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == version.page_cache:
                    page_cache = int(value)
                    break
            return max(0, limit - used + page_cache)
    return None


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors on this rank, each storage once.

    Views of one buffer count as the whole buffer. Of a DTensor the local part counts.
    """
    return sum(storage_bytes(tensors).values())


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return address → bytes of the storages of these tensors. Of a DTensor the local part counts.

    Empty storages are left out.
    """
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has its shard in there
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield a model's parameters, and its optimizer's, which some strategies replace by others."""
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
        made_by: name of the autograd node that computed it (``SiluBackward0``), followed by
            ``(cast)`` if it was cast. Views and casts themselves are skipped. It is ``leaf`` for an
            input that requires a gradient or the copy of a parameter, and ``detached`` if the
            history does not say: masks, statistics, the inside of a compiled graph.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    made_by: str


def saved_for_backward(
    forward: Callable[[], object], model: nn.Module, blocks: Mapping[str, nn.Module]
) -> dict[str, list[Saved]]:
    """Run ``forward()`` once and list the tensors that it saves, by the block that saves them.

    Under activation checkpointing a block's input counts, and what is recomputed does not.

    Args:
        forward: function that runs the model with gradients enabled. Its result is kept until all
            is listed.
        model: model whose parameters and buffers do not count.
        blocks: name → module. The modules run one after the other, and not inside each other.

    Returns:
        name → saved tensors of the block, the largest first. `OUTSIDE` holds those saved elsewhere:
        in embedding, norm, head and loss.
    """
    own_addresses = set()
    for tensor in [*model.parameters(), *model.buffers()]:
        own_addresses.add(tensor.untyped_storage().data_ptr())
    seen = set()
    found = defaultdict(list)
    kept = []  # keeps storages alive, so that no address is used twice
    block_names = [OUTSIDE]  # names of the blocks that run now, the innermost last

    def pack(tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves, and let autograd save it as it is."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in own_addresses and address not in seen and storage.nbytes():
            seen.add(address)
            kept.append(storage)
            saved = Saved(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                bytes=storage.nbytes(),
                made_by=_maker(tensor),
            )
            found[block_names[-1]].append(saved)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    def entering(name: str) -> Callable[..., None]:
        """Return a hook that notes that the block of this name begins."""

        def enter(*_: object) -> None:
            block_names.append(name)

        return enter

    def leave(*_: object) -> None:
        block_names.pop()

    with ExitStack() as undo:
        for name, block in blocks.items():
            before = block.register_forward_pre_hook(entering(name))
            after = block.register_forward_hook(leave, always_call=True)
            undo.callback(before.remove)
            undo.callback(after.remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            # The result holds the graph, and the graph holds the saved tensors until all are
            # listed.
            kept.append(forward())
    return {
        name: sorted(found[name], key=lambda saved: -saved.bytes) for name in [*blocks, OUTSIDE]
    }


# Autograd nodes, without "Backward" and number, that reshape or select. They compute no values.
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
    """Return `Saved.made_by` of a tensor: the node behind its views and casts."""
    node = tensor.grad_fn
    if node is None:
        return "leaf" if tensor.requires_grad else "detached"
    cast = ""
    while True:
        # SiluBackward0 → Silu. The number tells overloads apart.
        operation = node.name().rstrip("0123456789").removesuffix("Backward")
        if operation not in _VIEWS and operation != "ToCopy":
            break
        if operation == "ToCopy":
            cast = " (cast)"
        # None stands for an input that requires no gradient.
        inputs = [inner for inner, _ in node.next_functions if inner is not None]
        if not inputs:
            break
        node = inputs[0]
    # An AccumulateGrad node belongs to a leaf: a parameter, or an input that requires a gradient.
    name = "leaf" if "AccumulateGrad" in node.name() else node.name()
    return name + cast


def gradient_bytes(blocks: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the bytes of the gradients of each block's parameters.

    Parameters without a gradient count 0.

    Args:
        blocks: name → module.
    """
    sizes = {}
    for name, block in blocks.items():
        gradients = [p.grad for p in block.parameters() if p.grad is not None]
        sizes[name] = sum(grad.numel() * grad.element_size() for grad in gradients)
    return sizes
