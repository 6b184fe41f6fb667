"""The rank of this process. Only this file reads torchrun's environment and owns the process group.

`rank_context()` gives every rank its `RankContext`:

    with rank_context(timeout_s=60) as context:
        train(context)

Callers pass the context on as an argument. No other file of the package reads RANK, WORLD_SIZE,
LOCAL_RANK or MASTER_ADDR, and there is no global "current context".
"""

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from distlab.comm.parent_death import end_with_agent
from distlab.comm.wait_diagnostics import end_when_lost

BACKENDS = ("gloo", "nccl")
DEFAULT_TIMEOUT_S = 60.0
LONGEST_TIMEOUT_S = 1e8  # three years; beyond some larger number torch's clocks overflow
SETTLING_S = 5.0  # time after the timeout in which a reached store can report its own failure


@dataclass(frozen=True)
class RankContext:
    """Place of this process among the ranks of one job.

    Args:
        rank: 0 … world_size − 1, over all hosts.
        local_rank: 0 … ranks on this host − 1. On NCCL it picks the GPU.
        world_size: number of ranks in `group`.
        device: device of this rank. On NCCL it is `cuda:<local_rank>`. On gloo it is `cpu`, or a
            GPU that ranks may share.
        backend: `gloo` or `nccl`.
        group: process group of all ranks.
        timeout_s: seconds after which a collective fails if a rank does not join it.
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
        """Return True on the rank that prints and writes files."""
        return self.rank == 0


@dataclass(frozen=True)
class RankEnvironment:
    """Torchrun's variables of this process, or those of a single process without torchrun.

    Args:
        launched: True if RANK and WORLD_SIZE are set.
        rank: 0 … world_size − 1.
        local_rank: rank among the processes of this host.
        world_size: number of ranks of the job.
        local_world_size: number of ranks on this host.
        restarts: number of times that torchrun has restarted this job's ranks.
        max_restarts: number of times that torchrun would restart them.
        has_agent: True if torchrun's agent started this process, and the variables were not set by
            hand.
    """

    launched: bool
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restarts: int = 0
    max_restarts: int = 0
    has_agent: bool = False

    @staticmethod
    def read() -> "RankEnvironment":
        """Read torchrun's variables. Without them this process is rank 0 of 1.

        Raises:
            ValueError: a variable that is not a number, a rank that is not below its world size, or
                one of RANK and WORLD_SIZE without the other.
        """
        launched = "RANK" in os.environ
        if launched and "WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"RANK={os.environ['RANK']} is set and WORLD_SIZE is not: {_START_OR_UNSET}"
            )
        if not launched and "WORLD_SIZE" in os.environ:
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set and RANK is not: {_START_OR_UNSET}"
            )
        world_size = _number("WORLD_SIZE", 1, minimum=1)
        rank = _number("RANK", 0, below=("WORLD_SIZE", world_size))
        # Variables set by hand often leave out those of the host. All ranks are then on this one.
        local_world_size = _number("LOCAL_WORLD_SIZE", world_size, minimum=1)
        local_rank = _number("LOCAL_RANK", rank, below=("LOCAL_WORLD_SIZE", local_world_size))
        return RankEnvironment(
            launched=launched,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=_number("TORCHELASTIC_MAX_RESTARTS", 0),
            has_agent="TORCHELASTIC_RUN_ID" in os.environ,
        )


_START_OR_UNSET = "start ranks with torchrun, which sets both, or unset it"


def _number(
    name: str, default: int, *, minimum: int = 0, below: tuple[str, int] | None = None
) -> int:
    """Return the whole number in an environment variable.

    Args:
        name: name of the variable.
        default: number without the variable.
        minimum: smallest value allowed.
        below: name and value of the variable that must be larger.

    Raises:
        ValueError: it is not a whole number, or out of its range.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValueError(
            f"{name}={text!r} is not a whole number: start ranks with torchrun, which sets it, or "
            "unset it"
        ) from None
    if value < minimum:
        raise ValueError(
            f"{name}={value} must be at least {minimum}: start ranks with torchrun, or mend it"
        )
    if below is not None:
        limit_name, limit = below
        if value >= limit:
            raise ValueError(
                f"{name}={value} must be below {limit_name}={limit}: ranks count from 0 to "
                f"{limit - 1}"
            )
    return value


