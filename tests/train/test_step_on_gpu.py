"""A training step on GPUs queues its work and never waits for it.

A host that waits inside a step cannot run ahead, so the GPU idles until the next kernel is
queued. `torch.cuda.set_sync_debug_mode("error")` makes every operator raise that waits.
"""

import pytest
import torch

from distlab.model import TransformerLM, preset
from distlab.parallel import STRATEGIES, get_strategy, strategies_on
from distlab.testing import run_ranks
from distlab.train.step import TrainStep

OURS = [name for name in strategies_on("cuda", meshes=False) if not STRATEGIES[name].is_peer]


def run_steps_without_waiting(context, name):
    """Train three steps, then a fourth in which every operator that waits raises."""
    config = preset("tiny", context_length=32)
    model = TransformerLM(config, device=context.device, seed=0)
    wrapper, optimizer = get_strategy(name).build(
        model, context.group, torch.optim.AdamW, {"lr": 1e-3}
    )
    tokens = torch.randint(0, config.vocab_size, (2, 33), device=context.device)

    def loss_fn(model, batch):
        logits = model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    step = TrainStep(wrapper, optimizer, loss_fn, max_grad_norm=1.0)
    for _ in range(3):
        step([tokens, tokens])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step([tokens, tokens])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wrapper.close()


@pytest.mark.multigpu
@pytest.mark.parametrize("name", OURS)
def test_a_step_does_not_wait_for_the_gpu(name):
    run_ranks(run_steps_without_waiting, 2, name, backend="nccl")
