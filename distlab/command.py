"""The script `distlab`: runs the command of the checkout, or that inside an installed distlab (see setup.py)."""

import runpy
from pathlib import Path


def console() -> None:
    """Run the command of `sys.argv`, and end the process with its exit code."""
    here = Path(__file__).resolve().parent
    installed = here / "commands"
    root = installed if installed.is_dir() else here.parent
    runpy.run_path(str(root / "launch" / "__main__.py"), run_name="__main__")
