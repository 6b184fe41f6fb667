"""A decoder layer in the shape of Hugging Face's Llama: the modules of `kernels.nn` beside torch's and Liger's.

    distlab run model_benchmark --preset block                            # Llama 3 8B's layer, 2 × 2,048 tokens
    distlab run model_benchmark --preset block --batch 1 --context 4096   # the same layer at another length
    distlab run model_benchmark --size small --dtype bf16 --block         # a layer of that size, beside the usual rows

The layer has Llama's attribute names, and so its state dict, and is written in plain torch: transformers is not needed.
A variant has its own norms, MLP, rotation and attention in the places of torch's, and the same weights where they lie.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.experiment import Column, Record, View
from distlab.measure import allocated_bytes, attempt, clock, peak_memory, sample_rounds
from distlab.model.config import ModelConfig
from distlab.model.ops import positions, rope_tables, sdpa
from distlab.precision import DTYPES
from distlab.report import NOISE, Ratio, grouped, row_of

from .timing import TOLERANCE
from .trials import Rows, TrialConfig, headline, mib_column, ms_column, prefix

BLOCK = "model_block"
CALLS = 3  # timed in a round, after an untimed one
PEERS = {"over_compiled": "torch compiled", "over_liger": "Liger"}
Parts = tuple[Callable, ...]  # norm, MLP, tables, rotation and attention: what `DecoderLayer` takes
linear = partial(nn.Linear, bias=False)


class SelfAttention(nn.Module):
    """Grouped queries: rotate(q_BHTD, k_BKTD, cos, sin) turns both, attend(q, k, v) is causal, K a divisor of H."""

    def __init__(self, shape: ModelConfig, rotate: Callable, attend: Callable) -> None:
        super().__init__()
        d, self.head_dim = shape.d_model, shape.d_model // shape.num_heads
        of_keys = shape.kv_heads * self.head_dim
        self.q_proj, self.k_proj = linear(d, d), linear(d, of_keys)
        self.v_proj, self.o_proj = linear(d, of_keys), linear(d, d)
        self.rotate, self.attend = rotate, attend

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)
        out_BHTD = self.attend(*self.rotate(q, k, cos, sin), v)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """down_proj(silu(gate_proj(x)) · up_proj(x)) by torch's operations."""

    def __init__(self, d: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(d, d_ff), linear(d, d_ff), linear(d_ff, d)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A layer of Llama.

    Args:
        norm, mlp: `(d, eps)` and `(d, d_ff)` → a module.
        tables: those of `rope_tables` and the layer's dtype → the cos and sin that `forward` takes, which are made once
            for all layers.
        attention: see `SelfAttention`.
    """

    def __init__(
        self, shape: ModelConfig, norm: Callable, mlp: Callable, tables: Callable, *attention: Callable
    ) -> None:
        super().__init__()
        self.tables = tables
        self.input_layernorm = norm(shape.d_model, shape.norm_eps)
        self.self_attn = SelfAttention(shape, *attention)
        self.post_attention_layernorm = norm(shape.d_model, shape.norm_eps)
        self.mlp = mlp(shape.d_model, shape.d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def llamas_tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Those of `rope_tables` as Llama has them: (1, T, D) in the layer's dtype, the first half of sin not negative."""
    return cos[None].to(dtype), sin.chunk(2, -1)[1].repeat(1, 1, 2).to(dtype)


def each(turn: Callable) -> Callable:
    """A rotation of one tensor as that of queries and keys."""
    return lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))


