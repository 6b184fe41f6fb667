"""What do this lab's operations and torch.compile bring to a step?

    distlab run model_comparison --quick             # on a CPU: plain torch, nothing compiled
    distlab run model_comparison --size medium --batch 8 --context 1024     # on a GPU
    distlab run model_comparison --preset llama      # a layer of Llama, whose modules?

One model and one optimizer are run in several ways, which share every parameter: with torch's
operations or ours, as they are written, with compiled blocks, or whole in CUDA graphs. Rounds of a
few steps each are interleaved, so that the machine's drift affects all ways equally. Each way's
gradients are compared with fp32 with torch's operations.

With `--layer` the model is one decoder layer in the shape of Hugging Face's Llama
(`_llama_layer.py`), whose modules are exchanged; its loss is the mean square of what comes out.

GPU idle is the part of a step in which no kernel runs: where it is large the host decides, and a
slower host is slower.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.bench.reference import relative_errors
from distlab.bench.trial import synthetic_batches
from distlab.bench.variant import BenchOptions
from distlab.experiment import (
    Column,
    Experiment,
    Metrics,
    RankContext,
    Record,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import (
    PhaseTimer,
    attempt,
    busy_ms,
    interleave,
    peak_memory,
    percentile_metrics,
)
from distlab.model import TransformerLM
from distlab.model.ops import sources
from distlab.options import Values
from distlab.precision import DTYPES, autocast
from distlab.report import NOISE, PEAK, ratio_column, row_named, text_column, with_ratios
from distlab.train.step import compiled, loss_function
from experiments._llama_layer import PARTS, layer

# name → (ops, attention, how it is compiled)
WAYS = {
    "torch": ("torch", "sdpa", "off"),
    "ours": ("triton", "flash", "off"),
    "auto": ("auto", "auto", "off"),
    "torch-compiled": ("torch", "sdpa", "blocks"),
    "ours-compiled": ("triton", "flash", "blocks"),
    "ours-sdpa-compiled": ("triton", "sdpa", "blocks"),
    "auto-compiled": ("auto", "auto", "blocks"),
    "torch-graphs": ("torch", "sdpa", "graphs"),
    "auto-graphs": ("auto", "auto", "graphs"),
    "ours-graphs": ("triton", "flash", "graphs"),
}


@dataclass(frozen=True)
class ModelComparisonConfig(BenchOptions):
    """Options of the comparison. Raises ValueError for a value that is not allowed."""

    ways: tuple[str, ...] = option(tuple(WAYS), "ways to run the model", choices=tuple(WAYS))
    dtype: str = option(
        "bf16", "dtype: fp32, or bf16 over fp32 parameters", choices=("fp32", "bf16")
    )
    rounds: int = option(8, "interleaved rounds", minimum=1)
    steps: int = option(4, "timed steps per round, after an untimed one", minimum=1)
    layer: bool = option(
        False, "run one layer in Llama's shape, by torch's modules, kernels.nn's and Liger's"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("ops", "torch"), ("attention", "sdpa"), ("compile", "off")):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: the ways to run the model differ in it; give "
                    "--ways"
                )

    def check_effect(self, given: Values) -> None:
        """Raise ValueError for options of the whole Transformer given together with `--layer`."""
        super().check_effect(given)
        of_transformer = ("ways", "layers", "vocab", "checkpointing")
        idle = [name for name in of_transformer if name in given]
        if self.layer and idle:
            raise ValueError(
                f"--{idle[0]} is of the whole Transformer, and this run is of one layer, in all of "
                f"its ways: leave out --{idle[0]}, or --layer or its preset"
            )


def sharing(model: nn.Module, base: nn.Module) -> nn.Module:
    """Return `model`, made on meta, with the parameters of `base` themselves."""
    # A tied head has a second name, which must also point to the shared parameter.
    for name, parameter in base.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        # The parameters of `base` are registered themselves, so an optimizer of `base` steps every
        # way.
        setattr(model.get_submodule(owner), leaf, parameter)
    return model


def model_loss(
    name: str, config: ModelComparisonConfig, base: nn.Module, device: torch.device
) -> Callable[[Any], Tensor]:
    """Return the loss of a batch as a function, by the Transformer run in this way."""
    ops, attention, how = WAYS[name]
    shape = replace(config.model(), ops=ops, attention=attention)
    model = sharing(
        TransformerLM(shape, device="meta", checkpoint_blocks=config.checkpointing), base
    )
    # The modes of compilation are for GPUs. On a CPU every way runs eagerly.
    if device.type == "cuda":
        if how == "graphs":
            # This mode captures CUDA graphs.
            model = torch.compile(model, mode="reduce-overhead")
        else:
            model = compiled(model, how)
    return partial(loss_function(shape), model)


def layer_loss(
    name: str, config: ModelComparisonConfig, base: nn.Module, device: torch.device
) -> Callable[[Any], Tensor]:
    """Return the loss of a batch as a function, by a layer of these modules."""
    model = sharing(layer(name, config.model(), device), base)
    if device.type == "cuda" and name.endswith("compiled"):
        model = torch.compile(model)
    return partial(_mean_square, model)


def _mean_square(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Return a loss of a layer's output, for which there are no targets."""
    # In fp32, since a sum of squares in bf16 would round most of its terms away.
    return model(*batch).float().square().mean()


