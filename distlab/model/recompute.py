"""Policy of a recomputed block: the tensors that it keeps in addition to its input.

It is a policy of torch's selective activation checkpointing.

Backward recomputes a block's forward up to the last operation whose inputs it needs. Kept results
are not recomputed: attention's first, which has by far the most arithmetic per byte, then those of
matmuls, with d_model multiply-adds per element each. Everything else (norms, rotation, SwiGLU's
element-wise part) costs little, and is always recomputed.

The policy sees the operators that a dispatch mode sees: torch's own, and this lab's kernels by
their registered names.
"""

from collections import Counter
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distlab.model.config import KEPT

# Operators of attention. They return the output and the log-sum-exp.
ATTENTION = {
    "distlab_kernels::flash_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}
MATMULS = ("qkv", "output", "gate-up", "gate-up", "w2")  # matmuls of a block, as they run


def contexts(keep: str) -> tuple[Any, Any]:
    """Return the `context_fn` of a block's checkpoint for an entry of `config.RECOMPUTATION`."""
    every_other = keep == "selective"
    kept = ("attention",) if every_other else KEPT[: KEPT.index(keep) + 1]
    # is_recompute → number of matmuls so far, to know each by its position
    matmuls = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Higher-order operators have no schema, and are recomputed.
        name = operator._schema.name if hasattr(operator, "_schema") else ""
        keeps = name in ATTENTION and "attention" in kept
        # The matmuls of a block run in a fixed order, so a count tells which one this is. The
        # forward and its recomputation count separately.
        if name == "aten::mm":
            number = matmuls[context.is_recompute]
            keeps = number % 2 == 0 if every_other else MATMULS[number] in kept
            matmuls[context.is_recompute] += 1
        # torch.compile may overrule PREFER, and never MUST.
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
