"""Thin collectives that every strategy uses: the only file that calls torch's in a step.

Each function returns a `Work` at once. `wait(work, group, what)` completes it: on gloo it blocks
the host, on NCCL it makes the current CUDA stream wait and the host goes on. Until then the
tensors must not be changed, and the result must not be read.

Averaging. NCCL averages in the reduction (`ReduceOp.AVG`, which multiplies before it adds). gloo
has only sums, and a sum of fp16 gradients can overflow where their mean does not. So on gloo each
rank divides its tensor first, in place.
"""

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from distlab.comm.wait_diagnostics import LONG_WAIT, waiting

T = TypeVar("T")

# Names of methods of a process group. The functions of torch.distributed that wrap them spend
# microseconds of every call on checks. torch 2.13 renamed these two, and torch 2.11 has only the
# old names.
if hasattr(ProcessGroup, "all_gather_single"):
    _ALL_GATHER = "all_gather_single"
    _REDUCE_SCATTER = "reduce_scatter_single"
else:
    _ALL_GATHER = "_allgather_base"
    _REDUCE_SCATTER = "_reduce_scatter_base"

# Name of the backend of a world of which only one rank runs (`distlab.simulate.world`). No other
# rank could answer.
SIMULATED = "simulated"

COALESCED_BYTES = 25 * 2**20  # maximum size of a message of `broadcast_coalesced`

# Dtypes that gloo and NCCL know. A broadcast and an all-gather only copy, so they send tensors of
# any other dtype (float8, uint16, …) as bytes.
SENDABLE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
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
    if not isinstance(group, ProcessGroup):  # torch gives non-members a sentinel instead of a group
        raise ValueError(f"process_group={group!r}: this rank is not a member of the group")
    return group


def wait(work: Work, group: ProcessGroup, what: str) -> None:
    """Call `work.wait()`. If it fails, the error names the ranks that did not come.

    Args:
        work: collective in flight, or another object with a `wait()` method.
        group: ranks of the collective.
        what: activity, in the same words on every rank, such as "averaging gradients".

    Raises:
        RuntimeError: the wait failed.
    """
    if group.name() != "gloo" or not isinstance(work, Work):
        # NCCL, or an object that is not torch's, such as a transfer by copy engines.
        work.wait()
        return
    try:
        # An expired wait leaves the collective running, so that it can be waited for again.
        work.wait(LONG_WAIT)
    except RuntimeError:
        # The collective takes longer or has failed. If it has failed, the second wait raises again.
        # `waiting` tells the other ranks that this rank is waiting.
        with waiting(group, what):
            work.wait()


@functools.cache
def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the high-priority stream of a device. NCCL's has the same priority (`rank_context`).

    A device has one such stream. A GPU has few hardware queues, so each further stream could share
    the queue of the computation.
    """
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which one collective waits for another while the computation goes on.

    On a CPU the context does nothing, and the host waits.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(communication_stream(device))


def averages_in_reduction(device: torch.device, group: ProcessGroup) -> bool:
    """Return whether the backend of `device` knows `ReduceOp.AVG` for floating-point tensors."""
    # By the device's backend, because a group may have gloo for CPUs and NCCL for GPUs.
    return group._get_backend(device).name() == "nccl"


def shards_in_place(device: torch.device, group: ProcessGroup) -> bool:
    """Return whether a reduce-scatter may write into its input, and an all-gather read its output.

    Each rank then uses its own slice of that tensor. NCCL documents this use. gloo gives wrong
    results without an error.
    """
    return averages_in_reduction(device, group)


def all_reduce_mean(tensor: Tensor, group: ProcessGroup, *, prescaled: bool = False) -> Work:
    """Replace `tensor` by its mean over the ranks.

    Args:
        tensor: contiguous floating-point tensor, of the same shape on all ranks.
        group: ranks to average over.
        prescaled: True to skip the division on gloo, because the caller has divided or ignores the
            scale.
    """
    sent, reduction = _prepare(tensor, group, prescaled)
    options = AllreduceOptions()
    options.reduceOp = reduction
    options.asyncOp = True
    return group.allreduce([sent], options)


def reduce_scatter_mean(
    output: Tensor, input: Tensor, group: ProcessGroup, *, prescaled: bool = False
) -> Work:
    """Give rank r the r-th of N equal slices of the mean of `input`: `(N·n,)` → `output` `(n,)`.

    Args:
        output: memory of this rank's slice.
        input: contiguous floating-point tensor, of the same shape on all ranks.
        group: ranks to average over.
        prescaled: see `all_reduce_mean`.
    """
    sent, reduction = _prepare(input, group, prescaled)
    options = ReduceScatterOptions()
    options.reduceOp = reduction
    options.asyncOp = True
    return getattr(group, _REDUCE_SCATTER)(output, sent, options)


def reduce_scatter_sum(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Give rank r the r-th of N equal slices of the sum of `input`: `(N·n,)` → `output` `(n,)`."""
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.SUM
    options.asyncOp = True
    return getattr(group, _REDUCE_SCATTER)(output, input, options)