class Way:
    """A training step of the shared parameters; calling it runs one."""

    def __init__(
        self,
        name: str,
        config: ModelComparisonConfig,
        base: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: list[Any],
    ):
        device = batches[0][0].device
        make = layer_loss if config.layer else model_loss
        self.loss: Callable[[Any], Tensor] = make(name, config, base, device)
        self.autocast = partial(autocast, device, DTYPES[config.dtype])
        self.optimizer = optimizer
        self.batches = batches
        self.calls = 0

    def backward(self, batch: Any) -> Tensor:
        """Compute the gradients of a batch and leave them in `.grad`. Return its loss."""
        # Ways share `.grad`. What another way left there must not be added to.
        self.optimizer.zero_grad(set_to_none=True)
        # Tells CUDA graphs that the outputs of the last step may be overwritten. Other ways ignore
        # it.
        torch.compiler.cudagraph_mark_step_begin()
        with self.autocast():
            loss = self.loss(batch)
        loss.backward()
        return loss.detach()

    def first(self) -> tuple[float, list[Tensor]]:
        """Return the loss and the gradients of the first batch."""
        # Without the optimizer, so that every way is compared at the same parameters.
        loss = self.backward(self.batches[0]).item()
        gradients = []
        # The optimizer has the parameters in one order, which is the same for all ways.
        for group in self.optimizer.param_groups:
            gradients += [parameter.grad for parameter in group["params"]]
        return loss, gradients

    def __call__(self) -> None:
        # The batches are taken in turn, so every way sees the same sequence.
        self.backward(self.batches[self.calls % len(self.batches)])
        self.optimizer.step()
        self.calls += 1


def first_steps(
    name: str, ways: dict[str, Way], make: Callable[[], Way], reference: tuple[float, list[Tensor]]
) -> Metrics:
    """Compile a way, keep it in `ways`, and compare its first batch with the plain one's."""
    way = make()
    loss, gradients = way.first()
    found = relative_errors(loss, reference[0], gradients, reference[1])
    with peak_memory(way.batches[0][0].device) as memory:
        # A second call: the first also holds what compilation allocates.
        way.backward(way.batches[1])
    ways[name] = way
    return found | {"peak_alloc_bytes": memory.peak_alloc_bytes}


def block(way: Way, timer: PhaseTimer, steps: int) -> list[float]:
    """Return the milliseconds of each of `steps` steps, after an untimed one."""
    # The untimed step refills caches, which hold what the way before has left.
    for _ in timer.each(steps, warmup=1):
        way()
        timer.mark("all")
    times = [step["step"] for step in timer.steps()]
    timer.clear()
    return times


