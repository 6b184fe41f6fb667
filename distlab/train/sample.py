"""Load the model out of a checkpoint, and let it continue a text."""

import math
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from distlab.checkpoint import tensors
from distlab.checkpoint.files import CheckpointFolder, Damaged, Stored, check_files
from distlab.comm import RankContext
from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.parallel.shard import whole

LEAST_TEMPERATURE = 1e-4  # the smallest that is allowed, except 0


def newest_usable(folder: Path) -> Stored:
    """Return the newest checkpoint whose files are whole.

    Raises:
        ValueError: there is none, or there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: name the folder of a run of `distlab train`")
    store = CheckpointFolder(folder)
    problems = []
    for step in store.steps():
        try:
            # Newest first, as the store lists them.
            stored = store.open(step)
            check_files(stored)
        except Damaged as error:
            problems.append(str(error))
        else:
            return stored
    reasons = f": {'; '.join(problems)}" if problems else ""
    raise ValueError(f"{folder} holds no usable checkpoint{reasons}")


def load_model(stored: Stored, context: RankContext) -> TransformerLM:
    """Load the trained model, whole, whatever strategy wrote it.

    Raises:
        ValueError, CheckpointError: the contents of the checkpoint do not fit together.
    """
    config = _model_of(stored)
    # The model is built only if the files hold its number of elements. Otherwise a checkpoint with
    # made-up sizes could ask for any amount of memory.
    count = 0
    for key, (shape, _) in tensors.shapes_and_dtypes(stored).items():
        if key.startswith("model/"):
            count += math.prod(shape)
    if config.num_parameters != count:
        raise ValueError(
            f"{stored.path} holds {count:,} parameters, and describes a model of "
            f"{config.num_parameters:,}"
        )
    model = TransformerLM(config, device=context.device)
    shards = [whole(f"model/{name}", parameter) for name, parameter in model.named_parameters()]
    tensors.refuse_other_model(stored, tensors.kinds_of(shards))
    tensors.read(stored, shards)
    return model.eval()


def _model_of(stored: Stored) -> ModelConfig:
    """Return the shape of the model that the checkpoint describes.

    Raises:
        ValueError: it describes none, or one that cannot be.
    """
    identity = stored.content["extra"].get("identity")
    described = identity.get("model") if isinstance(identity, dict) else None
    names = {field.name for field in fields(ModelConfig)}
    # An identity leaves out fields that are None.
    optional = {field.name for field in fields(ModelConfig) if field.default is None}
    if not isinstance(described, dict) or not names - optional <= described.keys() <= names:
        raise ValueError(f"{stored.path} does not describe its model")
    try:
        return ModelConfig(**described)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{stored.path} describes a model that cannot be: {error}") from None


@torch.no_grad()
def generate(
    model: TransformerLM, tokens_T: Tensor, count: int, *, temperature: float = 0.8, seed: int = 0
) -> Tensor:
    """Return `tokens_T` and `count` more, drawn one by one from softmax(logits / temperature).

    A temperature of 0 takes the likeliest.

    Args:
        tokens_T: `(T,)` int64 on the model's device, at least one token.

    Raises:
        ValueError: nothing to continue, a negative count, or a temperature that is not a number, or
            neither 0 nor at least 1e-4, below which logits overflow.
    """
    if len(tokens_T) == 0 or count < 0:
        raise ValueError(
            f"{len(tokens_T)} tokens, count={count}: give a prompt, and a count of at least 0"
        )
    if not (temperature == 0 or LEAST_TEMPERATURE <= temperature < float("inf")):
        raise ValueError(
            f"temperature={temperature}: give 0 for the likeliest token, or a finite number of at "
            f"least {LEAST_TEMPERATURE:g}"
        )
    generator = torch.Generator(device=tokens_T.device).manual_seed(seed)
    for _ in range(count):
        # The whole context is computed again for each token: there is no cache of keys and values.
        logits_V = model(tokens_T[None, -model.config.context_length :])[0, -1].float()
        if temperature == 0:
            token = logits_V.argmax(keepdim=True)
        else:
            token = torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)
        tokens_T = torch.cat((tokens_T, token))
    return tokens_T
