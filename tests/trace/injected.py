"""Training steps of torch's DDP and FSDP2 on GPUs, with a fault that makes each step slower.

    with Run(context, "ddp", "item") as run:
        run.trace(folder / f"rank{context.rank}.json.gz")

The model has eight blocks of 4,096 features and 8,192 tokens per rank in bf16, so that a step
without a fault is bound by its matrix products, also if the host is slow.
"""

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

WRAPPERS = ("ddp", "fsdp2")
# Fault → the cause that the first finding must name, by wrapper.
EXPECTED = {
    "straggler": {"ddp": "straggler", "fsdp2": "straggler"},
    "item": {"ddp": "item", "fsdp2": "item"},
    "small buckets": {"ddp": "small messages", "fsdp2": "small messages"},
    "blocking wait": {"ddp": "blocking wait", "fsdp2": "blocking wait"},
    "slow loader": {"ddp": "data loading", "fsdp2": "data loading"},
    "garbage collection": {"ddp": "garbage collection", "fsdp2": "garbage collection"},
    "one CTA": {"ddp": "one CTA", "fsdp2": "one CTA"},
    "no prefetch": {"ddp": "end of step", "fsdp2": "dependency"},
}

BLOCKS = 8
WIDTH = 4096  # features
TOKENS = 8192  # per rank
READ_TOKENS = 4096  # where the host reads values
# Values that the host reads of each layer's output. A read takes 0.04 ms on the fastest host seen
# and 0.15 ms on others, and 320 of them must be a large share of a step of 100 ms on both.
READ_VALUES = 8
SMALL_LAYERS = 128
SMALL_WIDTH = 192  # features: a weight of 144 KiB in fp32
SMALL_TOKENS = 8192  # per layer
SMALL_ROUNDS = 16
LOAD_S = 0.3  # seconds that the slow loader takes for a batch: the host is ahead by up to a step
OBJECTS = 4_000_000  # that a collection of garbage visits


class Block(nn.Module):
    """A feed-forward block with a residual connection.

    Args:
        is_read: whether the host reads values of each layer's output, as a check for NaN would.
    """

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.is_read = is_read

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the input's shape (tokens, WIDTH)."""
        hidden = self._checked(self.norm(x))
        hidden = self._checked(F.gelu(self.up(hidden)))
        hidden = self._checked(F.gelu(self.middle(hidden)))
        gate = self._checked(torch.sigmoid(self.gate(hidden)))
        return self._checked(x + self.down(hidden * gate))

    def _checked(self, hidden: Tensor) -> Tensor:
        if self.is_read:
            for value in hidden[0, :READ_VALUES].unbind():
                if value.item() > 1e30:
                    raise ValueError("the output is too large")
        return hidden


class Blocks(nn.Module):
    """Eight blocks.

    Args:
        is_read: as in `Block`.
        is_slow: whether this rank computes more in two of the blocks, as a rank with longer
            sequences would.
    """

    def __init__(self, is_read: bool, is_slow: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(is_read) for _ in range(BLOCKS))
        self.is_slow = is_slow

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the last block's output squared, a scalar."""
        for number, block in enumerate(self.blocks):
            if self.is_slow and number < 2:
                with torch.no_grad():
                    for _ in range(12):
                        torch.mm(x, x.T)
            x = block(x)
        return x.float().square().mean()