def torchs() -> Parts:
    """What torch has, and by its operations what it has not: norm, MLP, tables, rotation and attention."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return nn.RMSNorm, MLP, llamas_tables, each(turn), sdpa


def ours() -> Parts:
    """This lab's. Attention is the function: `kernels.nn.Attention` takes (B, T, H·D), and a rotated q is (B, H, T, D).
    """
    import kernels.nn
    from kernels.flash_attention import flash_attention
    from kernels.rope import rope

    attend = partial(flash_attention, causal=True)
    return kernels.nn.RMSNorm, kernels.nn.SwiGLU, lambda cos, sin, dtype: (cos, sin), each(rope), attend


def ligers() -> Parts:
    """Liger's, with torch's attention, as its patch of Llama leaves it; these imports ask for no transformers."""
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb

    sizes = partial(SimpleNamespace, hidden_act="silu")  # of transformers' configuration
    mlp = lambda d, d_ff: LigerSwiGLUMLP(sizes(hidden_size=d, intermediate_size=d_ff))  # noqa: E731
    return LigerRMSNorm, mlp, llamas_tables, liger_rotary_pos_emb, sdpa


VARIANTS = {  # whose parts, and how the layer is called
    "torch": (torchs, False), "torch compiled": (torchs, True), "kernels.nn": (ours, False),
    "kernels.nn compiled": (ours, True), "Liger": (ligers, False),
}  # fmt: skip


def prepare(
    variant: str, dtype: torch.dtype, shape: ModelConfig, weights: dict[str, Tensor], x: Tensor, upstream: Tensor
) -> Callable[..., list[Tensor]]:
    """Return a call of this variant's layer that gives its output and the gradients of x and of each weight.

    Args:
        dtype: of the layer; in their own, the weights are not copied.
        weights: by Llama's names.
        x, upstream: the input and the gradient of the output, (B, T, d).
    """
    parts, compiles = VARIANTS[variant]
    with torch.device("meta"):
        layer = DecoderLayer(shape, *parts())
    layer.load_state_dict(weights, assign=True)
    leaves = [x.detach().to(dtype).requires_grad_(), *map(layer.to(dtype).get_parameter, weights)]
    cos_sin = rope_tables(positions(shape.context_length, x.device), layer.self_attn.head_dim, shape.rope_theta)
    tables, upstream = layer.tables(*cos_sin, dtype), upstream.to(dtype)
    run = torch.compile(layer, dynamic=False) if compiles else layer

    def both() -> list[Tensor]:
        out = run(leaves[0], *tables)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    return both


def ready(calls: dict[str, Callable], name: str, exact: list[Tensor], tolerance: float, *given: Any) -> dict[str, Any]:
    """Errors and memory of a variant, whose call is put among `calls` once it has run."""
    both, norm, device = prepare(name, *given), torch.linalg.vector_norm, exact[0].device
    errors = torch.stack([norm(y - right) / norm(right) for y, right in zip(both(), exact, strict=True)])
    metrics = {"error": errors[0].item(), "grad_error": errors[1:].max().item()}
    if not errors.max() <= tolerance:  # nor if one is NaN
        metrics["status"] = "WRONG"
    if (others := allocated_bytes(device)) is not None:
        with peak_memory(device) as memory:  # of a second call: nothing is compiled or chosen in it
            both()
        metrics["peak_alloc_bytes"] = memory.peak_alloc_bytes - others
    calls[name] = both
    return metrics


def block(device: torch.device, trial: TrialConfig, rounds: int) -> dict[str, Rows]:
    """A row for each variant of a layer of the trial's sizes; one that fails says why."""
    torch._dynamo.reset()  # it compiles one function only so often
    torch.manual_seed(trial.seed)
    shape, dtype = trial.model(), DTYPES[trial.dtype] or torch.float32
    with device:
        weights = DecoderLayer(shape, *torchs()).to(dtype).state_dict()
        x, upstream = torch.randn(2, trial.batch, shape.context_length, shape.d_model, dtype=dtype)
    given = shape, weights, x, upstream
    exact = prepare("torch", torch.float64 if dtype == torch.float32 else torch.float32, *given)()
    found, calls = {}, {}
    for name in VARIANTS:
        found[name] = attempt(partial(ready, calls, name, exact, TOLERANCE[trial.dtype], dtype, *given))
    timed = {name: partial(clock.measure, both, warmup=1, repeats=CALLS, device=device) for name, both in calls.items()}
    for name, metrics in sample_rounds({name: lambda once=once: {"step": once()} for name, once in timed.items()},
                                       rounds).items():  # fmt: skip
        found[name] |= metrics
    return {BLOCK: list(found.items())}


def compare(records: Sequence[Record]) -> None:
    """Hold the rows of each combination that are right against torch.compile's and Liger's."""
    right = [record for record in records if record.metrics["status"] == "ok"]
    for label, rows in grouped(right, lambda record: record.config["label"]).items():
        for name, peer in PEERS.items():
            Ratio(name, row_of(prefix(label) + peer)).add(rows)


BLOCK_VIEW = View(
    name=BLOCK,
    question="What do the modules of kernels.nn change in a layer of Llama, beside torch.compile and Liger?",
    columns=[
        Column("variant", "layer of"), ms_column("step_p50_ms", "ms"), NOISE,
        *(Ratio(name, row_of(peer)).column(f"÷ {peer}", missing="", optional=True) for name, peer in PEERS.items()),
        mib_column("peak_alloc_bytes", "peak MiB"), Column("metrics.error", "error", ".0e"),
        Column("metrics.grad_error", "gradient error", ".0e"), Column("metrics.status", "status", align="left"),
    ],
    headline=headline,
    derive=compare,
    terminal=("variant", "step_p50_ms", "noise_pct", *PEERS, "peak_alloc_bytes", "grad_error", "status"),
    reading="Forward and backward of one layer with its weights in the dtype that it computes in, without autocast. Torch's has nn.RMSNorm, "
    "silu and product, rotation as in the formula, and torch's attention; kernels.nn has its RMSNorm and SwiGLU, "
    "kernels.rope and kernels.flash_attention; Liger has its own RMSNorm, SwiGLU and rotation, and torch's attention. "
    "Tables of cos and sin are made before the clock starts: in the layer's dtype, as Llama has them, and for "
    "kernels.rope in fp32.\n\n"
    "Errors are ‖y − y_ref‖ / ‖y_ref‖ of the output, and of the gradient in which that is largest, against torch's "
    "layer in fp32, of an fp32 layer in float64. Peak is what forward and backward take beside the weights and the "
    "input, gradients included. Ratios are this row over the other: below 1 this one is faster; a row that is WRONG "
    "has none.",
    noise="All variants are timed in each of the interleaved rounds, on the same tensors. Ratios are paired by round.",
)  # fmt: skip
