"""Importing the lab changes nothing in torch.

What watching takes is there only while something is watched.
"""

import gc
import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers

from distlab.parallel import STRATEGIES, checks
from tests.parallel.test_contract import on_one_rank

IMPORTS = """
import importlib, os, pkgutil
from torch.amp import GradScaler
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers
"""
IMPORT_ALL = """
before, environment = changed_in_torch(), dict(os.environ)
import distlab
for module in pkgutil.walk_packages(distlab.__path__, "distlab."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert changed_in_torch() == before, changed_in_torch()
assert dict(os.environ) == environment
"""


def changed_in_torch():
    """What wrappers change in torch: its process-wide hooks, by name, and a function."""
    places = {
        **{name: value for name, value in vars(of_modules).items() if name.startswith("_global_")},
        "_global_optimizer_pre_hooks": of_optimizers._global_optimizer_pre_hooks,
        "_global_optimizer_post_hooks": of_optimizers._global_optimizer_post_hooks,
    }
    hooks = {name: len(value) for name, value in places.items() if isinstance(value, dict)}
    methods = (GradScaler.step, GradScaler.unscale_)
    return tuple(hooks.items()), [method.__code__.co_filename for method in methods]


def test_importing_changes_nothing():
    """Every module of distlab, in a process of its own."""
    script = IMPORTS + inspect.getsource(changed_in_torch) + IMPORT_ALL
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


def let_go_of_others():
    """Wrappers of earlier tests, which a rank's process may still hold."""
    for wrapper in list(checks._watched):
        checks.release(wrapper)


@pytest.mark.parametrize("strategy", ["naive", "zero1", "zero2", "fsdp"])
@on_one_rank
def test_the_first_wrapper_brings_the_hooks_and_the_last_takes_them_away(context, strategy):
    let_go_of_others()
    untouched = changed_in_torch()
    build = STRATEGIES[strategy].build

    def wrapped():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return build(module, context.group, torch.optim.SGD, {"lr": 0.1})[0]

    first = wrapped()
    watching = changed_in_torch()
    assert watching != untouched
    second = wrapped()
    assert changed_in_torch() == watching  # not one more for each
    first.close()
    assert changed_in_torch() == watching
    del first, second
    gc.collect()  # a wrapper that is dropped is watched no more either
    assert changed_in_torch() == untouched
    third = wrapped()
    assert changed_in_torch() == watching
    third.close()
    assert changed_in_torch() == untouched
