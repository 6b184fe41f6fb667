"""The single seam to torch.distributed: thin collectives that every strategy uses.

Each returns a `Work` at once; `wait(work, group, what)` makes what follows see the result: on gloo
it blocks the host, on NCCL it makes the current CUDA stream wait and the host goes on. Until then
neither the tensor may be changed.

Averaging. NCCL averages in the reduction (`ReduceOp.AVG`, which multiplies before it adds). gloo
knows only sums, and a sum of fp16 gradients can overflow where their mean does not, so there the
sender divides first, in place.
"""

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.distributed import ProcessGroup, Work

from distlab.comm.wait_diagnostics import LONG_WAIT, waiting

T = TypeVar("T")

# A group's own methods, because the functions of torch.distributed around them take microseconds of
# every call for checks. torch 2.13 renamed these; torch 2.11 has only the old names.
_all_gather_single = (
    getattr(ProcessGroup, "all_gather_single", None) or ProcessGroup._allgather_base
)
_reduce_scatter_single = (
    getattr(ProcessGroup, "reduce_scatter_single", None) or ProcessGroup._reduce_scatter_base
)

COALESCED_BYTES = 25 * 2**20

# Dtypes that gloo and NCCL know. A broadcast and an all-gather only copy, so they send tensors of
# any other dtype (float8, uint16, …) as bytes.
SENDABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


def resolve_group(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group itself, or the default group for None.

    Raises:
        RuntimeError: there is no default group yet.
        ValueError: this process is not a member of the group.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group(...) first, or use "
                "`with distlab.comm.rank_context() as context:`"
            )
        return dist.group.WORLD
    if not isinstance(group, ProcessGroup):  # torch hands non-members a sentinel instead of a group
        raise ValueError(f"process_group={group!r}: this rank is not a member of the group")
    return group


def wait(work: Work, group: ProcessGroup, what: str) -> None:
    """Call `work.wait()`. A failure names the ranks that did not come.

    Args:
        what: activity, in the same words on every rank, such as "averaging gradients".

    Raises:
        RuntimeError: the wait failed.
    """
    if group.name() != "gloo" or not isinstance(work, Work):  # such as a transfer by copy engines
        work.wait()
        return
    try:
        work.wait(LONG_WAIT)
    except RuntimeError:
        # Either it takes longer, or it has failed, and then so does the next wait. This one tells
        # the other ranks that this rank is waiting.
        with waiting(group, what):
            work.wait()


@functools.cache
def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that runs before the computation's, as NCCL's does here (see `rank_context`).

    It is always the same one, because a GPU has few queues, and each new stream may share that of
    the computation.
    """
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which one collective can wait for another while the computation goes on.

    On gloo the host waits.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(communication_stream(device))


def averages_in_reduction(device: torch.device, group: ProcessGroup) -> bool:
    """Return whether the backend of `device` knows `ReduceOp.AVG` for floating-point tensors."""
    return group._get_backend(device).name() == "nccl"


def shards_in_place(device: torch.device, group: ProcessGroup) -> bool:
    """Return whether a reduce-scatter may write into its input, and an all-gather read its output.

    Each rank then uses its own slice of that tensor. NCCL documents it. gloo gives wrong results
    without an error.
    """
    return averages_in_reduction(device, group)


def all_reduce_mean(tensor: Tensor, group: ProcessGroup, *, prescaled: bool = False) -> Work:
    """Replace `tensor` by its mean over the ranks.

    It must be contiguous, of floating point and of the same shape on all ranks.

    prescaled: True if `tensor` need not be divided on gloo, because the caller has done it or
        ignores the scale.
    """
    options = AllreduceOptions()
    tensor, options.reduceOp = _prepare(tensor, group, prescaled)
    options.asyncOp = True
    return group.allreduce([tensor], options)


def reduce_scatter_mean(
    output: Tensor, input: Tensor, group: ProcessGroup, *, prescaled: bool = False
) -> Work:
    """Give rank r the r-th of N equal slices of the mean of `input`: `(N·n,)` → `output` `(n,)`."""
    options = ReduceScatterOptions()
    input, options.reduceOp = _prepare(input, group, prescaled)
    options.asyncOp = True
    return _reduce_scatter_single(group, output, input, options)


def reduce_scatter_sum(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Give rank r the r-th of N equal slices of the sum of `input`: `(N·n,)` → `output` `(n,)`."""
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, True
    return _reduce_scatter_single(group, output, input, options)


