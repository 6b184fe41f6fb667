"""Interleaved rounds: each variant once per round, in an order that favours none."""

import shutil
import subprocess
import sys
from pathlib import Path

from distlab.measure import interleaved
from distlab.measure.interleaved import interleave, rotated


def test_every_variant_is_called_once_per_round_in_its_order():
    said, called = [], []
    calls = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    found = interleave(calls, 3, progress=said.append)
    assert "".join(called) == "abccbaabc"
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert said[3] == "round 2/3: c" and len(said) == 9
    called.clear()
    interleave(calls, 4, order=rotated)
    assert "".join(called) == "abcbcacababc"


COPIED = """
from interleaved import interleave, paired_ratio, percentiles

ms = interleave({"slow": lambda: 2.0, "fast": lambda: 1.0}, rounds=6)
print(percentiles(ms["slow"])["p50"], paired_ratio(ms["slow"], ms["fast"]).ratio)
"""


def test_the_file_works_where_it_is_copied_to(tmp_path):
    shutil.copy(Path(interleaved.__file__), tmp_path)
    (tmp_path / "script.py").write_text(COPIED)
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, env={"PATH": ""}
    )
    assert done.stdout == "2.0 2.0\n"
    assert "distlab" not in Path(interleaved.__file__).read_text().split('"""')[2]
