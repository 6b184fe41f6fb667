"""Write a model in the form of other libraries: `model.safetensors` and `config.json` as Llama's.

The model is Llama's architecture: RMSNorm, rotary embeddings over the halves of a head, SwiGLU,
grouped queries. So nothing is computed anew; queries, keys and values, which are one matrix here,
become three.
"""

import json
from pathlib import Path

from torch import Tensor

from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM

LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def export(model: TransformerLM, folder: Path) -> None:
    """Write a whole model in fp32, for transformers to read.

    `transformers.AutoModelForCausalLM.from_pretrained(folder)` reads it.

    Raises:
        OSError: the folder cannot be written.
    """
    tensors = llama_tensors(model)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    parts = [
        len(text).to_bytes(8, "little"),
        text,
        *(tensor.numpy() for tensor in tensors.values()),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.writelines(parts)
    (folder / "config.json").write_text(json.dumps(llama_config(model.config), indent=2))


def llama_tensors(model: TransformerLM) -> dict[str, Tensor]:
    """Llama's name → tensor, in fp32 on the CPU."""
    found = {}
    for name, parameter in model.named_parameters():
        *block, layer = name.removesuffix(".weight").split(
            ".", 2 if name.startswith("blocks.") else 0
        )
        names, prefix = LLAMA[layer].split(), f"model.layers.{block[1]}." if block else ""
        rows = (
            [len(parameter)]
            if len(names) == 1
            else [model.config.d_model, *2 * [model.config.kv_width]]
        )
        parts = parameter.detach().float().cpu().split(rows)
        found |= {f"{prefix}{llama}.weight": part for llama, part in zip(names, parts, strict=True)}
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
