"""The rank of this process. Only this file reads torchrun's environment and owns the process group.

`rank_context()` is used as

    with rank_context(timeout_s=60) as context:
        train(context)

and gives every rank its `RankContext`. It is passed on as an argument; nothing else in the package
reads RANK, WORLD_SIZE, LOCAL_RANK or MASTER_ADDR, and there is no global "current context".
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
SETTLING_S = 5.0  # what a store that is reached may take beyond the timeout to say so


@dataclass(frozen=True)
class RankContext:
    """Place of this process among the ranks of one job.

    Args:
        rank: 0 … world_size − 1, over all hosts.
        local_rank: 0 … ranks on this host − 1; picks the GPU.
        world_size: number of ranks in `group`.
        device: device of this rank: `cuda:<local_rank>` on NCCL, `cpu` or a GPU that ranks may
            share on gloo.
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
        """Return True on the rank that prints and writes files."""
        return self.rank == 0


@dataclass(frozen=True)
class RankEnvironment:
    """Torchrun's variables of this process, or those of a single process without torchrun."""

    launched: bool
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restarts: int = 0  # how often torchrun has restarted this job's ranks
    max_restarts: int = 0  # how often it would
    # whether torchrun's agent started this process, not somebody who set the variables
    has_agent: bool = False

    @staticmethod
    def read() -> "RankEnvironment":
        """Read torchrun's variables. Without them this is rank 0 of 1.

        Raises:
            ValueError: a variable that is not a number, a rank that is not below its world size, or
                one of RANK and WORLD_SIZE without the other.
        """
        launched = "RANK" in os.environ
        if launched != ("WORLD_SIZE" in os.environ):
            there, missing = ("RANK", "WORLD_SIZE") if launched else ("WORLD_SIZE", "RANK")
            raise ValueError(
                f"{there}={os.environ[there]} is set and {missing} is not: {_START_OR_UNSET}"
            )
        world_size = _number("WORLD_SIZE", 1, least=1)
        rank = _number("RANK", 0, below=("WORLD_SIZE", world_size))
        local_world_size = _number("LOCAL_WORLD_SIZE", world_size, least=1)
        return RankEnvironment(
            launched=launched,
            rank=rank,
            local_rank=_number("LOCAL_RANK", rank, below=("LOCAL_WORLD_SIZE", local_world_size)),
            world_size=world_size,
            local_world_size=local_world_size,
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=_number("TORCHELASTIC_MAX_RESTARTS", 0),
            has_agent="TORCHELASTIC_RUN_ID" in os.environ,
        )


_START_OR_UNSET = "start ranks with torchrun, which sets both, or unset it"


