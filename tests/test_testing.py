"""run_ranks: results in rank order, tracebacks of the children, deadlines, and a fresh start after
a failure.
"""

import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from distlab.comm import collectives
from distlab.testing import RanksFailed, run_ranks, shut_down
from tests.comm.test_parent_death import ends_within, is_alive
from tests.commands import ROOT, environment, python


def square(context, base):
    return base + context.rank**2, os.getpid()


def test_results_come_in_rank_order_from_processes_that_are_reused():
    first, second = run_ranks(square, 3, 10), run_ranks(square, 3, 20)
    assert [value for value, _ in first] == [10, 11, 14]
    assert [value for value, _ in second] == [20, 21, 24]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def die_beside_a_loader(context, file):
    loading = iter(DataLoader(range(1000), num_workers=1))
    file.write_text(str(loading._workers[0].pid))
    os._exit(1)


def test_the_process_that_loads_a_killed_rank_s_data_ends(tmp_path):
    with pytest.raises(RanksFailed, match="the process died, exit code 1"):
        run_ranks(die_beside_a_loader, 1, tmp_path / "pid")
    assert ends_within(int((tmp_path / "pid").read_text()), 10)  # which looks every five seconds


def fail_on_rank_1(context):
    if context.rank == 1:
        raise KeyError("this one")


def pids(ranks):
    return [pid for _, pid in run_ranks(square, ranks, 0)]


def test_a_rank_s_traceback_reaches_the_test_and_the_ranks_serve_the_next():
    before = pids(3)
    with pytest.raises(
        RanksFailed, match=r"rank 1[\s\S]*fail_on_rank_1[\s\S]*KeyError: 'this one'"
    ):
        run_ranks(fail_on_rank_1, 2)
    assert pids(3) == before


def fail_or_lose_rank_1(context, how):
    """Rank 1 of 3 fails by itself; the others only because it is gone."""
    store = dist.distributed_c10d._get_default_store()
    if context.rank == 1:
        if how == "raises":
            raise ValueError("my bug")
        if how == "raises later":  # than the others, which notice that its connections are closed
            dist.distributed_c10d._abort_process_group()
            store.wait(["noticed 0", "noticed 2"])
            raise ValueError("my bug")
        if how == "raises in a handler":
            try:
                collectives.sum_tensor(torch.ones(1, 2, dtype=torch.float8_e4m3fn), context.group)
            except RuntimeError as error:
                raise ValueError("my bug") from error
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    try:
        collectives.sum_tensor(torch.ones(1), context.group)
    except RuntimeError as error:
        store.set(f"noticed {context.rank}", "")
        raise KeyError("no sum") from error


@pytest.mark.parametrize(
    "how, cause",
    [
        ("raises", "ValueError: my bug"),
        ("raises later", "ValueError: my bug"),
        ("raises in a handler", "ValueError: my bug"),
        ("dies", "the process died, exit code -9 (SIGKILL)"),
        ("hangs", "no answer, while other ranks waited for this one in vain"),
    ],
)
def test_the_cause_comes_before_its_consequences(how, cause):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_or_lose_rank_1, 3, how, group_timeout_s=2.0)
    assert str(caught.value).startswith(f"rank 1: {cause}\n--- rank 1 ---\n")
    assert caught.value.cause == cause
    assert next(iter(caught.value.failures)) == 1 and len(caught.value.failures) == 3
    if "raises" in how:  # native code leaves the stacks of all threads
        assert "_run_job" not in str(caught.value)


def fail_in_turn(context):
    if context.rank != 2:
        context.group.barrier().wait()
    raise ValueError(f"of rank {context.rank}")


def test_of_two_causes_the_first_comes_first():
    """Rank 2 fails before the others, which wait for its connection."""
    with pytest.raises(RanksFailed, match=r"^rank 2: ValueError: of rank 2\n"):
        run_ranks(fail_in_turn, 3)


