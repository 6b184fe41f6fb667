"""The language model that is trained: its sizes, its operations, and the Transformer itself."""

from distlab.model.config import (
    OPS_CHOICES,
    PRESETS,
    ModelConfig,
    checkpoint_segments,
    kept_levels,
    model_of,
    preset,
)
from distlab.model.ops import cross_entropy, get_ops
from distlab.model.transformer import TransformerLM

__all__ = [
    "OPS_CHOICES",
    "PRESETS",
    "ModelConfig",
    "TransformerLM",
    "checkpoint_segments",
    "cross_entropy",
    "get_ops",
    "kept_levels",
    "model_of",
    "preset",
]
