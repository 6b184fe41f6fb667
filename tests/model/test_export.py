"""The model under Llama's names: the file's layout, and the same logits from transformers where
that is installed.
"""

import json
from dataclasses import replace

import pytest
import torch

from distlab.model.config import ModelConfig
from distlab.model.export import export
from distlab.model.transformer import TransformerLM

CONFIG = ModelConfig(
    32, 48, 2, 4, num_kv_heads=2, vocab_size=256, context_length=16, rope_theta=500.0, norm_eps=1e-3
)


def model_of(config):
    model = TransformerLM(config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2
            )
    return model


def test_every_number_lies_where_the_header_says(tmp_path):
    model = model_of(CONFIG)
    export(model, tmp_path / "llama")
    data = (tmp_path / "llama" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    assert header.pop("__metadata__") == {"format": "pt"} and begin % 8 == 0

    def tensor(name):
        first, last = header[name]["data_offsets"]
        values = torch.frombuffer(
            bytearray(data[begin + first : begin + last]), dtype=torch.float32
        )
        return values.view(header[name]["shape"])

    qkv = [tensor(f"model.layers.1.self_attn.{each}_proj.weight") for each in "qkv"]
    assert [each.shape[0] for each in qkv] == [32, 16, 16]
    torch.testing.assert_close(
        torch.cat(qkv), model.blocks[1].attention.qkv.weight.detach(), rtol=0, atol=0
    )
    assert sum(tensor(name).numel() for name in header) == CONFIG.num_parameters
    assert len(data) == begin + 4 * CONFIG.num_parameters


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    model = model_of(replace(CONFIG, tie_embeddings=tied))
    export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
