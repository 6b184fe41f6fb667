"""Time and memory of a choice in closed form, and its peak counted from simulated tensors."""

from collections.abc import Callable

import torch
from torch import nn

from distlab.measure.statistics import percentiles
from distlab.model import TransformerLM, checkpoint_groups, cross_entropy
from distlab.simulate.run import simulate_step
from distlab.theory.flops import forward_flops
from distlab.theory.memory.peak import CUBLAS_WORKSPACES, StepMemory, step_memory
from distlab.theory.memory.recompute import blocks_run_again, recomputed_flops
from distlab.theory.model_shape import ModelShape
from experiments.activation_checkpointing_pieces.config import DTYPES, CheckpointingConfig


def one_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gradients of one batch, from none; returns the loss."""
    low = DTYPES[dtype]
    model.zero_grad(set_to_none=True)
    with torch.autocast(tokens.device.type, dtype=low or torch.bfloat16, enabled=low is not None):
        loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss


def predicted(
    config: CheckpointingConfig, choice: str, base: dict[str, list[float]] | None
) -> dict[str, float | int | str]:
    """The closed forms; the time from the measured step without checkpointing, if that one ran."""
    groups, model = checkpoint_groups(choice), config.model()
    memory = closed_form(config, groups)
    found: dict[str, float | int | str] = {
        "predicted_peak_bytes": memory.peak.total,
        "predicted_counted_peak_bytes": memory.peak.total - _workspaces(config),
        "predicted_peak_phase": memory.peak_phase,
        "blocks_run_again": blocks_run_again(model.num_layers, groups)[0],
    }
    if base is not None:
        sizes = {"batch": config.batch, "context": model.context_length, "d_model": model.d_model}
        sizes |= {"d_ff": model.d_ff, "num_layers": model.num_layers, "vocab_size": model.vocab_size}
        again = recomputed_flops(groups, causal=True, **sizes) / forward_flops(causal=True, **sizes).total
        forward, step = (percentiles(base[phase])["p50"] for phase in ("forward", "step"))
        found["predicted_step_ms"] = step + again * forward
    return found


def closed_form(config: CheckpointingConfig, groups: tuple[int, ...]) -> StepMemory:
    model = config.model()
    return step_memory(
        ModelShape.of(model),
        batch=config.batch,
        context=model.context_length,
        precision={"fp32": "fp32", "bf16": "bf16-autocast"}[config.dtype],
        attention=model.attention,
        checkpointing=groups,
        optimizer="sgd",
        workspace_bytes=_workspaces(config),
    )


def _workspaces(config: CheckpointingConfig) -> int:
    """Bytes of libraries in the allocator, of which fake tensors have none."""
    return CUBLAS_WORKSPACES if config.device == "cuda" else 0


def counted_peak(config: CheckpointingConfig, choice: str) -> int:
    """The peak of the same step on fake tensors, counted storage by storage."""
    model = config.model()

    def build() -> TransformerLM:
        return TransformerLM(model, device="cpu", checkpoint_blocks=checkpoint_groups(choice) or False)

    def make_step(wrapper: nn.Module, optimizer: torch.optim.Optimizer, mark: Callable[[str], None]):
        tokens = torch.zeros(config.batch, model.context_length, dtype=torch.int64)
        return lambda: one_step(wrapper, tokens, tokens, config.dtype)

    options = {"optimizer_cls": torch.optim.SGD, "optimizer_options": {"lr": 0.0}}
    return simulate_step("local", build, make_step, world_size=1, **options).peak.total
