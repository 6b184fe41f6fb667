"""The fixtures of all tests of kernels."""

import pathlib

import kernels

from .fused import either, in_pieces, many_rows, poisoned  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
assert pathlib.Path(kernels.__file__).resolve().parent == ROOT / "kernels", (  # another package has this name too
    f"imported {kernels.__file__}, expected the folder kernels/ of this repository"
)