def all_reduce(tensor: Tensor, group: ProcessGroup, *, largest: bool = False) -> Work:
    """Replace `tensor` (contiguous) by its sum over the ranks, or its element-wise maximum."""
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return dist.all_reduce(tensor, operation, group=group, async_op=True)


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Concatenate every rank's `input` `(n,)` in rank order into `output` `(N·n,)`."""
    if input.dtype not in SENDABLE:
        output = _bytes_of(output)
        input = _bytes_of(input)
    options = AllgatherOptions()
    options.asyncOp = True
    return getattr(group, _ALL_GATHER)(output, input, options)


def broadcast(tensor: Tensor, group: ProcessGroup, *, source: int = 0) -> Work:
    """Overwrite `tensor` (contiguous) with the one of rank `source`, counted within the group."""
    sent = tensor if tensor.dtype in SENDABLE else _bytes_of(tensor)
    return dist.broadcast(sent, group=group, group_src=source, async_op=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8."""
    return tensor.view(-1).view(torch.uint8)


def reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Replace rank 0's `tensor` by the sum over the ranks. Other ranks' become undefined."""
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
    """Send the r-th of N slices of `input` to rank r. `output` gets the received slices by rank.

    Args:
        output: 1-D memory of all received slices.
        input: 1-D tensor of all sent slices.
        group: N ranks.
        received: number of elements from each rank. Default: equal slices.
        sent: number of elements to each rank. Default: equal slices.
    """
    return dist.all_to_all_single(output, input, received, sent, group=group, async_op=True)


def rotate(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Send `input` `(n,)` to the next rank of the group and receive `output` from the previous."""
    rank = group.rank()
    ranks = group.size()
    # An all-to-all in which only the slices to the next and from the previous rank have elements.
    sent = [0] * ranks
    sent[(rank + 1) % ranks] = input.numel()
    received = [0] * ranks
    received[(rank - 1) % ranks] = output.numel()
    return all_to_all(output, input, group, received, sent)


def send(tensor: Tensor, group: ProcessGroup) -> Work:
    """Send `tensor` (contiguous) to the other rank of a group of two; see `wait_for_message`."""
    return dist.isend(tensor, group=group, group_dst=1 - group.rank())


def receive(tensor: Tensor, group: ProcessGroup) -> Work:
    """Overwrite `tensor` (contiguous) with the next one that the other rank of two sends."""
    return dist.irecv(tensor, group=group, group_src=1 - group.rank())


@torch.no_grad()
def broadcast_all(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Overwrite all tensors, of any strides, with those of the group's first rank, and wait.

    Do not call it between forward and backward. Collectives do not change a tensor's version
    counter, so autograd would not notice that a saved activation has changed.
    """
    in_flight = []
    for tensor in tensors:
        sent = tensor.detach().contiguous()  # a copy only of a tensor that has holes in memory
        work = broadcast(sent, group)
        in_flight.append((tensor, sent, work))
    for tensor, sent, work in in_flight:
        wait(work, group, "broadcasting tensors")
        if not tensor.is_contiguous():
            tensor.copy_(sent)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[Tensor], group: ProcessGroup, *, source: int = 0
) -> "Coalesced":
    """Start to overwrite all tensors with those of rank `source`, through few large messages.

    Tensors of one dtype are copied into buffers of at most `COALESCED_BYTES`, so that hundreds of
    small parameters do not pay a latency each. A larger tensor has a buffer of its own.

    Returns:
        Messages in flight. Their `wait()` copies the buffers back into the tensors.
    """
    batches_of_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
    for tensor in tensors:
        batches = batches_of_dtype.setdefault(tensor.dtype, [[]])
        newest = batches[-1]
        numel = sum(each.numel() for each in newest) + tensor.numel()
        if newest and numel * tensor.element_size() > COALESCED_BYTES:
            newest = []
            batches.append(newest)
        newest.append(tensor)
    sent = []
    for batches in batches_of_dtype.values():
        for batch in batches:
            buffer = torch.cat([tensor.detach().flatten() for tensor in batch])
            work = broadcast(buffer, group, source=source)
            sent.append((batch, buffer, work))
    return Coalesced(sent, group, is_source=group.rank() == source)


class Coalesced:
    """Messages in flight that carry several tensors each.

    Args:
        sent: tensors, buffer and broadcast of each message.
        group: ranks of the broadcasts.
        is_source: True on the rank that sends its tensors.
    """

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
            if self._is_source:
                continue
            pieces = buffer.split([tensor.numel() for tensor in batch])
            for tensor, piece in zip(batch, pieces, strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))
        self._sent = []  # lets the buffers go


