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
    assert round(PRESETS["10B"].num_parameters / 1e9, 1) == 12.8
    assert round(PRESETS["xl"].num_parameters / 1e9, 2) == 3.41
    assert round(PRESETS["medium"].num_parameters / 1e9, 2) == 0.42
    assert round(PRESETS["8B"].num_parameters / 1e9, 2) == 8.13
    assert round(PRESETS["llama-8B"].num_parameters / 1e9, 2) == 8.03  # as published


def test_presets_of_the_handouts():
    shapes = {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (2560, 10240, 32, 32),
        "10B": (4608, 12288, 50, 36),
        "gpt2-xl": (1600, 6400, 48, 25),
    }
    for name, shape in (shapes | {"8B": (4096, 11008, 34, 32), "llama-8B": (4096, 14336, 32, 32)}).items():
        config = PRESETS[name]
        assert (config.d_model, config.d_ff, config.num_layers, config.num_heads) == shape, name
    assert {PRESETS[name].vocab_size for name in shapes} == {10_000}


def test_overrides_replace_and_are_checked():
    assert preset("small", context_length=64).context_length == 64
    assert PRESETS["small"].context_length == 512
    with pytest.raises(ValueError, match=r"dropout=1\.5"):
        preset("small", dropout=1.5)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"'huge'.*tiny.*small.*10B.*gpt2-xl"):
        preset("huge")
    with pytest.raises(ValueError, match=r"'depth'.*d_model.*num_layers"):
        preset("small", depth=3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("d_model", 0, "d_model=0"),
        ("num_layers", 1.5, r"num_layers=1\.5"),
        ("vocab_size", True, "vocab_size=True"),
        ("num_heads", 3, "not a multiple of num_heads=3"),
        ("num_heads", 64, "odd width 1"),
        ("num_kv_heads", 3, "num_heads=4 is not a multiple of num_kv_heads=3.*divisors of num_heads"),
        ("num_kv_heads", 0, "num_kv_heads=0"),
        ("context_length", -1, "context_length=-1"),
        ("rope_theta", 0.0, "rope_theta"),
        ("norm_eps", float("nan"), "norm_eps=nan"),
        ("dropout", -0.1, "dropout"),
        ("dropout", float("nan"), "dropout=nan"),
        ("attention", "fast", "naive, sdpa, flash"),
    ],
)
def test_refusals_say_what_is_allowed(field, value, message):
    good = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    ModelConfig(**good)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**good, field: value})


def test_options_replace_every_dimension_of_a_preset():
    dimensions = {"context": 8, "vocab": 31, "d_model": 32, "d_ff": 48, "layers": 1, "heads": 2, "kv_heads": 1}
    options = ModelOptions(size="xl", attention="naive", ops="triton", **dimensions)
    rest = {"vocab_size": 31, "context_length": 8, "num_kv_heads": 1, "attention": "naive", "ops": "triton"}
    expected = ModelConfig(32, 48, 1, 2, **rest)
    assert options.model() == expected
    assert ModelOptions(size="small").model() == preset("small")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "huge"}, "size='huge': 'huge' is unknown; allowed: tiny, small"),
        ({"layers": 0}, "layers=0: give a whole number of at least 1"),
        ({"heads": 3}, "num_heads=3; choose num_heads among the divisors"),
        ({"attention": "fast"}, "allowed: naive, sdpa, flash"),
        ({"dtype": "int8"}, "allowed: fp32, bf16, fp16"),
        ({"compile": "all"}, "allowed: off, model, blocks"),
        ({"checkpointing": "every-0"}, "choose none, block, every-K"),
        ({"checkpointing": "qkv:3,block:2"}, "add up to the 4 blocks of the model; levels are block"),
        ({"checkpointing": "some:4"}, "levels are block, attention"),
    ],
)
def test_options_that_no_model_can_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelOptions(**changes)
