"""What cannot be is refused in one line, which names the value, before anything is measured or a
rank is started.
"""

import re

import pytest
import torch

from launch.registry import experiments, load
from tests.experiments.frame import refused

REFUSED = {
    "collectives --sizes 4096": "give two or more positive sizes",
    "collectives --nproc 1 --backend gloo": (
        "one rank alone sends nothing: start two or more with --nproc"
    ),
    "collectives --rounds 3": "--rounds has no effect without --contention",
    "collectives --nproc 3 --backend gloo --group-sizes 2 4": "group sizes (2, 4) on 3 rank",
    "collectives --nproc 2 --backend gloo --sizes 4096 1000000000000": "give smaller --sizes",
    "attention_steps --quick --length 200 --head-dims 64": "give a multiple of 128",
    "plan occupancy --threads 5000 --registers 32": "1 to 1024",
    "plan occupancy --threads 128": "occupancy: give registers",
    "plan gpus --gpu RTX": "'RTX' is unknown; allowed: all, A100-40GB, A100",
    "plan gpus --dtype fp32": "gpus: --dtype has no effect",
    "plan block --batch -4": "--batch: -4: give a whole number of at least 1",
    "plan kernel matmul 3": "matmul has no shape of 1 dimension(s); give three: M, K, N",
    "plan kernel rope 3": "rope has no shape of 1 dimension(s); give two or more",
    "plan occupansy": "'occupansy' is unknown (did you mean occupancy?); allowed: gpus, kernel",
    "ddp_bench --nproc 2 --backend gloo --strategies hsdp --shard-size 3": "shard_size=3 does not "
    "divide the 2 ranks; allowed: [1, 2]",
    "ddp_bench --nproc 2 --backend gloo --out /dev/null/results": "pass --out",
    "ddp_bench --nproc 1 --backend gloo --batch 100000000 --check-steps 0": (
        "does not fit in the memory of cpu"
    ),
    "ddp_bench --model resnet": "package.module:function",
    "ddp_bench --micro-batches 8": "--micro-batches is for rows with a pipeline",
    "ddp_bench --wrap-memory-gib 3": "--wrap-memory-gib has no effect without --wrap: add",
    "ddp_bench --strategies local naive --bucket-size-mb none 4": "--bucket-size-mb none is for",
    "ddp_bench --strategies local torch-ddp --layouts tp2": "cannot be combined with it; add fsdp",
    "memory_breakdown --strategies fsdp --bucket-size-mb 100": "fsdp has none: leave it out",
    "ddp_bench --model a:b --size xl": "--size is of the lab's Transformer",
    "ddp_bench --model a:b --compile blocks": "--compile blocks is for",
    "ddp_bench --model a:b --kv-heads 2": "--kv-heads is of",
    "ir softmix": "give MODULE or MODULE.KERNEL of elementwise",
    "kernel_roofline --quick --chain norm": "'norm' is unknown",
    "kernel_roofline --quick --only nothing": "choose among",
    "kernel_roofline --quick --only matmul --variants liger": (
        "there is no such form of matmul; choose among ours, builtin"
    ),
    "kernel_roofline --quick --only add --chain add": "give one of them",
    "long_context --scale 2": "scale='2': give a fraction above 0 and at most 1, such as 1/8",
    "long_context --scale a/b": "scale='a/b': give a fraction",
    "long_context --rows fsdp3": (
        "'fsdp3' is unknown (did you mean fsdp?); allowed: fsdp, fsdp blocks"
    ),
    "model_comparison --quick --layer --ways torch": "--ways is of the whole Transformer",
    "model_comparison --quick --layer --layers 3": "--layers is of the whole Transformer",
    "model_benchmark --checkpointing every-0": "choose none, block, every-K",
    "model_benchmark --steps 2": "at least 3",
    "plan --devices h99:8": "device 'h99' is unknown; choose one of",
    "plan --devices h100:x": "give a name and a number",
    "plan --devices h100:1024 --batch 4": "leaves some of 1024 devices without one",
    "plan --devices h100:1024 --batch 1036": (
        "1024 devices do not divide a batch of 1036; the nearest is --batch 1024"
    ),
    "plan --model huge": "model size 'huge' is unknown",
    "plan --strategies magic": "'magic' is unknown",
    "plan --tokens 0": "tokens",
    "plan --between pigeons": "between 'pigeons' is unknown for H100 SXM",
    "plan --cluster dgx-h100:12 --batch 24": "12 GPUs do not fill hosts of 8",
    "plan --model a:b --context 8": "--context is of",
    "plan --model a:b --compile blocks": "--compile is of",
    "plan --model no_such:b --devices h100:1": "No module named 'no_such'",
    "predict --calibrate missing.json --models xl:2": "missing.json",
    "predict --calibrate missing.json --models xl:0": "--models: 'xl:0': give PRESET:BATCH",
    "predict --calibrate missing.json": "give --calibrate and --models, or",
    "predict --ranks 8": "--ranks has no effect without --calibrate and --models",
    "sabotage --mistakes typo": "allowed: no broadcast",
    "plan --sweep --records missing.json --model tiny": "missing.json",
    "plan --sweep --timeline": "--sweep and --timeline: give one of them",
    "plan --sweep --strategies local": "'local' is unknown",
    "plan --sweep --recomputation block none": "'block,none'",
    "plan --sweep --devices h200:8": (
        "plan --sweep takes the numbers from --ranks: give --devices h200"
    ),
    "plan --sweep --batch 4 --ranks 8 16": "batch=4 is smaller than the data-parallel size 8",
    "plan --sweep --model a:b": "plan --sweep is of the lab's Transformer",
    "plan --recomputation half": "recomputation: 'half' is unknown",
    "plan --timeline --strategies torch-ddp": "is torch's",
    "plan --timeline --compile blocks": "no compiler runs on tensors",
    "plan --timeline --recomputation qkv:3": "add up to the 50 blocks",
    "plan --timeline --strategies hsdp --devices h100:16 --group 3": (
        "groups of 3 do not divide 16 ranks"
    ),
    "train_curves --quick --parts muon --strategies fsdp": (
        "--strategies has no effect without the part curves"
    ),
    "gpu_lessons --quick --elements 5000": "give a power of two",
}
WITHOUT_A_GPU = {
    "collectives --nproc=2 --backend=nccl": "needs an NVIDIA GPU",
    "attention_sweep": "needs 1 GPU",
    "ddp_bench --nproc=3 --backend=nccl": "nccl",
    "kernel_roofline": "--quick or --preset sizes or --preset chains runs a small form",
    "mixed_precision --device cuda": "no GPU",
    "model_benchmark --nvtx": "CUDA device",
}
HERE = REFUSED if torch.cuda.is_available() else REFUSED | WITHOUT_A_GPU


