"""Write a model as other libraries read it: `model.safetensors` and `config.json` of a Llama.

The model has Llama's architecture: RMSNorm, rotary embeddings over the halves of a head, SwiGLU,
grouped queries. So no value changes. Queries, keys and values, which are one matrix here, become
three.
"""

import json
from pathlib import Path

from torch import Tensor

from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM

# Name of a layer here → its names in Llama, several if it is split.
LLAMA = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward.w1": ("mlp.gate_proj",),
    "feed_forward.w3": ("mlp.up_proj",),
    "feed_forward.w2": ("mlp.down_proj",),
}


def export(model: TransformerLM, folder: Path) -> None:
    """Write a whole model in fp32, for transformers to read.

    `transformers.AutoModelForCausalLM.from_pretrained(folder)` reads it.

    Raises:
        OSError: the folder cannot be written.
    """
    tensors = llama_tensors(model)
    # The format: 8 bytes with the length of the header, the header as JSON, and the tensors one
    # after the other.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.numpy())
    (folder / "config.json").write_text(json.dumps(llama_config(model.config), indent=2))


def llama_tensors(model: TransformerLM) -> dict[str, Tensor]:
    """Return Llama's name → tensor, in fp32 on the CPU."""
    config = model.config
    found = {}
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        prefix = ""
        if layer.startswith("blocks."):
            _, number, layer = layer.split(".", 2)
            prefix = f"model.layers.{number}."
        # Contiguous, as are parts of its rows: safetensors stores no strides.
        tensor = parameter.detach().float().cpu()
        names = LLAMA[layer]
        if len(names) == 1:
            parts = [tensor]
        else:
            # The rows of q, k and v are stacked in this order.
            parts = tensor.split([config.d_model, config.kv_width, config.kv_width])
        for llama_name, part in zip(names, parts, strict=True):
            found[f"{prefix}{llama_name}.weight"] = part
    return found


def llama_config(config: ModelConfig) -> dict[str, object]:
    """Return transformers' configuration of the model. There are no special tokens."""
    return {
        "model_type": "llama",
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
