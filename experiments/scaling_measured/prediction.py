"""What the cells are expected to take, in closed form; simulated in a process of its own, before anything is timed."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from distlab.hardware import by_alias, lookup
from distlab.report import Record, commit, environment
from distlab.simulate.estimate import Machine, estimate_step, machine_of

from .config import PEER_OF, MeasureConfig, Regime, key


def predictions(config: MeasureConfig, world_size: int, device_name: str) -> list[Record]:
    """A record per regime, number of ranks and strategy: constants of the datasheet at the shares of its peaks that
    two GPUs of a kind were calibrated to reach (`distlab.simulate.estimate`). Empty where the device is unknown.

    Simulates, so it needs a process without a process group.
    """
    spec = by_alias(config.predict_for) if config.predict_for else lookup(device_name)
    if spec is None:
        return []
    machine = machine_of(spec, dtype=config.dtype)
    facts = {"environment": environment("cpu"), "commit": commit()}
    records = []
    for regime, ranks in config.cells(world_size):
        alone = _estimate(config, regime, machine, "local", 1)
        for strategy in ("local", *(config.strategies if ranks > 1 else ())):
            step_ms = _estimate(config, regime, machine, PEER_OF.get(strategy, strategy), ranks)
            metrics = {"predicted_step_ms": step_ms, "predicted_efficiency_pct": 100 * alone / step_ms}
            if regime.kind == "strong":
                metrics["predicted_efficiency_pct"] /= ranks
            records.append(
                Record("scaling_measured", strategy, key(regime, ranks) | {"device": spec.name}, metrics, **facts)
            )
    return records


def _estimate(config: MeasureConfig, regime: Regime, machine: Machine, strategy: str, ranks: int) -> float:
    time = estimate_step(
        config.model(regime),
        strategy,
        machine,
        batch=regime.per_rank(ranks),
        ranks=ranks,
        dtype=config.dtype,
        bucket_size_mb=config.bucket_size_mb,
    )
    return 1e3 * time.step


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a fresh interpreter. Raises RuntimeError with what it wrote to stderr if it fails."""
    code = "import pickle, sys; f, a = pickle.load(sys.stdin.buffer); pickle.dump(f(*a), sys.stdout.buffer)"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((function, arguments)),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        raise RuntimeError(f"predictions failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return pickle.loads(done.stdout)
