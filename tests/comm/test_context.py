"""The rank context: devices, timeouts, restarts, and exit codes that mean what they say."""

import socket
import textwrap
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distlab.comm import context as context_module
from distlab.comm import rank_context
from distlab.comm.context import RankEnvironment, choose_device
from distlab.testing import run_ranks
from tests.commands import python


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


@pytest.mark.parametrize(
    "gpus, asked, refusal",
    [
        (0, ("mpi", 0, 1), "'mpi' is unknown; allowed: gloo, nccl"),
        (0, ("nccl", 0, 1), "use backend='gloo'"),
        (2, (None, 0, 4), "4 NCCL ranks on a host with 2 GPU"),
        (
            1,
            ("gloo", 0, 2, "cuda:1"),
            "device='cuda:1' of local rank 0 on gloo; allowed: cpu, cuda:0",
        ),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, gpus, asked, refusal):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match=refusal):
        choose_device(*asked)


def test_ranks_have_a_gpu_each_or_share_the_one_they_are_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_device(None, 1, 2) == ("nccl", torch.device("cuda", 1))
    assert choose_device(None, 1, 2, "cuda:0") == ("gloo", torch.device("cuda", 0))


def freed_in_pieces(context):
    piece = 2**28
    pieces = [torch.empty(piece, dtype=torch.uint8, device=context.device) for _ in range(4)]
    del pieces
    whole = torch.empty(4 * piece, dtype=torch.uint8, device=context.device)
    return torch.cuda.memory_reserved() - whole.numel()


@pytest.mark.gpu
def test_what_was_freed_in_pieces_serves_a_larger_tensor():
    """Else 126 GiB of tensors did not fit into 138: no piece, once reserved, was of use to anything
    larger.
    """
    assert run_ranks(freed_in_pieces, 1, backend="nccl")[0] < 2**26


OUTSIDE = {
    "RANK=x WORLD_SIZE=2": "RANK='x' is not a whole number",
    "RANK=0 WORLD_SIZE=": "WORLD_SIZE='' is not a whole number",
    "RANK=2 WORLD_SIZE=2": "RANK=2 must be below WORLD_SIZE=2: .* from 0 to 1",
    "RANK=0 WORLD_SIZE=0": "WORLD_SIZE=0 must be at least 1",
    "RANK=1": "RANK=1 is set and WORLD_SIZE is not",
    "RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2": (
        "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"
    ),
    "RANK=0 WORLD_SIZE=2": "RANK=0 is set and MASTER_ADDR is not",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=65536": (
        "a port is a number from 1 to 65535"
    ),
}


@pytest.fixture
def outside(monkeypatch):
    """Sets the variables that a launcher would set, and no others."""

    def put(variables):
        for name in (
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            "TORCHELASTIC_USE_AGENT_STORE",
        ):
            monkeypatch.delenv(name, raising=False)
        for variable in variables.split():
            monkeypatch.setenv(*variable.split("="))

    return put


@pytest.mark.parametrize("variables, expected", OUTSIDE.items())
def test_an_environment_that_cannot_be_is_refused_before_anybody_waits(
    outside, variables, expected
):
    outside(variables)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=expected), rank_context(backend="gloo", timeout_s=30):
        pass
    assert time.monotonic() - begin < 5 and not dist.is_initialized()


@pytest.mark.parametrize("hosts, sees_the_first", [("1", False), ("2", True)])
def test_a_restarted_job_does_not_see_the_addresses_of_its_first_attempt(
    monkeypatch, hosts, sees_the_first
):
    """Hosts count their restarts for themselves, so several hosts must share all keys."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    served = dist.HashStore()  # torchrun's agent keeps one store for all attempts
    monkeypatch.setattr(context_module, "_rendezvous", lambda place, timeout: served)
    stores = []
    for restarts in range(2):
        place = RankEnvironment(
            launched=True,
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            restarts=restarts,
        )
        stores.append(context_module._torchrun_store(place, timedelta(seconds=5)))
    first, second = stores
    first.set("address", "of a rank that is dead")
    assert first.check(["address"])
    assert second.check(["address"]) == sees_the_first


def by_hand(rank, port):
    return f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"


@pytest.fixture
def silent_port():
    """A port at which something listens that is no store and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_in_use_is_named_with_the_remedy(outside, silent_port):
    outside(by_hand(0, silent_port))
    expected = f"MASTER_PORT={silent_port} is in use on this host.*free port.*torchrun --standalone"
    with pytest.raises(OSError, match=expected), rank_context(backend="gloo", timeout_s=5):
        pass


def test_what_answers_and_is_no_store_is_named(outside, silent_port, monkeypatch):
    monkeypatch.setattr("distlab.comm.context.SETTLING_S", 0.5)
    outside(by_hand(1, silent_port))
    expected = (
        f"rank 1 reached .*127.0.0.1:{silent_port}, but what answers there is not rank 0's store"
    )
    with pytest.raises(OSError, match=expected), rank_context(backend="gloo", timeout_s=0.5):
        pass


def test_a_rank_0_that_is_not_there_and_ranks_that_do_not_come_are_told_apart(outside):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # nobody listens there
        outside(by_hand(1, port))
        expected = f"rank 1 found no process that listens at .*127.0.0.1:{port} within 0.5 s"
        with pytest.raises(OSError, match=expected), rank_context(backend="gloo", timeout_s=0.5):
            pass
    outside(by_hand(0, port))
    expected = "not all of WORLD_SIZE=2 ranks came to .* within 1 s .*1/2 clients joined"
    with pytest.raises(OSError, match=expected), rank_context(backend="gloo", timeout_s=1):
        pass


@pytest.mark.parametrize("timeout_s", [float("nan"), 0, 1e9])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout_s):
    with (
        pytest.raises(ValueError, match="must be a positive number of seconds"),
        rank_context(timeout_s=timeout_s),
    ):
        pass


@pytest.mark.ranks(3)
def test_every_rank_knows_its_place(context):
    assert context.local_rank == context.rank == dist.get_rank()
    assert (context.world_size, context.device.type, context.backend) == (3, "cpu", "gloo")


def join_late(context, path):
    """(when this rank had connected to the others, when its context opened) for a group that rank 1
    joins late.
    """
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


JOB = """
    import torch, torch.distributed as dist
    from distlab.comm import rank_context

    with rank_context(backend="gloo", timeout_s=10) as context:
        works = []
        for step in range(20):
            value = torch.full((1000,), float(context.rank + 1))
            works.append(dist.all_reduce(value, group=context.group, async_op=True))
        for work in works:
            work.wait()
        assert value[0].item() == sum(range(1, context.world_size + 1))
"""


def test_finished_gloo_jobs_exit_with_zero(tmp_path):
    """Check that no gloo work is destroyed at interpreter shutdown, which aborts a finished job."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script)
    assert done.returncode == 0, done.stderr
