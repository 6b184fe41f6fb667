"""How close is each fused kernel to what the hardware allows, and to what one could call instead?

    distlab run kernel_roofline --name full                    # all rows, some two minutes; again: resumes
    distlab run kernel_roofline --quick                        # the rows of most interest; on a CPU small sizes
    distlab run kernel_roofline --only rms_norm --tune         # launch parameters of one row kernel
    distlab run kernel_roofline --quick --dump-ptx gelu        # the generated PTX; --quick needs no GPU

Each operation in each direction × (ours, naive: plain torch one kernel at a time, builtin: torch's own, compile: the
naive form through torch.compile, template: of matmuls, the best of Inductor's Triton templates with cuBLAS left out,
liger: Liger Kernel where it is installed). Median device time of a CUDA graph's replays with the L2 flushed in between;
GB/s of the *least* traffic and its share of the copy bandwidth of this run; TFLOP/s and its share of cuBLAS in this
run; launched kernels; registers and spills of ours; the largest error against float64, relative to the largest value
(none where results are random, and of the optimizer). Beside the measured speed-up over the naive form stands the
predicted one.

Two rows lose on purpose: `spilling_add_rms_norm_silu`, a chain fused into too few threads' registers, and `add_gelu`,
which torch.compile makes one kernel and ours are two.

Rows bound by arithmetic run at a clock that the GPU's power sets: their variants are interleaved, in rounds.

The rows are in `cases`, how one is measured in `measuring` and `timing`, the prediction in `prediction`, `--tune` and
`--dump-ptx` in `tuning`, what is shown in `view`.
"""

from distlab.experiment import Experiment

from .measuring import PRESETS, Config, measure
from .view import COMPARISON, VIEW

EXPERIMENT = Experiment(Config, measure, VIEW, presets=PRESETS, gpus=1, parts=(COMPARISON,))