def test_a_failure_survives_a_pickle():
    failed = pickle.loads(pickle.dumps(RanksFailed({1: "a traceback", 0: "another"}, "a cause")))
    assert (list(failed.failures), failed.cause) == ([1, 0], "a cause")
    assert str(failed).startswith("rank 1: a cause")


def average_on_some(context):
    if context.rank == 0:
        raise ValueError("before the others come")
    collectives.sum_tensor(torch.ones(1), context.group)


def test_ranks_in_a_collective_with_one_that_raised_end_with_it_and_serve_the_next():
    before = pids(2)
    with pytest.raises(RanksFailed, match="before the others come"):
        run_ranks(average_on_some, 2)
    assert pids(2) == before


def hang_on_rank_0(context):
    if context.rank == 0:
        time.sleep(60)


def test_a_call_past_its_deadline_shows_where_it_hung():
    before, begin = pids(2), time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang_on_rank_0, 2, deadline_s=3)
    assert time.monotonic() - begin < 30
    assert set(caught.value.failures) == {0}
    assert "no answer within 3 s" in str(caught.value) and "in hang_on_rank_0" in str(caught.value)
    assert not set(before) & set(pids(2))


def exit_quietly(context):
    os._exit(0)


def test_a_rank_that_exits_with_zero_is_no_success():
    """Check that a rank which exits early with code 0 makes the run fail."""
    with pytest.raises(RanksFailed, match="the process died, exit code 0"):
        run_ranks(exit_quietly, 1)


def test_a_local_function_is_refused_with_the_reason():
    with pytest.raises(TypeError, match="importable function"):
        run_ranks(lambda context: None, 1)
    with pytest.raises(ValueError, match="at least one rank"):
        run_ranks(square, 0, 1)


SCRIPT = """
import os, time
from distlab.testing import run_ranks

def where(context):
    # one write: the ranks share the pipe, and print may take two
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep({seconds})
    return context.rank

{guard}
    print(run_ranks(where, 2))
"""


def script(folder, guard, seconds=0):
    path = folder / "script.py"
    path.write_text(SCRIPT.format(guard=guard, seconds=seconds))
    return path


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    """Every rank process imports the script, whose call would start ranks of its own."""
    done = python(script(tmp_path, "if True:"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"RuntimeError: the rank processes did not get past importing {tmp_path}/script.py"
    )
    assert 'under `if __name__ == "__main__":`' in last and done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    "attributes", [{}, {"__file__": "<stdin>"}], ids=["prompt", "script through a pipe"]
)
def test_a_function_of_a_notebook_or_a_prompt_is_refused_with_the_remedy(monkeypatch, attributes):
    main = ModuleType("__main__")
    vars(main).update(attributes)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(square, "__module__", "__main__")
    with pytest.raises(
        TypeError,
        match=r"cannot import square from a notebook or a prompt: write it to a file .*%%wr",
    ):
        run_ranks(square, 2, 0)


def test_a_function_that_was_imported_from_a_file_runs_on_ranks_of_a_script_through_a_pipe(
    monkeypatch,
):
    main = ModuleType("__main__")
    main.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    shut_down()
    assert [value for value, _ in run_ranks(square, 2, 1)] == [1, 2]


