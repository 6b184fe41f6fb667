"""The record configuration: one sequence of 16,384 tokens, 16 heads, bf16, causal, forward and backward, on one H100.

    python experiments/attention_record.py                     # head dims 64 (the record) and 128
    python experiments/attention_record.py --quick             # less time per number; on a CPU a short sequence

Every variant runs through the same harness: one leaf tensor of shape (3, 16, 16384, d) is unpacked into q, k and v,
attention is called, and `o.sum().backward()` fills the leaf's gradient, so that summing, unpacking and stacking are
timed with it. `triton.testing.do_bench` gives medians with a cold L2. Ours and FlexAttention are compiled. Forward
alone is timed in the same way; errors are the largest of the output and of the worst gradient against float64 on the
first head of the inputs that were timed. The public class record for ours' d = 64 row is 5.364 ms.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from distlab.measure.clock import measure as measure_calls
from distlab.measure.statistics import percentiles
from distlab.report import (
    Column,
    Record,
    View,
    Work,
    add_output_options,
    commit,
    environment,
    progress,
    run_command,
    write_json,
)
from distlab.report.options import whole
from kernels.flash_attention import FlashAttention2, FlashAttention2PyTorch, cost

EXPERIMENT = "attention_record"
HEADS = 16
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (H, T, D) each → (H, T, D)


def _sdpa(backend: SDPBackend) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    return run


def _flex(length: int) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q[None], k[None], v[None], block_mask=mask)[0]


def variants(length: int) -> dict[str, Attention]:
    """The attentions that are timed; on a CPU the tiled form in plain torch beside torch's own."""
    if not torch.cuda.is_available():
        tiled = FlashAttention2PyTorch.apply
        return {"ours": lambda q, k, v: tiled(q, k, v, True), "sdpa-math": _sdpa(SDPBackend.MATH)}
    torch._dynamo.reset()
    ours = torch.compile(FlashAttention2.apply)
    return {
        "ours": lambda q, k, v: ours(q, k, v, True),
        "flex": _flex(length),
        "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    }


def step(leaf: Tensor, fn: Attention) -> Tensor:
    """One forward and backward through the harness; returns the leaf's gradient."""
    leaf.grad = None
    fn(*leaf.unbind(0)).sum().backward()
    return leaf.grad


def errors(leaf: Tensor, fn: Attention) -> dict[str, float]:
    """Against float64 on the first head, by blocks of queries."""
    with torch.no_grad():
        o = fn(*leaf.unbind(0))[0]
    gradient = step(leaf, fn)[:, 0]
    q, k, v = leaf.detach()[:, 0].double()
    worst_o, exact = 0.0, torch.zeros(3, *q.shape, dtype=torch.float64, device=q.device)
    scale = q.shape[-1] ** -0.5
    for start in range(0, len(q), 2048):
        stop = min(start + 2048, len(q))
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(1 + start)
        p = torch.softmax((q[start:stop] @ k[:stop].mT * scale).masked_fill(hidden, float("-inf")), -1)
        here = p @ v[:stop]
        worst_o = max(worst_o, (o[start:stop] - here).abs().max().item())
        ds = p * (v[:stop].sum(-1) - here.sum(-1, keepdim=True))  # do is all ones
        exact[0, start:stop] = ds @ k[:stop] * scale
        exact[1, :stop] += ds.mT @ q[start:stop] * scale
        exact[2, :stop] += p.sum(0)[:, None]
    return {"max_abs_error": worst_o, "max_abs_grad_error": (gradient - exact).abs().max().item()}


def measure(length: int, head_dim: int, name: str, fn: Attention, milliseconds: int) -> dict[str, object]:
    torch.manual_seed(head_dim)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    leaf = torch.randn(3, HEADS, length, head_dim, device=device, dtype=dtype, requires_grad=True)
    metrics: dict[str, object] = errors(leaf, fn)
    flops = cost(leaf.shape[1:], leaf.shape[1:], leaf.dtype, causal=True).flops
    runs = {"fwd": (lambda: fn(*leaf.unbind(0)), 1.0), "fwd_bwd": (lambda: step(leaf, fn), 3.5)}
    for kind, (call, times) in runs.items():
        metrics |= {f"{kind}_{p}_ms": ms for p, ms in _timed(call, milliseconds).items()}
        metrics[f"{kind}_tflop_per_s"] = times * flops / metrics[f"{kind}_p50_ms"] / 1e9
    metrics["bwd_p50_ms"] = metrics["fwd_bwd_p50_ms"] - metrics["fwd_p50_ms"]  # sum and stacking included
    metrics["bwd_tflop_per_s"] = 2.5 * flops / metrics["bwd_p50_ms"] / 1e9
    return metrics


def _timed(call: Callable[[], object], milliseconds: int) -> dict[str, float]:
    """p20, p50 and p80 in ms; on a GPU by Triton's timer, with a cold L2."""
    if not torch.cuda.is_available():
        return percentiles(measure_calls(call, warmup=1, repeats=5, device="cpu"))
    from triton.testing import do_bench

    quantiles = do_bench(call, warmup=100, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return dict(zip(("p20", "p50", "p80"), quantiles, strict=True))


def matmul_tflop_per_s() -> float | None:
    """What a large bf16 product of cuBLAS reaches in this run: the practical roof. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from triton.testing import do_bench

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / do_bench(lambda: a @ b, return_mode="median") / 1e9


COLUMNS = [
    Column("config.head_dim", "d"), Column("variant", "variant"), Column("metrics.fwd_p50_ms", "fwd ms", ".3f"),
    Column("metrics.bwd_p50_ms", "bwd ms", ".3f"), Column("metrics.fwd_bwd_p50_ms", "f+b ms", ".3f"),
    Column("metrics.fwd_tflop_per_s", "fwd TFLOP/s", ".0f"), Column("metrics.bwd_tflop_per_s", "bwd TFLOP/s", ".0f"),
    Column("metrics.fwd_bwd_tflop_per_s", "f+b TFLOP/s", ".0f"), Column("metrics.max_abs_error", "max |Δo|", ".1e"),
    Column("metrics.max_abs_grad_error", "max |Δgrad|", ".1e"), Column("metrics.matmul_tflop_per_s", "cuBLAS", ".0f"),
]


def headline(records: list[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    return (
        f"1 × {config['heads']} × {config['length']:,} × d, {config['dtype']}, causal, forward + backward, "
        f"{env['device_name']}, torch {env['torch']}, triton {env['triton']}"
    )


VIEW = View(
    name=EXPERIMENT,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    reading="All variants run through one harness, and what it costs (unpacking, the sum, stacking gradients) is in "
    "every row alike. TFLOP/s count causal pairs only, backward as 2.5 forwards; the last column is what a large "
    "product of cuBLAS reached in the same run. Errors are against float64 and must be alike between variants.",
)


def run(
    head_dims: Sequence[int], length: int, ms: int, path: Path, default_commit: str | None = None
) -> list[Record]:
    """A record per head dim and variant, saved at `path` as they come; `ms` is the time to spend on each number."""
    on_gpu = torch.cuda.is_available()
    where, roof = environment("cuda" if on_gpu else "cpu"), matmul_tflop_per_s()
    records: list[Record] = []
    for head_dim in head_dims:
        for name, fn in variants(length).items():
            config = {"heads": HEADS, "length": length, "head_dim": head_dim,
                      "dtype": "bfloat16" if on_gpu else "float32", "causal": True, "ms_per_number": ms}
            progress(f"{name} d={head_dim}")
            metrics = measure(length, head_dim, name, fn, ms) | {"matmul_tflop_per_s": roof}
            records.append(Record(EXPERIMENT, name, config, metrics, where, commit(default_commit)))
            write_json(records, path)
    return records


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(EXPERIMENT, description=__doc__, formatter_class=raw)
    parser.add_argument("--head-dims", type=whole(), nargs="+", default=[64, 128])
    parser.add_argument("--length", type=whole(), default=16384)
    parser.add_argument("--ms", type=whole(), default=400, help="time to spend on each number")
    parser.add_argument("--quick", action="store_true", help="100 ms per number; on a CPU 128 tokens of width 64")
    add_output_options(parser)
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if args.quick:
        args.ms = 100
        args.length, args.head_dims = (args.length, args.head_dims) if on_gpu else (128, [64])

    def prepare() -> Work:
        if not on_gpu and not args.quick:
            raise ValueError("the record configuration needs a GPU (--quick times a short one on a CPU)")
        return lambda folder: run(args.head_dims, args.length, args.ms, folder / "records.json", args.commit)

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