def _number(
    name: str, default: int, *, least: int = 0, below: tuple[str, int] | None = None
) -> int:
    """Return the whole number in an environment variable. It must be in its range."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValueError(
            f"{name}={text!r} is not a whole number: start ranks with torchrun, which sets it, or unset it"
        ) from None
    if value < least:
        raise ValueError(
            f"{name}={value} must be at least {least}: start ranks with torchrun, or mend it"
        )
    if below is not None and value >= below[1]:
        raise ValueError(
            f"{name}={value} must be below {below[0]}={below[1]}: ranks count from 0 to {below[1] - 1}"
        )
    return value


def choose_device(
    backend: str | None, local_rank: int, local_world_size: int, device: str | None = None
) -> tuple[str, torch.device]:
    """Pick backend and device for one rank.

    Args:
        backend: `gloo`, `nccl`, or None: NCCL if there are GPUs and no device is given, else gloo.
        device: device of a gloo rank: `cpu` (default) or a GPU that ranks may share, such as
            `cuda:0`.

    Raises:
        ValueError: unknown backend, NCCL without GPUs, more NCCL ranks on this host than GPUs, or a
            device that is not here, or another than NCCL's.
    """
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus and device is None else "gloo"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    allowed = (
        ["cpu", *(f"cuda:{gpu}" for gpu in range(gpus))]
        if backend == "gloo"
        else [f"cuda:{local_rank}"]
    )
    if device not in (None, *allowed):
        raise ValueError(
            f"device={device!r} of local rank {local_rank} on {backend}; allowed: {', '.join(allowed)}"
        )
    if backend == "gloo":
        return backend, torch.device(device or "cpu")
    if not dist.is_nccl_available() or gpus == 0:
        raise ValueError(
            "backend='nccl' needs an NVIDIA GPU and there is none here; use backend='gloo'"
        )
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
    device: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[RankContext]:
    """Join the process group, yield this rank's context, and leave the group at the end.

    A rank that torchrun's agent started ends with the agent from here on, see
    `distlab.comm.parent_death`.

    Args:
        backend: `gloo`, `nccl` or None: NCCL if there are GPUs and no device is given, else gloo.
        device: device of gloo ranks: `cpu` (default) or a GPU that they share, such as `cuda:0`.
        timeout_s: seconds that any collective may take before it fails on the ranks that wait.
        store, rank, world_size: rendezvous by hand (tests, notebooks); by default torchrun's
            environment is read, and without torchrun the context is a world of one rank.

    Raises:
        ValueError: a timeout that is not a positive number, or an environment, backend or device
            that `RankEnvironment.read` or `choose_device` refuses.
        OSError: the rendezvous failed: MASTER_PORT is in use, rank 0 was not reached, or ranks are
            missing.
    """
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ValueError(
            f"timeout_s={timeout_s} must be a positive number of seconds, at most {LONGEST_TIMEOUT_S:.0e}"
        )
    place = RankEnvironment.read()
    if store is not None:
        if rank is None or world_size is None:
            raise ValueError("rendezvous through a store needs rank and world_size")
        place = RankEnvironment(False, rank, rank, world_size, world_size)
    if place.launched and place.has_agent:
        end_with_agent()
    backend, chosen = choose_device(backend, place.local_rank, place.local_world_size, device)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = _torchrun_store(place, timeout) if place.launched else dist.HashStore()

    options = None
    if chosen.type == "cuda":
        # Streams that share one of the driver's queues wait for each other; eight queues, its
        # default, are too few for computation, NCCL and copy engines. Read when CUDA starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(chosen)
        # Gathered parameters and activations of long sequences fit into no gap of each other:
        # without segments that grow, 138 GiB were not enough for tensors of 126. A user's own
        # settings stay.
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if backend == "nccl":
        # Communication kernels must get onto SMs that computation keeps busy: a high-priority
        # stream lets a bucket start when the next thread block retires instead of when the queue
        # drains.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # options given by hand are taken as they are, their timeout too
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        pg_options=options,
        device_id=chosen if backend == "nccl" else None,
    )
    over = threading.Event()
    watch = threading.Thread(target=end_when_lost, args=(chosen, timeout_s, over), daemon=True)
    if backend == "nccl":
        watch.start()
    try:
        if backend == "gloo":
            # Each rank connects to all others. One that has done so and leaves again at once would
            # close its connections under a rank that is still making its own.
            dist.barrier()
        yield RankContext(
            place.rank,
            place.local_rank,
            place.world_size,
            chosen,
            backend,
            dist.group.WORLD,
            timeout_s,
        )
    finally:
        # So that the process can exit with the code it means to: a gloo work object that is
        # destroyed during the interpreter's shutdown aborts the process (exit code −6), hence the
        # collection of garbage before it.
        over.set()
        if backend == "nccl":
            watch.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def _torchrun_store(place: RankEnvironment, timeout: timedelta) -> dist.Store:
    """The store of torchrun's rendezvous, with the keys of each restart kept apart.

    torchrun's agent keeps one TCPStore across restarts, and workers of a second attempt would read
    the dead workers' addresses from it (pytorch issue 135712). A prefix per attempt cures that on
    one host; restart counts are not the same on all hosts, so with several the store is left as it
    is.
    """
    store = _rendezvous(place, timeout)
    if _number("GROUP_WORLD_SIZE", 1) == 1:
        store = dist.PrefixStore(f"attempt{place.restarts}", store)
    store.set_timeout(timeout)
    return store


def _rendezvous(place: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Return the TCPStore at MASTER_ADDR:MASTER_PORT. An error says its cause.

    Raises:
        ValueError: an address or a port that cannot be one.
        OSError: the port is in use, no process listens there, or not all ranks came within the
            timeout.
    """
    # torchrun's agent serves it already
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://", timeout=timeout))[0]
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"RANK={place.rank} is set and {missing[0]} is not: start ranks with torchrun, or give all ranks the "
            "host of rank 0 and a free port there"
        )
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0)
    if not 1 <= port <= 65535:
        raise ValueError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    where = f"MASTER_ADDR:MASTER_PORT={host}:{port}"
    limit_s = timeout.total_seconds()
    if place.rank != 0:
        _wait_for_server(host, port, limit_s, where, place.rank)
    found: list[dist.Store | Exception] = []

    def join() -> None:
        try:
            found.append(next(rendezvous("env://", timeout=timeout))[0])
        except Exception as error:
            found.append(error)

    # Of a server that accepts and never answers torch would wait for an answer without end.
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(limit_s + SETTLING_S)
    if found and isinstance(found[0], dist.Store):
        return found[0]
    said = str(found[0]) if found else ""
    if "EADDRINUSE" in said:
        raise OSError(
            f"MASTER_PORT={port} is in use on this host, by another program or another job's rank 0: set MASTER_PORT "
            "to a free port on every rank, or start with torchrun --standalone, which finds one"
        )
    if "clients joined" in said:
        raise OSError(
            f"not all of WORLD_SIZE={place.world_size} ranks came to {where} within {limit_s:g} s "
            f"({said.strip().splitlines()[0]}): start the missing ones with the same MASTER_ADDR and MASTER_PORT"
        )
    if found and not isinstance(found[0], dist.DistError):
        raise found[0]
    raise OSError(
        f"rank {place.rank} reached {where}, but what answers there is not rank 0's store: use another free port "
        f"({said.strip().splitlines()[0] if said else f'no answer within {limit_s:g} s'})"
    )


def _wait_for_server(host: str, port: int, limit_s: float, where: str, rank: int) -> None:
    """Return once a process listens there, which rank 0 may not do yet.

    Raises:
        OSError: none does within the limit, or the host has no address.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, limit_s)).close()
            return
        except OSError as error:  # a name that has no address yet, or nobody who listens yet
            if time.monotonic() > deadline:
                raise OSError(
                    f"rank {rank} found no process that listens at {where} within {limit_s:g} s "
                    f"({error.strerror or error}): start rank 0 there, and look for its message if "
                    "it has ended"
                ) from None
        time.sleep(0.1)
