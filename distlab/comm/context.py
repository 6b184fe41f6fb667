"""Who am I among the ranks: the one place that reads torchrun's environment and owns the process group.

`rank_context()` is used as

    with rank_context(timeout_s=60) as context:
        train(context)

and gives every rank its `RankContext`. It is passed on as an argument; nothing else in the package reads
RANK, WORLD_SIZE, LOCAL_RANK or MASTER_ADDR, and there is no global "current context".
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

BACKENDS = ("gloo", "nccl")
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RankContext:
    """This process's place among the ranks of one job.

    Args:
        rank: 0 … world_size − 1, over all hosts.
        local_rank: 0 … ranks on this host − 1; picks the GPU.
        world_size: number of ranks in `group`.
        device: where this rank computes, `cpu` or `cuda:<local_rank>`.
        backend: `gloo` or `nccl`.
        group: the process group of all ranks.
        timeout_s: seconds after which a collective that a peer does not join fails.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str
    group: dist.ProcessGroup
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes files."""
        return self.rank == 0


@dataclass(frozen=True)
class RankEnvironment:
    """What torchrun says of this process, or the values of a lone process when torchrun did not start it."""

    launched: bool
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restarts: int = 0  # how often torchrun has started this job's ranks anew

    @staticmethod
    def read() -> "RankEnvironment":
        """Read torchrun's variables; without them, a lone process: rank 0 of 1."""
        env = os.environ
        return RankEnvironment(
            launched="RANK" in env and "WORLD_SIZE" in env,
            rank=int(env.get("RANK", 0)),
            local_rank=int(env.get("LOCAL_RANK", env.get("RANK", 0))),
            world_size=int(env.get("WORLD_SIZE", 1)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", 1))),
            restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )


def choose_device(backend: str | None, local_rank: int, local_world_size: int) -> tuple[str, torch.device]:
    """Pick backend and device for one rank.

    Args:
        backend: `gloo`, `nccl`, or None: NCCL where there are GPUs, else gloo.

    Raises:
        ValueError: unknown backend, NCCL without GPUs, or more NCCL ranks on this host than GPUs.
    """
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus else "gloo"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    if backend == "gloo":
        return backend, torch.device("cpu")
    if not dist.is_nccl_available() or gpus == 0:
        raise ValueError("backend='nccl' needs an NVIDIA GPU and there is none here; use backend='gloo'")
    if local_world_size > gpus:
        raise ValueError(
            f"{local_world_size} NCCL ranks on a host with {gpus} GPU(s): NCCL needs one GPU per rank; "
            f"start at most {gpus} ranks (--nproc_per_node={gpus}) or use the gloo backend"
        )
    return backend, torch.device("cuda", local_rank)


@contextmanager
def rank_context(
    *,
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[RankContext]:
    """Join the process group, yield this rank's context once all have joined, leave the group whatever happens.

    Args:
        backend: `gloo`, `nccl` or None (NCCL where there are GPUs).
        timeout_s: seconds that any collective may take before it fails on the ranks that wait.
        store, rank, world_size: rendezvous by hand (tests, notebooks); by default torchrun's environment is
            read, and without torchrun the context is a world of one rank.

    Raises:
        ValueError: a non-positive timeout, or what `choose_device` refuses.
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds")
    place = RankEnvironment.read()
    if store is not None:
        if rank is None or world_size is None:
            raise ValueError("rendezvous through a store needs rank and world_size")
        place = RankEnvironment(False, rank, rank, world_size, world_size)
    backend, device = choose_device(backend, place.local_rank, place.local_world_size)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = _torchrun_store(timeout) if place.launched else dist.HashStore()

    options = None
    if device.type == "cuda":
        # Streams that share one of the driver's queues wait for each other; eight queues, its default, are too few
        # for computation, NCCL and copy engines. Read when CUDA starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(device)
        # Communication kernels must get onto SMs that computation keeps busy: a high-priority stream
        # lets a bucket start when the next thread block retires instead of when the queue drains.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # options given by hand are taken as they are, their timeout too
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        pg_options=options,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        if backend == "gloo":
            # Each rank connects to all others. One that has done so and leaves again at once would close its
            # connections under a rank that is still making its own.
            dist.barrier()
        yield RankContext(
            place.rank, place.local_rank, place.world_size, device, backend, dist.group.WORLD, timeout_s
        )
    finally:
        _leave()


def _torchrun_store(timeout: timedelta) -> dist.Store:
    """The store of torchrun's rendezvous, with the keys of each restart kept apart.

    torchrun's agent keeps one TCPStore across restarts, and workers of a second attempt would read the dead
    workers' addresses from it (pytorch issue 135712). A prefix per attempt cures that on one host; restart
    counts are not the same on all hosts, so with several the store is left as it is.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1:
        store = dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    store.set_timeout(timeout)
    return store


def _leave() -> None:
    """Destroy the process group so that the process can exit with the code it means to.

    A gloo work object that is destroyed during interpreter shutdown aborts the process (exit code −6), hence
    the collection of garbage while the interpreter is still whole.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
