"""Load the model out of a checkpoint, and let it continue a text."""

from pathlib import Path

import torch
from torch import Tensor

from distlab.comm import RankContext
from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.train import checkpoint_dcp as dcp
from distlab.train.checkpoint import refuse_other_model
from distlab.train.checkpoint_dcp import Item
from distlab.train.checkpoint_store import CheckpointFolder, Damaged, Stored, check_contents, check_sizes
from distlab.train.layout import Run, flat


def newest_usable(folder: Path) -> Stored:
    """The newest checkpoint whose files are whole.

    Raises:
        ValueError: there is none.
    """
    store, problems = CheckpointFolder(folder), []
    for step in store.steps():
        try:
            stored = store.open(step)
            check_sizes(stored)
            check_contents(stored)
        except Damaged as error:
            problems.append(str(error))
        else:
            return stored
    raise ValueError(f"{folder} holds no usable checkpoint{': ' if problems else ''}{'; '.join(problems)}")


def load_model(stored: Stored, context: RankContext) -> TransformerLM:
    """The trained model, whole, whatever strategy wrote it."""
    config = ModelConfig(**stored.content["extra"]["identity"]["model"])
    model = TransformerLM(config, device=context.device)
    runs = [Run(f"model/{name}", 0, flat(p, name), tuple(p.shape)) for name, p in model.named_parameters()]
    refuse_other_model(stored, runs, {key: tuple(shape) for key, shape in stored.content["tensors"].items()})
    items = [Item(run.key, 0, run.numel, run.values) for run in runs]
    dcp.read(stored.path, dcp.read_metadata(stored.path), items, context.group)
    return model.eval()


@torch.no_grad()
def generate(
    model: TransformerLM, tokens_T: Tensor, count: int, *, temperature: float = 0.8, seed: int = 0
) -> Tensor:
    """`tokens_T` and `count` more, drawn one by one from softmax(logits / temperature); 0 takes the likeliest.

    Args:
        tokens_T: `(T,)` int64 on the model's device, at least one.

    Raises:
        ValueError: nothing to continue, or a negative temperature.
    """
    if len(tokens_T) == 0 or temperature < 0:
        raise ValueError(
            f"{len(tokens_T)} tokens, temperature={temperature}: give a prompt, and a temperature ≥ 0"
        )
    generator = torch.Generator(device=tokens_T.device).manual_seed(seed)
    for _ in range(count):
        logits_V = model(tokens_T[None, -model.config.context_length :])[0, -1].float()
        if temperature == 0:
            token = logits_V.argmax(keepdim=True)
        else:
            token = torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)
        tokens_T = torch.cat((tokens_T, token))
    return tokens_T
