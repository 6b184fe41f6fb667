"""The parts: each yields (variant, what it ran on, metrics), row by row."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distlab.model import TransformerLM, cross_entropy
from distlab.theory.rounding import FORMATS, overflow_share, repeated_sum
from distlab.train.data import SyntheticTokens
from experiments.mixed_precision_pieces.config import INPUTS, TYPES, PrecisionConfig

ADDEND, TIMES = 0.01, 1000
Metrics = dict[str, Any]


def accumulation(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """1,000 × 0.01: the sum, by which format predicts it, and how far from ten it is."""
    for accumulator in TYPES:
        for held_in in ("fp32", accumulator) if accumulator != "fp32" else TYPES:
            total = torch.zeros((), dtype=TYPES[accumulator], device=config.device)
            addend = torch.tensor(ADDEND, dtype=TYPES[held_in], device=config.device)
            for _ in range(TIMES):
                total = (total + addend).to(TYPES[accumulator])
            value = total.item()
            predicted = repeated_sum(ADDEND, TIMES, FORMATS[accumulator], FORMATS[held_in])
            metrics = {
                "sum": value,
                "predicted_sum": predicted,
                "relative_error": abs(value / (ADDEND * TIMES) - 1),
            }
            yield f"{accumulator} += {held_in}", f"{TIMES:,} × {ADDEND}", metrics


class Toy(nn.Module):
    """Two products with an activation and a layer normalisation between them, `(N, 8) -> (N, 4)`."""

    def __init__(self, **factory: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16, bias=False, **factory)
        self.relu = nn.ReLU()
        self.layer_norm = nn.LayerNorm(16, **factory)
        self.fc2 = nn.Linear(16, 4, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.layer_norm(self.relu(self.fc1(x))))


def types(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """The type of each part's output under autocast, in the order of execution; then of the loss and the gradients."""
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=config.device)
    language_model = replace(config.model(), num_layers=1, context_length=16)
    cases = {
        "toy": (lambda: Toy(device=config.device), torch.ones(2, 8, device=config.device)),
        "Transformer": (lambda: TransformerLM(language_model, device=config.device), tokens),
    }
    for case, (build, inputs) in cases.items():
        found = {low: types_of(build(), inputs, TYPES[low], config.device) for low in ("fp16", "bf16")}
        for part in found["fp16"]:
            yield part, case, {f"type_under_{low}": found[low][part] for low in found}


def types_of(model: nn.Module, inputs: Tensor, low: torch.dtype, device: str) -> dict[str, str]:
    """Part → name of the type it is in."""
    found = {"parameters": _name(next(model.parameters()))}
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList | nn.Dropout):
            label = name.removeprefix("blocks.0.") if name != "blocks.0" else "residual stream"
            module.register_forward_hook(lambda _, __, out, label=label: found.__setitem__(label, _name(out)))
    with torch.autocast(device, dtype=low):
        logits = model(inputs)
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
        loss = cross_entropy(logits, target)
    loss.backward()
    return found | {"loss": _name(loss), "gradients": _name(next(model.parameters()).grad)}


def _name(out: Tensor | tuple[Tensor, ...]) -> str:
    tensor = out[0] if isinstance(out, tuple) else out
    return next(name for name, dtype in TYPES.items() if dtype == tensor.dtype)


def norm(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """Layer normalisation of inputs in a low precision, with statistics in it or in fp32, against float64."""
    generator = torch.Generator().manual_seed(config.seed)
    drawn = torch.randn(config.rows, config.width, generator=generator).to(config.device)
    for where, (deviation, mean) in INPUTS.items():
        for low in ("fp16", "bf16"):
            x = (deviation * drawn + mean).to(TYPES[low])
            exact = layer_norm(x.double())
            for statistics in ("fp32", low):
                y = layer_norm(x.to(TYPES[statistics])).to(TYPES[low]).double()
                lost = (y == 0).all(-1) | ~y.isfinite().all(
                    -1
                )  # an infinite variance makes the whole row zero
                limit = FORMATS[statistics].largest ** 0.5  # a square beyond that is infinite
                metrics = {
                    "relative_error": ((y - exact).norm() / exact.norm()).item(),
                    "lost_rows_pct": 100 * lost.double().mean().item(),
                    "predicted_lost_rows_pct": 100 * overflow_share(deviation, config.width, limit),
                }
                yield f"{low}, statistics {statistics}", where, metrics


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """(x − mean)/√(variance + eps) over the last dimension, every operation in the type of `x`, any shape."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)


def scaling(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """Gradients under autocast at each loss scale, against those of fp32."""
    logits, exact = gradients(config, None, 1.0)
    sizes = exact[exact != 0].abs().log2()
    exponents = torch.arange(-48, 1)
    counts = torch.histc(sizes, len(exponents) - 1, -48, 0).cpu()
    share = (100 * counts / exact.numel()).tolist()
    where = f"loss / {config.micro_batches} micro-batches"
    yield "fp32", where, {"histogram_log2": exponents.tolist(), "histogram_pct": share, "underflow_pct": 0.0,
                          "nonfinite_pct": 0.0, "relative_error": 0.0}  # fmt: skip
    for low, log2_scale in [("bf16", 0), *(("fp16", k) for k in config.log2_scales)]:
        scale, held = 2.0**log2_scale, FORMATS[low]
        low_logits, found = gradients(config, TYPES[low], scale)
        finite = found.isfinite()
        metrics = {
            "log2_scale": log2_scale,
            "underflow_pct": 100 * (low_logits == 0).double().mean().item(),
            "predicted_underflow_pct": 100
            * ((logits * scale).abs() <= held.smallest / 2).double().mean().item(),
            "nonfinite_pct": 100 * (~finite).double().mean().item(),
            "relative_error": ((found - exact).norm() / exact.norm()).item()
            if finite.all()
            else float("inf"),
        }
        yield low if log2_scale == 0 else f"{low} × 2^{log2_scale}", where, metrics


def gradients(config: PrecisionConfig, low: torch.dtype | None, scale: float) -> tuple[Tensor, Tensor]:
    """(the logits' gradients at this scale, the matrices' gradients with the scale divided out), flat, in fp32.

    Of one micro-batch; the embedding is left out, most of whose rows no token looked up.
    """
    shape = config.model()
    model = TransformerLM(shape, device=config.device, seed=config.seed)
    data = SyntheticTokens(shape.vocab_size, config.batch, shape.context_length, seed=config.seed, rank=0,
                           device=config.device)  # fmt: skip
    tokens, targets = data.batch(0)
    with torch.autocast(config.device, dtype=low or torch.bfloat16, enabled=low is not None):
        logits = model(tokens)
        logits.retain_grad()
        loss = cross_entropy(logits, targets) / config.micro_batches
    (loss * scale).backward()
    flat = [
        p.grad.flatten() for name, p in model.named_parameters() if p.ndim > 1 and name != "embedding.weight"
    ]
    return logits.grad.float().flatten(), torch.cat(flat).float() / scale
