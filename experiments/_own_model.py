"""Time and memory of a user's model from a fake step, for `memory_breakdown` and `plan`."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.bench.task import factory_of, made, own_task, source_of
from distlab.cli_errors import message_of
from distlab.parallel import ParallelModel
from distlab.precision import DTYPES
from distlab.report.provenance import commit_of
from distlab.simulate.step import Mark, SimulatedStep, simulate_step
from distlab.train.step import TrainStep, under_autocast


def own_facts(factory: str | None) -> dict[str, str | None]:
    """Return what a record says of a user's model: the commit of the repository that holds it."""
    # The lab's own models are part of the commit of the record itself.
    if factory is None:
        return {}
    return {"model_commit": commit_of(source_of(factory_of(factory)))}


# A search over many choices asks for the same simulated steps again, so results are cached.
@lru_cache(maxsize=256)
def simulated(
    name: str, strategy: str, batch: int, ranks: int, dtype: str = "fp32"
) -> SimulatedStep:
    """Simulate one step of a user's model under a strategy, with fused AdamW, on one of `ranks`.

    Args:
        name: name of its factory.
        batch: number of examples on a rank.

    Raises:
        ValueError: the model reads values of tensors (for example a router that picks experts),
            which fake tensors do not have, or the strategy refuses it.
    """
    task = own_task(name, batch)

    def make_model() -> nn.Module:
        return made(name)[0]  # without its loss and its examples

    def make_step(wrapper: ParallelModel, optimizer: Optimizer, mark: Mark) -> Callable[[], Any]:
        # Batch 0 of rank 0 stands for all: without values, only shapes and dtypes matter.
        examples = task.batches(0, 0, torch.device("cpu"))
        loss_fn = task.loss_fn
        if wrapper.casts_parameters:
            # The strategy casts parameters, and a user's inputs have a dtype of their own, as in
            # `Trial`.
            loss_fn = under_autocast(loss_fn, torch.device("cpu"), DTYPES[dtype])
        train = TrainStep(wrapper, optimizer, loss_fn, mark=mark)
        return partial(train, examples)

    try:
        with warnings.catch_warnings():
            # deepcopy of torch 2.11 accesses the pointer, and so warns.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return simulate_step(
                strategy,
                make_model,
                make_step,
                world_size=ranks,
                compute_dtype=DTYPES[dtype],
            )
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        # Any line of the user's model may fail on fake tensors, so there is no list of errors to
        # expect.
        reason = message_of(error) or f"{type(error).__name__}: {first_line}"
        raise ValueError(
            f"--model {name} cannot be stepped under {strategy} on tensors without values, from "
            f"which memory and time are predicted ({reason}); what reads values must be measured: "
            f"distlab run ddp_bench --model {name}"
        ) from error


# Category → its name in `theory.memory`.
PARTS = {"optimizer": "optimizer_state", "backward": "temporary"}


def peaks(
    name: str, strategies: Iterable[str], batch: int, ranks: int, dtype: str
) -> dict[str, dict[str, Any]]:
    """Return strategy → bytes `after_init`, bytes of the `peak` by category, and its `phase`.

    The steps are `simulated`. They need a process without a process group, and so run in one of
    their own. Strategies that cannot be simulated are left out.
    """
    command = [
        sys.executable,
        # -P keeps the working directory off the path of imports, where a file could hide a module.
        "-P",
        "-m",
        "experiments._own_model",
        name,
        str(batch),
        str(ranks),
        dtype,
        *strategies,
    ]
    # The child finds the user's module by the paths that this process has, in the same order.
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    # A prediction that cannot be made leaves its columns empty, and the measurement stands.
    return json.loads(done.stdout) if done.returncode == 0 else {}


def main(name: str, batch: str, ranks: str, dtype: str, *strategies: str) -> None:
    """Print `peaks` in this process as JSON."""
    found = {}
    for strategy in strategies:
        # A strategy that cannot be simulated leaves the others with their predictions.
        with suppress(ValueError):
            step = simulated(name, strategy, int(batch), int(ranks), dtype)
            peak = {
                PARTS.get(category, category): size
                for category, size in step.peak.by_category.items()
            }
            found[strategy] = {
                "after_init": sum(step.after_init.values()),
                "peak": peak,
                "phase": step.peak.phase,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
