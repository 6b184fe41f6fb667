"""Shared set-up: one thread per process, markers that skip with a reason, hypothesis without a
clock.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import sys
from collections import defaultdict
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Rank processes import the same modules again and again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job. Commands that we start would inherit it, and tests send them
    # Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Kernels are interpreted where there is no GPU, in every test and in all that tests start.
    # Triton decides that when it is imported: here, before a test sets the variable otherwise.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        from tests.interpreter import patch_once_per_launch

        patch_once_per_launch()

from distlab.comm import rank_context
from distlab.testing import PRELOADED, run_ranks, shut_down

# What many ranks, commands and examined submissions import. The server that forks them imports it
# once. torch.distributed.optim compiles eight optimizers when it is imported, which took 0.4 s of
# each process that uses torch's ZeroRedundancyOptimizer.
PRELOADED += [
    "torch.distributed.optim",
    "distlab.grade.kernels",
    "distlab.check",
    "experiments.ddp_bench",
    "launch.ranks",
]

torch.set_num_threads(1)
gc.disable()  # until the first test, since the collection of tests makes objects that stay
sys.dont_write_bytecode = False  # as the variable above, which this process has read by now

# A loaded two-core machine makes single examples slow; that is no failure of the property.
settings.register_profile("distlab", deadline=None, derandomize=True)
settings.load_profile("distlab")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kill-points",
        type=int,
        default=3,
        help="random points at which a writing checkpoint is killed [3]",
    )
    parser.addoption(
        "--all-layouts", action="store_true", help="every schedule and strategy on eight ranks"
    )
    parser.addoption(
        "--costs",
        type=Path,
        help="file that is told what each test function took, for `make quick`",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need more GPUs than there are. The last line counts them."""
    gpus = torch.cuda.device_count()

    def needs(item: pytest.Item) -> int:
        """Return the number of GPUs that a test needs."""
        if "multigpu" in item.keywords:
            return 2
        return 1 if "gpu" in item.keywords else 0

    config.hook.pytest_deselected(items=[item for item in items if needs(item) > gpus])
    items[:] = [item for item in items if needs(item) <= gpus]


MODULES: list[str] = [""]  # the module whose tests run now


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep later garbage collections from searching what a module's tests begin with.

    Thousands of collected tests and the modules that they import are half a million objects. A
    collection looks at all of them, which takes 0.3 s, and each context of a rank ends with one.
    """
    if item.module.__name__ != MODULES[-1]:
        MODULES[-1] = item.module.__name__
        gc.collect()  # frozen garbage would stay
        gc.freeze()
        gc.enable()


# -- the last line: what the tests and all processes that they started have cost -------------------

TOOK_S: dict[str, float] = defaultdict(float)  # test function → seconds of all its cases
# For each of xdist's workers, CPU seconds of the processes that its tests started.
CPU_S_OF_WORKERS: list[float] = []


def cpu_seconds(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TOOK_S[report.nodeid.partition("[")[0]] += report.duration


def renewed(costs: dict[str, float], took_s: dict[str, float]) -> dict[str, float]:
    """Return test function → seconds, without those that take no time.

    A figure that was right within a half, or within a quarter of a second, stays.
    """
    found = {}
    for name, seconds in sorted(took_s.items()):
        known = costs.get(name, 0.0)
        is_wrong = abs(seconds - known) > max(0.25, seconds / 2)
        cost = round(seconds, 1) if is_wrong else known
        if cost:
            found[name] = cost
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    costs = session.config.getoption("--costs")
    is_worker = hasattr(session.config, "workeroutput")
    if costs and not is_worker:
        before = json.loads(costs.read_text(encoding="utf-8")) if costs.exists() else {}
        costs.write_text(json.dumps(renewed(before, TOOK_S), indent=0) + "\n", encoding="utf-8")
    shut_down()
    # A process counts when it has ended. The ranks' times are counted with the fork server's.
    forkserver._forkserver._stop()
    if is_worker:
        session.config.workeroutput["cpu_s"] = cpu_seconds(resource.RUSAGE_CHILDREN)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    CPU_S_OF_WORKERS.append(getattr(node, "workeroutput", {}).get("cpu_s", 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    children = cpu_seconds(resource.RUSAGE_CHILDREN)
    total = cpu_seconds(resource.RUSAGE_SELF) + children
    started = sum(CPU_S_OF_WORKERS) or children
    terminalreporter.write_line(
        f"{total:.0f} CPU seconds, {started:.0f} of them in processes that tests started"
    )


@pytest.fixture
def context():
    """Return nothing: a test that is marked `ranks(N)` gets the context of its rank."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked `ranks(N)` on N ranks, by default on its `world_size`.

    The ranks use the test's `backend`.
    """
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    given = {}
    for name in pyfuncitem._fixtureinfo.argnames:
        if name != "context":
            given[name] = pyfuncitem.funcargs[name]
    ranks = mark.args[0] if mark.args else given["world_size"]
    test = partial(pyfuncitem.function, **given)
    run_ranks(test, ranks, backend=given.get("backend", "gloo"))
    return True


@pytest.fixture
def one_rank(tmp_path):
    """Yield the context of the only rank of a world of one, in this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    with rank_context(backend="gloo", store=store, rank=0, world_size=1) as context:
        yield context
    gc.freeze()  # the context has collected: what is left are modules that this test has imported
