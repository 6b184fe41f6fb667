"""How fast is attention of 16,384 tokens and 16 heads, in bf16, causal, forward and backward, beside its peers?

    distlab run attention_record                     # head dims 64 (the record) and 128, on a GPU
    distlab run attention_record --quick             # less time per number; on a CPU a short sequence

Every variant runs through the same harness: one leaf tensor of shape (3, 16, 16384, d) is unpacked into q, k and v,
attention is called, and `o.sum().backward()` fills the leaf's gradient, so that summing, unpacking and stacking are
timed with it. `triton.testing.do_bench` gives medians of calls as they are, with a cold L2; host is how long one keeps
the host. Ours and FlexAttention are compiled. Forward
alone is timed in the same way; errors are the largest of the output and of the worst gradient against float64 on the
first head of the inputs that were timed. The public class record for ours' d = 64 row is 5.364 ms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from distlab.experiment import Column, Experiment, Options, RankContext, Run, View, headline_from, option
from distlab.measure.clock import call_ms
from distlab.measure.clock import measure as measure_calls
from distlab.measure.statistics import percentiles
from experiments._attention import Attention, build, errors, exact, tflop_per_s
from kernels.flash_attention import FlashAttention2, FlashAttention2PyTorch

HEADS = 16


@dataclass(frozen=True)
class Config(Options):
    """One run: a row per head dim and variant."""

    head_dims: tuple[int, ...] = option((64, 128), "head dims", least=1)
    length: int = option(16384, "tokens of the one sequence", least=1)
    ms_per_number: int = option(400, "ms to spend on each number", least=1, flag="--ms")


def variants(length: int, on_gpu: bool) -> dict[str, Attention]:
    """The attentions that are timed, of (H, T, D) each; on a CPU the tiled form in plain torch beside torch's own."""
    names = ("flex", "sdpa-flash", "sdpa-cudnn") if on_gpu else ("sdpa-math",)
    peers = {name: _with_batch(build(name, length, "cuda" if on_gpu else "cpu")) for name in names}
    ours = torch.compile(FlashAttention2.apply) if on_gpu else FlashAttention2PyTorch.apply
    return {"ours": lambda q, k, v: ours(q, k, v, True)} | peers


def _with_batch(fn: Attention) -> Attention:
    return lambda q, k, v: fn(q[None], k[None], v[None])[0]


def step(leaf: Tensor, fn: Attention) -> Tensor:
    """One forward and backward through the harness; returns the leaf's gradient."""
    leaf.grad = None
    fn(*leaf.unbind(0)).sum().backward()
    return leaf.grad


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per head dim and variant."""
    device = context.device.type
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    roof = matmul_tflop_per_s() if device == "cuda" else None
    shared = {"heads": HEADS, "dtype": str(dtype).removeprefix("torch."), "causal": True}
    for head_dim in config.head_dims:
        for name, fn in variants(config.length, device == "cuda").items():
            if not run.done(name, head_dim=head_dim):
                run.progress(f"{name} d={head_dim}")
                torch.manual_seed(head_dim)
                leaf = torch.randn(3, HEADS, config.length, head_dim, device=device, dtype=dtype, requires_grad=True)
                metrics = row(leaf, fn, config.ms_per_number) | {"matmul_tflop_per_s": roof}
                run.add(name, metrics, **shared, head_dim=head_dim)


def row(leaf: Tensor, fn: Attention, milliseconds: int) -> dict[str, float]:
    """Errors on the first head, times and rates."""
    with torch.no_grad():
        o = fn(*leaf.unbind(0))[0]
    head = leaf.detach()[:, 0]
    metrics = errors((o, *step(leaf, fn)[:, 0]), exact(*head, torch.ones_like(o)))
    for kind, call in {"fwd": lambda: fn(*leaf.unbind(0)), "fwd_bwd": lambda: step(leaf, fn)}.items():
        metrics |= {f"{kind}_{p}_ms": ms for p, ms in _timed(call, milliseconds, leaf.is_cuda).items()}
    metrics["host_p50_ms"] = median(call_ms(lambda: step(leaf, fn))["host"])
    metrics["bwd_p50_ms"] = metrics["fwd_bwd_p50_ms"] - metrics["fwd_p50_ms"]  # sum and stacking included
    return metrics | tflop_per_s(leaf[0], metrics["fwd_p50_ms"], metrics["fwd_bwd_p50_ms"])


def _timed(call: Callable[[], object], milliseconds: int, on_gpu: bool) -> dict[str, float]:
    """p20, p50 and p80 in ms; on a GPU by Triton's timer, with a cold L2."""
    if not on_gpu:
        return percentiles(measure_calls(call, warmup=1, repeats=5, device="cpu"))
    from triton.testing import do_bench

    quantiles = do_bench(call, warmup=100, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return dict(zip(("p20", "p50", "p80"), quantiles, strict=True))


def matmul_tflop_per_s() -> float:
    """What a large bf16 matmul of cuBLAS reaches in this run: the practical roof."""
    from triton.testing import do_bench

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / do_bench(lambda: a @ b, return_mode="median") / 1e9


VIEW = View(
    columns=[
        Column("config.head_dim", "d"), Column("variant", "variant"), Column("metrics.fwd_p50_ms", "fwd ms", ".3f"),
        Column("metrics.bwd_p50_ms", "bwd ms", ".3f"), Column("metrics.fwd_bwd_p50_ms", "f+b ms", ".3f"),
        Column("metrics.host_p50_ms", "host ms", ".3f", optional=True),
        Column("metrics.fwd_tflop_per_s", "fwd TFLOP/s", ".0f"),
        Column("metrics.bwd_tflop_per_s", "bwd TFLOP/s", ".0f"),
        Column("metrics.fwd_bwd_tflop_per_s", "f+b TFLOP/s", ".0f"), Column("metrics.max_abs_error", "max |Δo|", ".1e"),
        Column("metrics.max_abs_grad_error", "max |Δgrad|", ".1e"),
        Column("metrics.matmul_tflop_per_s", "cuBLAS", ".0f"),
    ],
    headline=headline_from(
        "1 × {heads} × {length:,} × d, {dtype}, causal, forward + backward, {device_name}, torch {torch}, triton "
        "{triton}"
    ),
    terminal=("head_dim", "variant", "fwd_p50_ms", "bwd_p50_ms", "fwd_bwd_p50_ms", "fwd_bwd_tflop_per_s",
              "max_abs_error", "max_abs_grad_error", "matmul_tflop_per_s"),
    reading="All variants run through one harness, and its cost (unpacking, the sum, stacking gradients) is the same "
    "in every row. TFLOP/s count causal pairs only, backward as 2.5 forwards; the last column is what a large "
    "matmul of cuBLAS reached in the same run. Errors are against float64 and must be similar for all variants.",
)  # fmt: skip
SHORT = {"ms_per_number": 100, "head_dims": (64,), "length": 128}
EXPERIMENT = Experiment(
    Config, measure, VIEW,
    presets={"quick": {"ms_per_number": 100}, "quick-cpu": SHORT, "smoke": SHORT},
    gpus=1,
)
