"""The rank context: devices, timeouts, restarts, and exit codes that mean what they say."""

import subprocess
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankContext, rank_context
from distlab.comm.context import choose_device
from distlab.testing import run_ranks
from tests.commands import torchrun


def test_without_torchrun_the_world_is_one_rank():
    with rank_context(backend="gloo", timeout_s=5) as context:
        assert (context.rank, context.world_size, context.is_main) == (0, 1, True)
        value = torch.ones(1)
        dist.all_reduce(value, group=context.group)
        assert value.item() == 1.0
    assert not dist.is_initialized()


def test_the_group_is_left_after_an_exception_too():
    with pytest.raises(KeyError), rank_context(backend="gloo", timeout_s=5):
        raise KeyError("user code")
    assert not dist.is_initialized()


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match="timeout_s=0"), rank_context(timeout_s=0):
        pass


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="'mpi' is unknown; allowed: gloo, nccl"):
        choose_device("mpi", 0, 1)


def test_nccl_without_a_gpu_says_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="use backend='gloo'"):
        choose_device("nccl", 0, 1)


def test_more_nccl_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match="4 NCCL ranks on a host with 2 GPU"):
        choose_device(None, 0, 4)
    assert choose_device(None, 1, 2) == ("nccl", torch.device("cuda", 1))


def places(context: RankContext) -> tuple:
    return context.rank, context.local_rank, context.world_size, context.device.type, context.backend


def test_every_rank_knows_its_place():
    assert run_ranks(places, 3) == [(r, r, 3, "cpu", "gloo") for r in range(3)]


def join_late(context: RankContext, path: str) -> tuple[float, float]:
    """(when this rank had connected to the others, when its context opened) for a group that rank 1 joins late."""
    dist.destroy_process_group()
    connect, connected_at = dist.init_process_group, []

    def connect_late(*args, **kwargs):
        connect(*args, **kwargs)
        time.sleep(0.5 * context.rank)
        connected_at.append(time.monotonic())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", connect_late)
        place = {"store": dist.FileStore(path, 2), "rank": context.rank, "world_size": 2}
        with rank_context(backend="gloo", timeout_s=20, **place):
            return connected_at[0], time.monotonic()


def test_no_context_opens_before_all_ranks_have_joined(tmp_path):
    """A rank that leaves earlier closes the connections that another is still making."""
    (_, opened), (joined, _) = run_ranks(join_late, 2, str(tmp_path / "store"))
    assert opened >= joined


TRAIN = """
    import os, signal, sys
    import torch, torch.distributed as dist
    from distlab.comm import rank_context

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with rank_context(backend="gloo", timeout_s=10) as context:
        works = []
        for step in range(20):
            value = torch.full((1000,), float(context.rank + 1))
            works.append(dist.all_reduce(value, group=context.group, async_op=True))
            if step == 10 and attempt == 0 and context.rank == 1 and "--kill" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
        for work in works:
            work.wait()
        assert value[0].item() == 3.0
        print(f"rank {context.rank} finished attempt {attempt}", flush=True)
"""


def train(tmp_path, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    return torchrun("--nproc_per_node=2", f"--max-restarts={restarts}", script, *arguments, timeout=90)


def test_a_killed_job_restarts_and_finds_its_new_peers(tmp_path):
    """RELIABILITY §0 B: torchrun's store still holds the dead workers' addresses; a prefix keeps them apart."""
    done = train(tmp_path, "--kill", restarts=2)
    assert done.returncode == 0, done.stderr
    assert "rank 0 finished attempt 1" in done.stdout and "rank 1 finished attempt 1" in done.stdout


def test_finished_gloo_jobs_exit_with_zero(tmp_path):
    """RELIABILITY §0 C: a work object destroyed at interpreter shutdown aborts a job that had succeeded."""
    for _ in range(3):
        done = train(tmp_path)
        assert done.returncode == 0, done.stderr
