"""Kernels that hang, exit, crash, print or change what they must not, for `distlab kernel`."""

import ctypes
import os
import sys

import torch
import torch.nn.functional as F


def right(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def hangs(x, weight):
    while x.shape[0] == 3:
        pass
    return right(x, weight)


def exits(x, weight):
    if x.shape[0] == 3:
        os._exit(7)
    return right(x, weight)


def crashes(x, weight):
    return right(x, weight) if x.shape[0] != 3 else ctypes.string_at(0)


def prints_without_end(x, weight):
    while True:
        print("x" * 1_000_000)


def raises(x, weight):
    raise KeyError("no such\nthing")


def refuses_strides(x, weight):
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return right(x, weight)


def changes_its_input(x, weight):
    with torch.no_grad():
        x.mul_(2)
    return right(x, weight)


def returns_no_tensor(x, weight):
    return None


def breaks_the_gpu(x, weight):
    """From 3 rows on, no call of a GPU works. On a CPU the checker is told so."""
    if x.shape[0] == 3:
        for name in ("distlab.kernel_check.judge", "distlab.kernel_check.report", "__main__"):
            sys.modules[name].works = lambda device: False
    return right(x, weight)
