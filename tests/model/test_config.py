"""Sizes: the closed form of the parameter count, and what is refused."""

import pytest

from distlab.model import PRESETS, ModelConfig, TransformerLM, preset
from distlab.model.config import ModelOptions


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_num_parameters_is_what_the_model_has(name, tied):
    config = preset(name, tie_embeddings=tied)
    model = TransformerLM(config, device="meta")
    assert config.num_parameters == sum(p.numel() for p in model.parameters())


def test_true_sizes_behind_the_names():
    """Llama's by its paper, GPT-3's by Megatron's table."""
    sizes = {
        "small": 0.13,
        "medium": 0.42,
        "large": 0.97,
        "xl": 3.41,
        "10B": 12.83,
        "gpt2-xl": 2.0,
        "8B": 8.13,
    }
    sizes |= {"llama-8B": 8.03, "llama-70B": 70.6, "llama-405B": 405.9, "gpt3-175B": 174.6}
    for name, billions in sizes.items():
        assert PRESETS[name].num_parameters / 1e9 == pytest.approx(billions, abs=0.006, rel=5e-3), (
            name
        )


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"'huge'.*tiny.*small.*10B.*gpt2-xl"):
        preset("huge")
    with pytest.raises(ValueError, match=r"'depth'.*d_model.*num_layers"):
        preset("small", depth=3)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("d_model", 0, "d_model=0"),
        ("num_heads", 3, "not a multiple of num_heads=3"),
        ("num_heads", 64, "odd width 1"),
        (
            "num_kv_heads",
            3,
            "num_heads=4 is not a multiple of num_kv_heads=3.*divisors of num_heads",
        ),
        ("norm_eps", float("nan"), "norm_eps=nan"),
        ("dropout", float("nan"), "dropout=nan"),
        ("attention", "fast", "naive, sdpa, flash"),
    ],
)
def test_refusals_say_what_is_allowed(field, value, message):
    good = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    ModelConfig(**good)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**good, field: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"size": "huge"}, "size='huge': 'huge' is unknown; allowed: tiny, small"),
        ({"dtype": "int8"}, "allowed: fp32, bf16, fp16"),
        ({"compile": "all"}, "allowed: off, model, blocks"),
        ({"checkpointing": "every-0"}, "choose none, block, every-K"),
        (
            {"checkpointing": "qkv:3,block:2"},
            "add up to the 4 blocks of the model; levels are block",
        ),
        ({"checkpointing": "some:4"}, "levels are block, attention"),
    ],
)
def test_options_that_no_model_can_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelOptions(**changes)
