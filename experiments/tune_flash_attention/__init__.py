"""Which tile shapes are the fastest for the attention kernels?

    distlab run tune_flash_attention --family bfloat16:64                   # one dtype and head dim
    distlab run tune_flash_attention --all --table kernels/flash_attention/table.py --name full
    distlab run tune_flash_attention --quick       # what the shipped configurations use of an H100; needs no GPU

A family is a dtype, an arithmetic and a head dim; it is tuned for one head of each length given, which are the row
classes of `configs.ROW_CLASSES`. Every candidate of the three kernels is compiled in parallel processes, those that
spill or do not fit are dropped, the rest are checked against a small tile on poisoned outputs and timed, length after
length, as long as they stay near the best. Forward and backward are tried split over chunks too, up to 4,096 rows. Then
the backward is timed as a whole, in every way of `Choice.passes`. The best of each are timed again, interleaved.

Everything measured goes to a file per family; --table rewrites `kernels/flash_attention/table.py` after each length,
and a name that exists is resumed, so that a cut-off run keeps what it has.

What is tried is in `candidates`, one case on a GPU in `workbench`, the search and the table in `tuning`.
"""

from distlab.experiment import Column, Experiment, View, headline_from
from kernels.flash_attention import configs

from .tuning import Config, measure

COLUMNS = [
    Column("config.family", "family", align="left"), Column("config.length", "length"), Column("variant", "kernel"),
    Column("config.tiles", "tiles", align="left"), Column("metrics.sustained_ms", "µs", ",.1f", scale=1000),
    Column("metrics.registers", "registers"), Column("metrics.spilled_bytes", "spilled B"),
    Column("metrics.shared_bytes", "shared B", ",d"), Column("metrics.status", "status"),
    *(Column(f"metrics.{way.replace(' ', '_')}_ms", f"{way} µs", ",.1f", scale=1000) for way in configs.PASSES),
]  # fmt: skip


headline = headline_from(
    "{where}; torch {torch}, triton {triton}",
    where=lambda records: "Device time, " + records[0].environment["device_name"]
    if any("sustained_ms" in r.metrics for r in records) else "Compiled for an H100 (sm_90), nothing ran",
)


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=("family", "length", "variant", "tiles", "sustained_ms", "registers", "spilled_bytes", "status"),
    reading="Tiles are queries × keys, warps (w), pipeline stages (s), rows of a chunk (c); times are those of the "
    "winner. "
    "A block of w warps takes 32·w times the table's registers, of 65,536 per SM; spilled bytes go through local "
    "memory "
    "and should be few. Shared memory and registers together decide how many blocks an SM holds.",
    noise="Times are medians of three interleaved rounds; the compiler's figures do not vary.",
)
PRESETS = {"quick": {"shipped": len(configs.TABLE)}, "smoke": {"shipped": 1}}
EXPERIMENT = Experiment(Config, measure, VIEW, presets=PRESETS, gpus=1)
