"""One line of JSON per step, that a restart continues where the checkpoint stands."""

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """A JSONL file; one rank writes it.

    Args:
        path: of the file.
        first_step: lines of this step and later ones are from a run that was lost, and removed.
    """

    def __init__(self, path: Path, first_step: int = 0):
        kept = [line for line in read_journal(path) if line["step"] < first_step] if path.exists() else []
        temporary = path.with_name(f".tmp-{path.name}")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, visible to readers at once."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; every line is on the disk already."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; a last line that a dying process cut short is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