@pytest.mark.parametrize("command", HERE)
def test_what_cannot_be_is_refused_in_one_line_and_leaves_nothing(
    command, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert HERE[command] in refused(capfd, *command.split())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def frames():
    """Name → `Experiment` of everything that `distlab run` measures."""
    modules = {name: load(name) for name in experiments()}
    return {name: module.EXPERIMENT for name, module in modules.items()}


def presets_by_name():
    """(experiment, options) of every preset that a user can choose, and of none."""
    found = []
    for name, experiment in frames().items():
        chosen = [
            preset
            for preset in experiment.presets
            if preset.rpartition("-")[2] not in ("gpu", "cpu")
        ]
        found += [(name, ()), *((name, ("--preset", preset)) for preset in chosen)]
    return found


SIZED_FOR_GPUS = {
    ("attention_steps", ()),
    ("attention_sweep", ()),
    ("attention_sweep", ("--preset", "twelve")),
    ("attention_sweep", ("--preset", "lengths")),
    ("gpu_lessons", ()),
    ("kernel_roofline", ()),
    ("model_comparison", ()),
    ("model_comparison", ("--preset", "llama")),
}


@pytest.mark.parametrize("name, preset", presets_by_name(), ids=lambda part: "".join(part))
def test_a_preset_for_gpus_is_refused_on_a_cpu_and_names_one_that_runs(name, preset, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    experiment = frames()[name]

    def choose(*options):
        return experiment.chosen(experiment.parser().parse_args(options))

    if (name, preset) not in SIZED_FOR_GPUS:
        choose(*preset)
        return
    with pytest.raises(
        ValueError, match=f"^{name}.* needs 1 GPU, and there are 0 to compute on; "
    ) as refusal:
        choose(*preset)
    remedies = re.findall(r"--quick|--preset \S+", str(refusal.value).partition(";")[2])
    assert remedies
    for remedy in remedies:
        choose(*remedy.split())
