"""Shapes of attention, the float64 result that benchmarks judge by, and the peers they time, on a
CPU.
"""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from experiments._attention import Shape, build, exact, inputs, last_head, suits
from tests.kernels.attention_reference import in_float64, with_gradients
from tests.kernels.near import near

SHAPES = (
    "1x4:2x40x16",
    "2x1x20:33x16/full",
    "1x2x40x16/window=7",
    "2x1x50x16/documents=4",
    "1x3x24x20",
)


def reference(shape):
    ids = shape.document_ids()
    found = {"causal": shape.causal, "window": shape.window}
    return found | ({} if ids is None else {"document_ids": ids.expand(shape.batch, -1)})


@pytest.mark.parametrize("text", SHAPES)
def test_exact_is_attention_of_the_last_key_head(text):
    shape = Shape.parse(text)
    case = inputs(shape, "float32", "cpu")
    expected = tuple(last_head(x, shape) for x in in_float64(*case, **reference(shape)))
    torch.testing.assert_close(tuple(exact(shape, *case, rows=16)), expected)


@pytest.mark.parametrize(
    "variant, text",
    [
        *itertools.product(("naive", "sdpa", "ours"), SHAPES),
        ("ours-ieee", SHAPES[0]),
        ("ours-deterministic", SHAPES[2]),
    ],
)
def test_variants_are_the_same_function(variant, text):
    shape = Shape.parse(text)
    case = inputs(shape, "float32", "cpu")
    assert suits(variant, shape, "float32") == (variant != "sdpa" or shape.is_plain)
    if suits(variant, shape, "float32"):
        found = with_gradients(build(variant, shape, "cpu"), *case)
        near(found, in_float64(*case, **reference(shape)), 2e-5, 1e-4)


@pytest.mark.parametrize(
    "text", ["1x2x256x16/window=7", "2x2x256x16/documents=4", "2x2x128:256x16"]
)
def test_flex_attention_is_given_the_same_mask(text):
    shape = Shape.parse(text)
    ids = shape.document_ids()
    made = create_block_mask(
        lambda b, h, i, j: shape.visible(i, j, ids),
        None,
        None,
        shape.queries,
        shape.keys,
        device="cpu",
        BLOCK_SIZE=1,
    )
    assert torch.equal(made.to_dense()[0, 0].bool(), shape.mask("cpu"))


def test_pairs_are_counted_as_the_mask_has_them():
    for text in (*SHAPES, "1x1x64x8/documents=64"):
        shape = Shape.parse(text)
        assert (
            shape.flops()
            == 4 * shape.batch * shape.heads * shape.head_dim * shape.mask("cpu").sum().item()
        )


@pytest.mark.parametrize(
    "text",
    [
        "4x32x4096",
        "4x32x0x64",
        "4x32:5x64x64",
        "1x1x64:32x8/documents=2",
        "1x1x8x8/window",
        "1x1x8x8/band=2",
    ],
)
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"shape '.*': give BATCHxHEADS\[:KEY HEADS\]"):
        Shape.parse(text)
