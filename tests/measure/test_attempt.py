"""Failures of a measurement become its status."""

import torch

from distlab.measure.validity import attempt


def test_metrics_or_why_there_are_none():
    def fail(error):
        raise error

    assert attempt(lambda: {"ms": 1.0}) == {"status": "ok", "ms": 1.0}
    assert attempt(lambda: fail(torch.OutOfMemoryError("too large"))) == {"status": "OOM"}
    host = RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    )
    assert attempt(lambda: fail(host)) == attempt(lambda: fail(MemoryError())) == {"status": "OOM"}
    assert attempt(lambda: fail(RuntimeError("no kernel\nand more"))) == {
        "status": "RuntimeError: no kernel"
    }
    assert attempt(lambda: fail(RuntimeError())) == {"status": "RuntimeError: "}