def all_reduce(tensor: Tensor, group: ProcessGroup, *, largest: bool = False) -> Work:
    """Replace `tensor` (contiguous) by its sum over the ranks, or its element-wise maximum."""
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return dist.all_reduce(tensor, operation, group=group, async_op=True)


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Concatenate every rank's `input` `(n,)` in rank order into `output` `(N·n,)`."""
    if input.dtype not in SENDABLE:
        output, input = _bytes_of(output), _bytes_of(input)
    options = AllgatherOptions()
    options.asyncOp = True
    return _all_gather_single(group, output, input, options)


def broadcast(tensor: Tensor, group: ProcessGroup, *, source: int = 0) -> Work:
    """Overwrite `tensor` (contiguous) by that of rank `source`, counted within the group."""
    sent = tensor if tensor.dtype in SENDABLE else _bytes_of(tensor)
    return dist.broadcast(sent, group=group, group_src=source, async_op=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8."""
    return tensor.view(-1).view(torch.uint8)


def reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Replace rank 0's `tensor` by the sum over the ranks. Those of the others become undefined."""
    return dist.reduce(tensor, group=group, group_dst=0, async_op=True)


def gather(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Concatenate every rank's `input` `(n,)` in rank order into rank 0's `output` `(N·n,)`."""
    parts = list(output.chunk(group.size())) if group.rank() == 0 else None
    return dist.gather(input, parts, group=group, group_dst=0, async_op=True)


def scatter(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Give rank r the r-th of N equal slices of rank 0's `input`: `(N·n,)` → `output` `(n,)`."""
    parts = list(input.chunk(group.size())) if group.rank() == 0 else None
    return dist.scatter(output, parts, group=group, group_src=0, async_op=True)


def all_to_all(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
) -> Work:
    """Send the r-th of N slices of `input` to rank r. `output` gets the received ones in order.

    `received` and `sent` are the slices' elements, by rank; by default all slices are equal.
    """
    return dist.all_to_all_single(output, input, received, sent, group=group, async_op=True)


def rotate(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Send `input` `(n,)` to the next rank of the group and receive `output` from the previous."""
    rank, ranks = group.rank(), group.size()
    to, come = (
        [output.numel() * (other == (rank + step) % ranks) for other in range(ranks)]
        for step in (1, -1)
    )
    return all_to_all(output, input, group, come, to)


def send(tensor: Tensor, group: ProcessGroup) -> Work:
    """Send `tensor` (contiguous) to the other rank of a group of two; see `wait_for_message`."""
    return dist.isend(tensor, group=group, group_dst=1 - group.rank())


def receive(tensor: Tensor, group: ProcessGroup) -> Work:
    """Overwrite `tensor` (contiguous) by what the other rank of a group of two sends next."""
    return dist.irecv(tensor, group=group, group_src=1 - group.rank())


@torch.no_grad()
def broadcast_all(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Overwrite all tensors, of any strides, by those of the group's first rank, and wait.

    Collectives do not bump a tensor's version counter: called between forward and backward, this
    would change saved activations without autograd noticing.
    """
    in_flight = []
    for tensor in tensors:
        sent = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
        in_flight.append((tensor, sent, broadcast(sent, group)))
    for tensor, sent, work in in_flight:
        wait(work, group, "broadcasting tensors")
        if not tensor.is_contiguous():
            tensor.copy_(sent)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[Tensor], group: ProcessGroup, *, source: int = 0
) -> "Coalesced":
    """Overwrite all tensors by those of rank `source` through few large messages; returns at once.

    Tensors of one dtype are copied into buffers of at most `COALESCED_BYTES` (a larger tensor has
    its own), so that hundreds of small parameters do not pay a latency each. `wait()` copies them
    back.
    """
    batches: dict[torch.dtype, list[list[Tensor]]] = {}
    for tensor in tensors:
        of_dtype = batches.setdefault(tensor.dtype, [[]])
        filled = sum(t.numel() for t in of_dtype[-1]) * tensor.element_size()
        if of_dtype[-1] and filled + tensor.numel() * tensor.element_size() > COALESCED_BYTES:
            of_dtype.append([])
        of_dtype[-1].append(tensor)
    sent = []
    for batch in (batch for of_dtype in batches.values() for batch in of_dtype):
        buffer = torch.cat([tensor.detach().flatten() for tensor in batch])
        sent.append((batch, buffer, broadcast(buffer, group, source=source)))
    return Coalesced(sent, group, is_source=group.rank() == source)


class Coalesced:
    """Messages in flight that carry several tensors each."""

    def __init__(
        self, sent: list[tuple[list[Tensor], Tensor, Work]], group: ProcessGroup, is_source: bool
    ):
        self._sent = sent
        self._group = group
        self._is_source = is_source

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the messages; ranks other than the source copy them into their tensors."""
        for batch, buffer, work in self._sent:
            wait(work, self._group, "broadcasting tensors")
            if not self._is_source:
                pieces = buffer.split([tensor.numel() for tensor in batch])
                for tensor, piece in zip(batch, pieces, strict=True):
                    tensor.detach().copy_(piece.view(tensor.shape))
        self._sent = []


def gather_objects(value: Any, group: ProcessGroup, what: str = "exchanging objects") -> list[Any]:
    """Return every rank's picklable `value`, in rank order. Blocks.

    Args:
        what: is being done, for the message if a rank does not come; see `wait`.
    """
    gathered: list[Any] = [None] * group.size()
    with waiting(group, what):
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def all_ranks_agree(condition: bool, device: torch.device, group: ProcessGroup) -> bool:
    """Return True on every rank if `condition` is true on all, else False on every rank. Blocks."""
    return sum_over_ranks(float(condition), device, group) == group.size()


def if_it_fits(
    action: Callable[[], T], device: torch.device, group: ProcessGroup, times: int = 1
) -> T | None:
    """Run `action` `times` times on every rank. Return the last result.

    Returns None on every rank if some rank ran out of memory.

    A rank that ran out of memory still tries the rest, because the other ranks, which hear of it at
    the end, wait for it in their collectives.
    """
    from distlab.cli_errors import is_out_of_memory

    result, fits = None, True
    for number in range(times):
        try:
            result = action()
            if number == times - 1 and device.type == "cuda":
                torch.cuda.synchronize(device)
        except (RuntimeError, MemoryError) as error:
            if fits and not is_out_of_memory(error):
                raise
            fits = False  # whatever fails from here on follows from it
    if not fits:
        gc.collect()  # half a model may hang in reference cycles
    return result if all_ranks_agree(fits, device, group) else None


def sum_tensor(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the element-wise sum over the ranks as a new tensor.

    The host waits on gloo, the stream on NCCL.
    """
    total = tensor.clone()
    if group.name() == "gloo":
        wait(dist.all_reduce(total, group=group, async_op=True), group, "summing a number")
    else:  # on NCCL without a stream of its own
        dist.all_reduce(total, group=group)
    return total


def sum_over_ranks(value: float, device: torch.device, group: ProcessGroup) -> float:
    """Return the sum of a number over the ranks, in float64. Blocks."""
    return float(
        sum_tensor(torch.tensor([value], dtype=torch.float64, device=device), group).item()
    )


def _prepare(
    tensor: Tensor, group: ProcessGroup, prescaled: bool
) -> tuple[Tensor, dist.ReduceOp.RedOpType]:
    """Divide if the backend cannot average. Return the tensor to send and the reduction.

    The reduction then yields the mean.

    On gloo an alias with its own version counter is sent, because what is written here is not an
    edit of the caller's: the division now, and the result of a CUDA tensor at any time until
    `wait()`, from a thread of gloo's.
    """
    if averages_in_reduction(tensor.device, group):
        return tensor, dist.ReduceOp.AVG
    sent = tensor.data
    if not prescaled:
        sent.mul_(1.0 / group.size())
    return sent, dist.ReduceOp.SUM
