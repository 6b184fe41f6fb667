"""Decide, before Triton is imported, that kernels are interpreted where there is no GPU."""

import os
import pathlib
import sys

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    # Tests collected earlier may have made torch import Triton, whose library of kernels is then the compiled one.
    # Forget that import (all but the extension module, which loads once per process): the next one is interpreted.
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        if not name.startswith("triton._C"):
            del sys.modules[name]

import kernels  # the name also belongs to another package: make sure that ours was found

ROOT = pathlib.Path(__file__).resolve().parents[2]
assert pathlib.Path(kernels.__file__).resolve().parent == ROOT / "kernels", (
    f"imported {kernels.__file__}, expected the folder kernels/ of this repository"
)

from .fused import either  # noqa: E402, F401  (a fixture of all tests here; imported after the choice above)
