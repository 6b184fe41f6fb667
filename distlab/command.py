"""The script `distlab`: run the command of the checkout or of an installed distlab (setup.py)."""

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = (
    (HERE / "commands" if (HERE / "commands").is_dir() else HERE.parent) / "launch" / "__main__.py"
)


def console() -> None:
    """Run the command of `sys.argv`, and end the process with its exit code."""
    runpy.run_path(str(COMMAND), run_name="__main__")
