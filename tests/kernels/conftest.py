"""The fixtures of all tests of kernels."""

import pathlib

from kernels import cost

from .fused import either, in_pieces, many_rows, poisoned  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
# An installed package can have a module of this name.
assert pathlib.Path(cost.__file__).resolve().parent == ROOT / "kernels", (
    f"imported {cost.__file__}, expected a file of the folder kernels/ of this repository"
)