def test_ranks_run_a_file_as_it_is_now(monkeypatch, tmp_path):
    """Edited and reloaded in a notebook, or a file that it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    shut_down()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "edited_below.py").write_text("number = 1")
    text = "from edited_below import number\n\ndef edited(context):\n    return 10 * number"
    (tmp_path / "edited.py").write_text(text)
    found = []
    for name, change in (
        ("edited.py", ""),
        ("edited_below.py", "number = 2"),
        ("edited.py", f"{text} + 5"),
    ):
        (tmp_path / name).write_text(change or text)
        os.utime(tmp_path / name, ns=(0, len(found) * 10**9))
        importlib.invalidate_caches()
        for module in ("edited_below", "edited"):
            importlib.reload(importlib.import_module(module))
        found.append(run_ranks(sys.modules["edited"].edited, 2))
    assert found == [[10, 10], [20, 20], [25, 25]]
    assert run_ranks(square, 1, 0)[0][1] == run_ranks(square, 1, 0)[0][1]


def test_ranks_end_when_the_program_that_started_them_is_killed(tmp_path):
    path = script(tmp_path, 'if __name__ == "__main__":', seconds=60)
    program = subprocess.Popen(
        [sys.executable, path], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    ranks = [int(program.stdout.readline()) for _ in range(2)]
    assert all(map(is_alive, ranks))
    program.kill()
    assert all(ends_within(rank, 2) for rank in ranks)
    program.wait()


INTERRUPTED = """
import os, signal, threading
from distlab.testing import run_ranks

def rank(context):
    return context.rank

def interrupt(context):
    if context.rank == 0:
        os.killpg(0, signal.SIGINT)  # as a terminal and a notebook do: caller and ranks
    threading.Event().wait()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_ranks(rank, 2)
    try:
        run_ranks(interrupt, 2)
    except KeyboardInterrupt as stopped:
        print(*stopped._render_traceback_())
    print(run_ranks(rank, 2))
"""


def test_an_interrupt_ends_the_ranks_in_one_line_and_the_next_call_starts_new_ones(tmp_path):
    (tmp_path / "script.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert (done.stdout.splitlines(), done.stderr) == (
        ["run_ranks was interrupted, and its 2 ranks are ended", "[0, 1]"],
        "",
    )


A_TEST_OF_THE_USER_S = """
import os
import torch
from torch import nn
from distlab.comm import collectives
from distlab.testing import check_gradients, run_ranks


def work(context):
    if context.rank == 1:
        raise ValueError("my bug")
    collectives.sum_tensor(torch.ones(1), context.group)


def build():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def batch(size, generator):
        return torch.randn(size, 4, generator=generator)

    def loss(model, batch):
        return model(batch).square().mean()

    return model, batch, loss


def not_averaged(module, group):
    return module


def aborts(module, group):
    os.abort()


def test_ranks():
    run_ranks(work, 2)


def test_a_local_function():
    run_ranks(lambda context: None, 2)


def test_gradients():
    verdict = check_gradients(build, not_averaged, micro_batches=1)
    assert verdict.right, verdict


def test_abort():
    check_gradients(build, aborts)


def test_no_model():
    check_gradients(work, not_averaged)
"""


def test_pytest_shows_the_cause_and_no_source_of_the_library(tmp_path):
    (tmp_path / "test_mine.py").write_text(A_TEST_OF_THE_USER_S)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        env=environment() | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    parts = re.split(r"^_+ (test_\w+) _+$", done.stdout, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert len(shown) == 5, done.stdout
    for text in shown.values():
        assert not re.search(r"^distlab/|testing\.py:\d+: \w", text, flags=re.MULTILINE), text
        assert "def run_ranks" not in text and "__tracebackhide__" not in text
    first = re.search(r"^E .*", shown["test_ranks"], flags=re.MULTILINE).group()
    assert first.endswith("RanksFailed: rank 1: ValueError: my bug")
    assert "TypeError: run_ranks needs an importable function" in shown["test_a_local_function"]
    assert "AttributeError" not in shown["test_a_local_function"]
    assert (
        "WRONG: 2 of 2 tensors differ from one process (2 ranks × 1 micro-batch"
        in shown["test_gradients"]
    )
    assert "Verdict(" not in done.stdout
    assert "the process died, exit code -6 (SIGABRT), as gloo ends a process" in shown["test_abort"]
    assert (
        "So nothing was compared with one process, and the model may be right or wrong"
        in shown["test_abort"]
    )
    assert "ValueError" in shown["test_no_model"]