def choose_device(
    backend: str | None, local_rank: int, local_world_size: int, device: str | None = None
) -> tuple[str, torch.device]:
    """Pick backend and device for one rank.

    Args:
        backend: `gloo`, `nccl`, or None. None is NCCL if there are GPUs and no device is given, and
            gloo otherwise.
        local_rank: rank among the processes of this host.
        local_world_size: number of ranks on this host.
        device: device of a gloo rank: `cpu` (default) or a GPU that ranks may share, such as
            `cuda:0`.

    Raises:
        ValueError: unknown backend, NCCL without GPUs, more NCCL ranks on this host than GPUs, a
            device that is not here, or a device that is not NCCL's for this rank.
    """
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus > 0 and device is None else "gloo"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    if backend == "gloo":
        allowed = ["cpu"] + [f"cuda:{gpu}" for gpu in range(gpus)]
    else:
        allowed = [f"cuda:{local_rank}"]
    if device is not None and device not in allowed:
        raise ValueError(
            f"device={device!r} of local rank {local_rank} on {backend}; allowed: "
            f"{', '.join(allowed)}"
        )
    if backend == "gloo":
        return backend, torch.device(device or "cpu")
    if not dist.is_nccl_available() or gpus == 0:
        raise ValueError(
            "backend='nccl' needs an NVIDIA GPU and there is none here; use backend='gloo'"
        )
    if local_world_size > gpus:
        raise ValueError(
            f"{local_world_size} NCCL ranks on a host with {gpus} GPU(s): NCCL needs one GPU per "
            f"rank; start at most {gpus} ranks (--nproc_per_node={gpus}) or use the gloo backend"
        )
    return backend, torch.device("cuda", local_rank)


@contextmanager
def rank_context(
    *,
    backend: str | None = None,
    device: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[RankContext]:
    """Join the process group, yield this rank's context, and leave the group at the end.

    From here on, a rank that torchrun's agent started ends when the agent does (see
    `distlab.comm.parent_death`).

    Args:
        backend: `gloo`, `nccl`, or None (see `choose_device`).
        device: device of gloo ranks: `cpu` (default) or a GPU that they share, such as `cuda:0`.
        timeout_s: seconds after which a collective fails on the ranks that wait for another.
        store, rank, world_size: rendezvous by hand, for tests and notebooks. By default torchrun's
            environment is read, and without torchrun the context is a world of one rank.

    Raises:
        ValueError: a timeout that is not a positive number, or an environment, backend or device
            that `RankEnvironment.read` or `choose_device` refuses.
        OSError: the rendezvous failed: MASTER_PORT is in use, rank 0 was not reached, or ranks are
            missing.
    """
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ValueError(
            f"timeout_s={timeout_s} must be a positive number of seconds, at most "
            f"{LONGEST_TIMEOUT_S:.0e}"
        )
    place = RankEnvironment.read()
    if store is not None:
        if rank is None or world_size is None:
            raise ValueError("rendezvous through a store needs rank and world_size")
        place = RankEnvironment(
            launched=False,
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            local_world_size=world_size,
        )
    if place.launched and place.has_agent:
        end_with_agent()
    backend, chosen = choose_device(backend, place.local_rank, place.local_world_size, device)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = _torchrun_store(place, timeout) if place.launched else dist.HashStore()

    options = None
    if chosen.type == "cuda":
        # Streams that share one of the driver's queues wait for each other. The default of 8 queues
        # is too few for computation, NCCL and copy engines. CUDA reads the number when it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(chosen)
        # Gathered parameters and activations of long sequences do not fit into each other's gaps.
        # Without segments that grow, 138 GiB were not enough for tensors of 126 GiB.
        variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        has_own_settings = any(variable in os.environ for variable in variables)
        if not has_own_settings:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if backend == "nccl":
        # Communication kernels must get onto SMs that computation keeps busy. On a high-priority
        # stream they start when the next thread block retires, and not when the queue is empty.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # torch does not set the timeout of options that it is given
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        pg_options=options,
        # With a device NCCL connects at once, and not in the first collective.
        device_id=chosen if backend == "nccl" else None,
    )
    over = threading.Event()
    watch = threading.Thread(target=end_when_lost, args=(chosen, timeout_s, over), daemon=True)
    if backend == "nccl":
        watch.start()
    try:
        if backend == "gloo":
            # Each rank connects to all others. A rank that leaves at once would close connections
            # that another rank is still making.
            dist.barrier()
        yield RankContext(
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            device=chosen,
            backend=backend,
            group=dist.group.WORLD,
            timeout_s=timeout_s,
        )
    finally:
        over.set()
        if backend == "nccl":
            # The watch reads groups, which are destroyed next.
            watch.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        # A gloo work object that is destroyed during the interpreter's shutdown aborts the process
        # (exit code −6). Destroy those in reference cycles now.
        gc.collect()


