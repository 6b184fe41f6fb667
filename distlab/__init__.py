"""distlab: hand-written data parallelism and sharding, and the instruments that measure them."""

import importlib.util
import warnings
from pathlib import Path

__version__ = "0.1.0"


def foreign_kernels() -> str | None:
    """Say where `import kernels` leads, if that is another project's package and not the one beside this."""
    spec = importlib.util.find_spec("kernels")
    beside = Path(__file__).parents[1]
    if spec is None or not spec.origin or beside.samefile(Path(spec.origin).parents[1]):
        return None
    return f"`import kernels` finds {spec.origin}, and not the package of distlab in {beside}: rename it or move away"


if another := foreign_kernels():
    warnings.warn(another, RuntimeWarning, stacklevel=2)

def run(experiment: str, **options: object) -> list[dict]:
    """Run an experiment as `distlab run` does, and return its rows: the variant, options and metrics of each.

        rows = distlab.run("ddp_bench", strategies=["flat", "bucketed"], batch=4)
        pandas.DataFrame(rows)

    Args:
        options: as on the command line, with `_` for `-`; a list for several values, True for an option without one.

    Raises:
        RuntimeError: the run failed, or a row is wrong; with what the command said.
    """
    import json
    import subprocess
    import sys

    from distlab.command import COMMAND
    from distlab.report.record import read_json

    words = [sys.executable, str(COMMAND), "run", experiment, "--json"]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        words += map(str, value if isinstance(value, list | tuple) else [] if value is True else [value])
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"distlab run {experiment} ended with exit code {done.returncode}:\n{done.stderr}")
    records = read_json(json.loads(done.stdout.splitlines()[-1])["out"] + "/records.json")
    return [{"variant": record.variant, **record.config, **record.metrics} for record in records]
