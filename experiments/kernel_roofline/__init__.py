"""How close is each fused kernel to what the hardware allows, and to what one could call instead?

    python -m experiments.kernel_roofline --stamp full          # all rows, some two minutes; again: resumes
    python -m experiments.kernel_roofline --quick               # the rows of most interest
    python -m experiments.kernel_roofline --only rms_norm --tune    # try launch parameters of one kernel
    python -m experiments.kernel_roofline --dump-ptx gelu       # the generated PTX; needs no GPU
    python -m experiments.kernel_roofline --smoke               # seconds, on a CPU

Each operation in each direction × (ours, naive: plain torch one kernel at a time, builtin: torch's own, compile: the
naive form through torch.compile, template: of products, the best of Inductor's Triton templates with cuBLAS left out,
liger: Liger Kernel where it is installed). Median device time of a CUDA graph's replays with the L2 flushed in between;
GB/s of the *least* traffic and its share of the copy bandwidth of this run; TFLOP/s and its share of cuBLAS in this
run; launched kernels; registers and spills of ours; the largest error against float64, relative to the largest value
(none where results are random, and of the optimizer). Beside the measured speed-up over the naive form stands the
predicted one.

Two rows lose on purpose: `spilling_add_rms_norm_silu`, a chain fused into too few threads' registers, and `add_gelu`,
which torch.compile makes one kernel and ours are two.

Rows bound by arithmetic run at a clock that the card's power sets: their variants are timed in turns, in rounds.

The rows are in `cases`, how one is measured in `rows`, `timing` and `turns`, the prediction in `prediction`, what is
shown in `view`, `comparison` and `pictures`.
"""

from .comparison import VIEW as COMPARISON_VIEW
from .rows import EXPERIMENT, SMOKE, Config, run
from .view import VIEW

__all__ = ["COMPARISON_VIEW", "EXPERIMENT", "SMOKE", "VIEW", "Config", "run"]
