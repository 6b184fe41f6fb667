"""One line of JSON per step, that a restart continues where the checkpoint stands."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """A JSONL file; one rank writes it.

    Args:
        path: of the file.
        first_step: lines of this step and later ones are from a run that was lost, and removed.

    Attributes:
        lines: what the file holds, as this process knows it.
    """

    def __init__(self, path: Path, first_step: int = 0):
        found = read_journal(path) if path.exists() else []
        self.lines = [line for line in found if line["step"] < first_step]
        temporary = path.with_name(f".tmp-{path.name}")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, visible to readers at once."""
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; every line is on the disk already."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; what is no such line is left out, as the last one that a dying process cut short."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int) and "loss" in line:
                lines.append(line)
    return lines
