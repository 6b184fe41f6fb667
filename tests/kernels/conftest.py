"""Decide, before Triton is imported, that kernels are interpreted where there is no GPU."""

import os
import pathlib

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import kernels  # the name also belongs to another package: make sure that ours was found

ROOT = pathlib.Path(__file__).resolve().parents[2]
assert pathlib.Path(kernels.__file__).resolve().parent == ROOT / "kernels", (
    f"imported {kernels.__file__}, expected the folder kernels/ of this repository"
)
