"""Will a model fit on these GPUs, and what trains it fastest?

    distlab run plan --model xl --batch 512 --devices h100:64 --link nvlink --tokens 1e11
    distlab run plan --model llama-8B --batch 2048 --cluster dgx-h100:1024 --tokens 1e12 --days 30
    distlab run plan --sweep --model xl      # where does each strategy stop scaling?
    distlab run plan --timeline --model 10B  # what does a step on 1,024 ranks look like?
    distlab run plan gpus                    # also: kernel, block, occupancy and waves

The plan (`fastest.py`) tries every strategy with the micro-batches that divide a rank's share of
the batch, hybrid sharding with groups of one node and of 2, 4, 8, … nodes, without recomputation,
with selective and with full, in every layout that the model and the cluster allow: data × pipeline
× context × tensor, tensor within a node, a stage on one node or several. Memory comes from
`distlab.theory.memory`, time from `distlab.simulate.estimate`, days from the goodput that failures
leave: all are predictions, at the shares of the datasheets' peaks that a calibrated machine
reaches. A test holds the first choice against others, simulated.

With `--sweep` (`scaling_sweep.py`) the run predicts each strategy from 1 to 4,096 ranks instead.
Weak scaling keeps the batch per rank (`--micro-batch`), strong scaling the batch of all ranks
(`--batch`). Lines are predictions, in closed form. Dots are the records of ddp_bench in
`--records`, for the same model, context, dtype and device, with p20 to p80 as error bars. To add
points, run `distlab run ddp_bench --nproc N` for several N and name the files.

With `--timeline` (`step_timeline.py`) each strategy runs on fake ranks and fake tensors instead:
its collectives and its memory are what the code does, not what a formula says. The timeline puts
times to them.

`question.py` has the options of all three.

A word instead of options is a question about one GPU that arithmetic answers (`arithmetic.py`):
`gpus` are the peaks and limits of each GPU, `kernel` is the shortest time of a kernel and what
bounds it, `block` tells which operations of a block belong in one kernel, `occupancy` and `waves`
tell how blocks fill a GPU. `distlab run plan WORD --help` shows its options.
"""

from distlab.experiment import Experiment, RankContext, Run, View

from .arithmetic import CALCULATIONS, calculate
from .fastest import VIEW, measure_choices
from .question import PlanConfig
from .scaling_sweep import SCALING_VIEW, measure_scaling
from .step_timeline import TIMELINE_VIEW, measure_timeline


def measure(config: PlanConfig, context: RankContext, run: Run) -> None:
    """Answer the question of the mode. Nothing is timed."""
    if config.sweep:
        measure_scaling(config, run)
    elif config.timeline:
        measure_timeline(config, run)
    else:
        measure_choices(config, run)


def own_view(config: PlanConfig) -> View:
    """Return the view of the mode's rows."""
    if config.sweep:
        return SCALING_VIEW
    if config.timeline:
        return TIMELINE_VIEW
    return EXPERIMENT.view


# First word of the command → function of the words that answers, in place of the experiment.
WORDS = dict.fromkeys(CALCULATIONS, calculate)

EXPERIMENT = Experiment(
    PlanConfig,
    measure,
    VIEW,
    presets={
        "quick": {"strategies": ("bucketed", "fsdp")},
        "smoke": {"strategies": ("fsdp",), "model": "small"},
    },
    ranks="none",
    parts=(SCALING_VIEW, TIMELINE_VIEW),
    own_view=own_view,
)