class SmallLayer(nn.Module):
    """A module with one weight, (SMALL_WIDTH, SMALL_WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SMALL_WIDTH, SMALL_WIDTH) / SMALL_WIDTH**0.5)

    def forward(self) -> Tensor:
        """Return a copy of the weight, since FSDP2 frees the gathered one after this."""
        return self.weight.clone()


class SmallLayers(nn.Module):
    """128 narrow layers, which run as one batched matrix product, as experts do.

    So the device has much to do for each launch, and all gradients are complete at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SmallLayer() for _ in range(SMALL_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the output squared, a scalar, for x (SMALL_TOKENS, SMALL_WIDTH)."""
        weights = torch.stack([layer() for layer in self.layers]).to(x.dtype)
        x = x.expand(SMALL_LAYERS, -1, -1)
        for _ in range(SMALL_ROUNDS):
            x = F.gelu(torch.bmm(x, weights))
        return x.float().square().mean()


class Batches(Dataset):
    """Random inputs of one rank.

    Args:
        shape: shape of a batch.
        load_s: seconds that reading a batch takes.
    """

    def __init__(self, shape: tuple[int, int], load_s: float) -> None:
        self.batch = torch.randn(shape, dtype=torch.bfloat16).pin_memory()
        self.load_s = load_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> Tensor:
        time.sleep(self.load_s)
        return self.batch


def waiting_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP, and let the host wait for it."""
    mean = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(mean, async_op=True).get_future()
    future.wait()
    torch.cuda.current_stream().synchronize()
    return future.then(lambda finished: finished.value()[0])


class Allocator:
    """Memory for a collective of FSDP2."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(size, dtype=dtype, device=device)


class LateAllGather(Allocator):
    """An all-gather of FSDP2 that begins only after the compute that was launched before it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the shards of a unit on the stream of all-gathers, which is the current one."""
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class WaitingReduceScatter(Allocator):
    """A reduce-scatter of FSDP2 for which the host waits."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce a unit's gradients on the stream of reduce-scatters, which is the current one."""
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        torch.cuda.current_stream().synchronize()
        return work


class Run:
    """A model, its optimizer and its data on one rank.

    Args:
        context: rank context over NCCL.
        wrapper: `ddp` or `fsdp2`.
        fault: key of `EXPECTED`, or `healthy`.
    """

    def __init__(self, context, wrapper: str, fault: str) -> None:
        self.fault = fault
        self.device = context.device
        self.wrapper = wrapper
        self.group = None
        if fault == "one CTA":
            options = dist.ProcessGroupNCCL.Options()
            options.config.min_ctas = 1
            options.config.max_ctas = 1
            self.group = dist.new_group(pg_options=options)
        torch.manual_seed(0)
        is_small = fault == "small buckets"
        with self.device:
            if is_small:
                model = SmallLayers()
            else:
                model = Blocks(fault == "item", fault == "straggler" and context.rank == 1)
        self.model = self._ddp(model) if wrapper == "ddp" else self._fsdp2(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if is_small:
            shape = (SMALL_TOKENS, SMALL_WIDTH)
        else:
            shape = (READ_TOKENS if fault == "item" else TOKENS, WIDTH)
        batches = Batches(shape, LOAD_S if fault == "slow loader" else 0.0)
        self.loader = iter(DataLoader(batches, batch_size=None))
        self.objects = None
        if fault == "garbage collection":
            self.objects = [[number] for number in range(OBJECTS)]

    def _ddp(self, model: nn.Module) -> nn.Module:
        megabytes = 0.1 if self.fault == "small buckets" else 25
        wrapped = DistributedDataParallel(
            model, process_group=self.group, bucket_cap_mb=megabytes, gradient_as_bucket_view=True
        )
        if self.fault == "blocking wait":
            wrapped.register_comm_hook(None, waiting_hook)
        return wrapped

    def _fsdp2(self, model: nn.Module) -> nn.Module:
        group = dist.group.WORLD if self.group is None else self.group
        mesh = dist.DeviceMesh.from_group(group, "cuda")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        units = model.layers if self.fault == "small buckets" else model.blocks
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
            if self.fault == "no prefetch":
                unit.set_custom_all_gather(LateAllGather())
                unit.set_modules_to_backward_prefetch([unit])  # nothing, as it is gathered then
            if self.fault == "blocking wait":
                unit.set_custom_reduce_scatter(WaitingReduceScatter())
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def step(self) -> None:
        """Train one step."""
        x = next(self.loader).to(self.device, non_blocking=True)
        is_ddp = self.wrapper == "ddp"
        is_late = is_ddp and self.fault == "no prefetch"
        with self.model.no_sync() if is_late else nullcontext():
            with torch.autocast("cuda", torch.bfloat16, enabled=is_ddp):
                loss = self.model(x)
            if self.objects is not None:
                gc.collect()
            loss.backward()
        if is_late:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=True).wait()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trace(self, path, steps: int = 3) -> None:
        """Write a trace of some steps, after two of warm-up."""
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        dist.barrier()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(
            activities=activities,
            # Without `repeat`, the next cycle would discard this one.
            schedule=schedule(wait=0, warmup=2, active=steps, repeat=1),
            with_stack=self.objects is not None,  # only stacks show the collection of garbage
        ) as profiler:
            for _ in range(steps + 2):
                self.step()
                profiler.step()
        profiler.export_chrome_trace(str(path))

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self.model, self.optimizer, self.loader, self.objects
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if self.group is not None:
            dist.destroy_process_group(self.group)


def record(context, folder, wrapper: str, faults: tuple[str, ...]) -> None:
    """Trace every fault in turn. Write `FAULT_rankN.json.gz` into a folder."""
    for fault in faults:
        with Run(context, wrapper, fault) as run:
            name = fault.replace(" ", "_")
            run.trace(folder / f"{name}_rank{context.rank}.json.gz")