def gather_objects(value: Any, group: ProcessGroup, what: str = "exchanging objects") -> list[Any]:
    """Return every rank's picklable `value`, in rank order. Blocks.

    Args:
        value: object of this rank.
        group: ranks that exchange their objects.
        what: activity, for the error if a rank does not come (see `wait`).
    """
    if dist.get_backend(group) == SIMULATED:
        return [value] * group.size()  # every rank says what this one says
    gathered: list[Any] = [None] * group.size()
    with waiting(group, what):
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def all_ranks_agree(condition: bool, device: torch.device, group: ProcessGroup) -> bool:
    """Return True on every rank if `condition` is true on all, else False on every rank. Blocks."""
    # Exact: a sum of ones in fp64.
    return sum_over_ranks(float(condition), device, group) == group.size()


def if_it_fits(
    action: Callable[[], T], device: torch.device, group: ProcessGroup, times: int = 1
) -> T | None:
    """Run `action` `times` times on every rank, and return the last result.

    A rank that runs out of memory still tries the remaining times. The other ranks learn of it only
    at the end, and until then they wait for this rank in their collectives.

    Returns:
        Result of the last call. None on every rank if a rank ran out of memory.
    """
    from distlab.cli_errors import is_out_of_memory

    result = None
    fits = True
    for number in range(times):
        try:
            result = action()
            # Kernels run later than their launches. Errors of the last ones would surface after the
            # answer.
            if number == times - 1 and device.type == "cuda":
                torch.cuda.synchronize(device)
        except (RuntimeError, MemoryError) as error:
            if fits and not is_out_of_memory(error):
                raise
            fits = False  # errors of later calls follow from this one
    if not fits:
        gc.collect()  # reference cycles may keep half a model alive
    return result if all_ranks_agree(fits, device, group) else None


def sum_tensor(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the element-wise sum over the ranks as a new tensor.

    On gloo the host waits for it, on NCCL the current stream.
    """
    total = tensor.clone()
    if group.name() == "gloo":
        work = dist.all_reduce(total, group=group, async_op=True)
        wait(work, group, "summing a number")
    else:
        # A synchronous call: NCCL then uses the current stream and not one of its own.
        dist.all_reduce(total, group=group)
    return total


def sum_over_ranks(value: float, device: torch.device, group: ProcessGroup) -> float:
    """Return the sum of a number over the ranks, in float64. Blocks."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return float(sum_tensor(mine, group).item())


def _prepare(
    tensor: Tensor, group: ProcessGroup, prescaled: bool
) -> tuple[Tensor, dist.ReduceOp.RedOpType]:
    """Return the tensor to send and the reduction that make a mean.

    If the backend cannot average, the tensor is divided here and the reduction is a sum.
    """
    if averages_in_reduction(tensor.device, group):
        return tensor, dist.ReduceOp.AVG
    # An alias with a version counter of its own, because these writes are not edits by the caller:
    # the division now, and later the result of a CUDA tensor, which a thread of gloo writes at any
    # time until `wait()`.
    sent = tensor.data
    if not prescaled:
        sent.mul_(1.0 / group.size())
    return sent, dist.ReduceOp.SUM