def measure(config: ModelComparisonConfig, context: RankContext, run: Run) -> None:
    """Add a row for each way. One that does not run says why."""
    device = context.device
    shape = config.model()
    torch.manual_seed(config.seed)
    if config.layer:
        base = layer("torch", shape, device, on=device)
    else:
        base = TransformerLM(shape, device=device, seed=config.seed)
    # One optimizer for all ways, since they share the parameters. The rate is small, because
    # hundreds of steps on a few batches must not let the loss run away.
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-5, fused=True)
    batches = synthetic_batches(context, config)
    if config.layer:
        # A layer takes the residual stream, so its batch is random numbers in place of tokens.
        batches = [
            (torch.randn(*tokens.shape, shape.d_model, device=device),) for tokens, _ in batches
        ]
    # The reference: fp32 and torch's operations. It recomputes blocks, which changes no value and
    # keeps fewer activations.
    plain = Way(
        "torch", replace(config, dtype="fp32", checkpointing="block"), base, optimizer, batches
    )
    reference = plain.first()
    ways, rows = {}, {}  # name → what runs it; name → its metrics
    for name in PARTS if config.layer else config.ways:
        run.progress(f"first steps: {name}")
        make = partial(Way, name, config, base, optimizer, batches)
        rows[name] = attempt(partial(first_steps, name, ways, make, reference))
    # Its gradients take as much memory as the parameters.
    del reference
    timer = PhaseTimer(device)
    # A way that failed its first steps has a status, and no time.
    running = {
        name: partial(block, ways[name], timer, config.steps)
        for name in rows
        if rows[name]["status"] == "ok"
    }
    taken = interleave(running, config.rounds, progress=run.progress)
    for name, found in rows.items():
        if name in taken:
            found["step_samples_ms"] = list(itertools.chain(*taken[name]))
            found["rounds"] = len(taken[name])
            found |= percentile_metrics("step", found["step_samples_ms"])
            if device.type == "cuda":
                # After the timing, because the profiler slows the host.
                found |= waits(ways[name], found["step_p50_ms"])
        run.add(
            name,
            found,
            size="layer of Llama" if config.layer else config.size,
            operations="" if config.layer or device.type != "cuda" else operations(name, config),
            num_parameters=sum(parameter.numel() for parameter in base.parameters()),
        )


def operations(name: str, config: ModelComparisonConfig) -> str:
    """Return the implementation of each operation of the Transformer in this way."""
    ops, attention, how = WAYS[name]
    shape = replace(config.model(), ops=ops, attention=attention)
    dtype = DTYPES[config.dtype] or torch.float32
    source_of = sources(shape, config.batch, dtype, how)
    return ", ".join(f"{operation} {source}" for operation, source in source_of.items())


def waits(way: Way, step_ms: float) -> dict[str, float]:
    """Return the share of a step in which the GPU is idle, and the host's launches in one."""
    busy, launches = busy_ms(way)
    return {
        "gpu_idle_pct": 100 * max(0.0, 1 - busy / step_ms),
        "busy_ms": busy,
        "launches": launches,
    }


def compare(records: Records) -> list[Record]:
    """Return the rows, compared with torch's operations in compiled blocks."""
    return with_ratios("over_compiled", records, row_named("torch-compiled", records))


VIEW = View(
    columns=[
        Column("variant", "way"),
        Column("metrics.step_p20_ms", "p20 ms", ".1f"),
        Column("metrics.step_p50_ms", "p50", ".1f"),
        NOISE,
        ratio_column("over_compiled", "÷ compiled"),
        Column("metrics.gpu_idle_pct", "GPU idle %", ".0f"),
        Column("metrics.busy_ms", "GPU ms", ".1f"),
        Column("metrics.launches", "launches", ",.0f"),
        PEAK,
        Column("metrics.loss_rel_error", "loss error", ".0e"),
        Column("metrics.grad_rel_error", "gradient error", ".1e"),
        text_column("config.operations", "operations"),
        text_column("metrics.status", "status"),
    ],
    headline=headline_from(
        "{size} ({num_parameters:M} parameters), batch {batch}, context {context}, {dtype}; "
        "{device_name}, torch {torch}"
    ),
    derive=compare,
    terminal=(
        "variant",
        "step_p20_ms",
        "noise_pct",
        "over_compiled",
        "gpu_idle_pct",
        "launches",
        "grad_rel_error",
        "status",
    ),
    reading="÷ compiled is the step over that of torch's operations with compiled blocks, a tie "
    "where the 95 % interval of the paired steps contains 1. Errors are relative, of loss and all "
    "gradients of one batch, against fp32.",
    prediction="None: see ddp_bench and plan for predicted steps.",
)
SMOKE = {
    "ways": ("torch", "auto", "torch-compiled"),
    "rounds": 1,
    "context": 16,
    "batch": 1,
    "dtype": "fp32",
}
EXPERIMENT = Experiment(
    ModelComparisonConfig,
    measure,
    VIEW,
    gpus=1,
    presets={
        "quick": {"rounds": 2},
        "quick-cpu": SMOKE,
        "smoke": SMOKE,
        "llama": {
            "layer": True,
            "d_model": 4096,
            "d_ff": 14336,
            "heads": 32,
            "kv_heads": 8,
            "batch": 2,
            "context": 2048,
        },
    },
)