def _torchrun_store(place: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Return the store of torchrun's rendezvous, with separate keys for each restart.

    torchrun's agent keeps one TCPStore across restarts, and workers of a second attempt would read
    the dead workers' addresses from it (pytorch issue 135712).
    """
    store = _rendezvous(place, timeout)
    # A prefix per attempt separates them on one host. With several hosts the store stays as it is,
    # because restart counts differ between hosts.
    if _number("GROUP_WORLD_SIZE", 1) == 1:
        store = dist.PrefixStore(f"attempt{place.restarts}", store)
    store.set_timeout(timeout)
    return store


def _rendezvous(place: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Return the TCPStore at MASTER_ADDR:MASTER_PORT. An error says why it was not reached.

    Raises:
        ValueError: a missing address, or a missing or impossible port.
        OSError: the port is in use, no process listens there, or not all ranks came within the
            timeout.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent serves the store already.
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        return store
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(
                f"RANK={place.rank} is set and {name} is not: start ranks with torchrun, or give "
                "all ranks the host of rank 0 and a free port there"
            )
    host = os.environ["MASTER_ADDR"]
    port = _number("MASTER_PORT", 0)
    if not 1 <= port <= 65535:
        raise ValueError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    where = f"MASTER_ADDR:MASTER_PORT={host}:{port}"
    limit_s = timeout.total_seconds()
    if place.rank != 0:
        _wait_for_server(host, port, limit_s, where, place.rank)
    # torch waits forever for a server that accepts a connection and never answers, so the thread
    # may be left behind. It puts the store or an error into this list.
    results: list[dist.Store | Exception] = []

    def join() -> None:
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            results.append(store)
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(limit_s + SETTLING_S)
    result = results[0] if results else None
    if isinstance(result, dist.Store):
        return result
    reason = "" if result is None else str(result)
    lines = reason.strip().splitlines()
    if "EADDRINUSE" in reason:
        raise OSError(
            f"MASTER_PORT={port} is in use on this host, by another program or another job's rank "
            "0: set MASTER_PORT to a free port on every rank, or start with torchrun --standalone, "
            "which finds one"
        )
    if "clients joined" in reason:
        raise OSError(
            f"not all of WORLD_SIZE={place.world_size} ranks came to {where} within {limit_s:g} s "
            f"({lines[0]}): start the missing ones with the same MASTER_ADDR and MASTER_PORT"
        )
    if result is not None and not isinstance(result, dist.DistError):
        raise result
    answer = lines[0] if lines else f"no answer within {limit_s:g} s"
    raise OSError(
        f"rank {place.rank} reached {where}, but what answers there is not rank 0's store: use "
        f"another free port ({answer})"
    )


def _wait_for_server(host: str, port: int, limit_s: float, where: str, rank: int) -> None:
    """Wait until a process listens at this address. Rank 0 may start later than this rank.

    Raises:
        OSError: no process listens within the limit, or the host has no address.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, limit_s)).close()
            return
        except OSError as error:  # the name has no address yet, or no process listens yet
            if time.monotonic() > deadline:
                raise OSError(
                    f"rank {rank} found no process that listens at {where} within {limit_s:g} s "
                    f"({error.strerror or error}): start rank 0 there, and look for its message if "
                    "it has ended"
                ) from None
        time.sleep(0.1)
