"""How the tests of kernels compare tensors, or sequences of them."""

import torch


def near(found, expected, atol, rtol=None):
    """Fail unless both are as near as this, whatever their types.

    The relative tolerance is the absolute one.
    """
    torch.testing.assert_close(
        found, expected, atol=atol, rtol=atol if rtol is None else rtol, check_dtype=False
    )


def same_bits(found, expected):
    """Fail unless both have the same types and values."""
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
