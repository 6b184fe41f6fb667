"""Options and environments that cannot be: one line that says what to do, exit code 2, and nothing
started or written.

What this file has was a traceback, a wait, or accepted. Everything here runs in this process.
"""

import json
import re

import pytest

from distlab.comm.rank_process import is_lost_peer
from distlab.parallel import STRATEGIES
from distlab.train.config import TRAINABLE, TrainConfig
from launch import ranks
from launch.__main__ import main
from launch.ranks import _how_it_ended

BARE = {
    "experiment": "ddp_bench",
    "variant": "x",
    "config": {},
    "metrics": {},
    "environment": {},
    "commit": None,
}

LIMITS = "give a whole number of at least {} and at most 1,000,000,000,000"
MISTAKES = {
    "list": [("extra args", "unrecognized arguments: extra args")],
    "runs": [
        (
            "--out nowhere",
            "--out nowhere is not a folder: give one that holds results, or leave it out",
        )
    ],
    "run ddp_bench": [
        ("--timeout nan", "--timeout: nan: give a finite number above 0"),
        ("--nproc 0", "--nproc: 0: give a whole number of at least 1"),
        ("--nproc 1000000 --backend gloo", "--nproc 1000000: a rank's process takes 0.3 GiB"),
        ("--bucket-size-mb inf", "--bucket-size-mb: inf: give a finite number above 0, or none"),
        (f"--seed {10**26}", "--seed: 100000000000000000000000000: give a whole number"),
        ("--warmup 1e20", f"--warmup: '1e20': {LIMITS.format(1)}"),
        ("--out ", "--out '' names no folder: give one, such as outputs"),
        (
            f"--name {'a' * 300}",
            "--name of 300 characters is too long for a folder: give at most 200 bytes",
        ),
        (
            f"--name {'é' * 101}",
            "--name of 101 characters is too long for a folder: give at most 200 bytes",
        ),
        ("--name a\033[31mb", "--name 'a\\x1b[31mb' cannot name a folder"),
        (
            "--strategies naive,buckted",
            "'buckted' is unknown (did you mean bucketed?); allowed: local, naive",
        ),
        ("--stratgies naive", "arguments: --stratgies naive (did you mean --strategies?)"),
        ("--preset quik", "(did you mean quick?)"),
        ("--strategies fsdp,naive --shard-size 2", "--shard-size 2 is for strategies with a mesh"),
    ],
    "run plan": [
        (
            "--cluster dgx-h100:2x8 --devices h100:64",
            "--devices h100:64: --cluster dgx-h100:2x8 has its own GPUs and",
        ),
        (
            "--cluster dgx-h100:2x8 --link pcie",
            "--link pcie: --cluster dgx-h100:2x8 has its own GPUs and links",
        ),
        (
            "--cluster dgx-h100:2x8 --devices-per-node 4",
            "--devices-per-node 4: --cluster dgx-h100:2x8 has its own",
        ),
        (
            "--cluster dgx-h100:2x8 --between ib-ndr",
            "--between ib-ndr: --cluster dgx-h100:2x8 has its own",
        ),
        ("--layouts ,", "',' has no value: give at least one, or leave the option out"),
        (
            "--model a:b --recomputation block",
            "--recomputation is of the lab's Transformer, and --model a:b decides",
        ),
        (
            "--model a:b --strategies fsdp hsdp",
            "--strategies hsdp: a model of your own is planned without a mesh",
        ),
        ("--ranks 8", "--ranks applies to plan --sweep, and not to plan: leave it out"),
        (
            "--group 8 --strategies hsdp",
            "--group applies to plan --sweep and plan --timeline, and not to plan: leave it out",
        ),
    ],
    "run plan --sweep": [
        (
            "--cluster dgx-h100:2x8 --devices h200",
            "--devices h200: --cluster dgx-h100:2x8 has its own GPUs and links",
        ),
        ("--group 4 --strategies fsdp", "--group 4 is for strategies with a mesh: choose one of"),
        ("--days 3", "--days applies to plan, and not to plan --sweep: leave it out"),
        (
            "--bucket-size-mb 50",
            "--bucket-size-mb applies to plan --timeline, and not to plan --sweep",
        ),
    ],
    "run plan --timeline": [
        (
            "--cluster dgx-h100:2x8 --link pcie",
            "--link pcie: --cluster dgx-h100:2x8 has its own GPUs and links",
        ),
        ("--group 8", "--group 8 is for strategies with a mesh: choose one of"),
        (
            "--bucket-size-mb 50 --strategies fsdp",
            "--bucket-size-mb 50 is for strategies with buckets, and fsdp has",
        ),
        (
            "--batch 2",
            "--batch applies to plan and plan --sweep, and not to plan --timeline: leave it out",
        ),
    ],
    "run predict": [
        (
            "--predictions a.json --ranks 2",
            "--ranks has no effect with --predictions: leave one of them out",
        ),
        ("--case a.json --rows fsdp", "--rows has no effect with --case: leave one of them out"),
    ],
    "run model_benchmark": [
        (
            "--bucket-size-mb 50",
            "--bucket-size-mb 50 is for strategies with buckets, and local has none",
        ),
    ],
    "show": [
        (
            "bare.json",
            "bare.json: the headline of ddp_bench names 'size', which its records do not hold",
        ),
        (
            "missing.json",
            "missing.json does not exist: give a run as `distlab runs` names it",
        ),
    ],
    "sample": [
        ("run --temperature nan", "--temperature: nan: give a finite number of at least 0"),
        ("run --tokens -5", "--tokens: -5: give a whole number of at least 0"),
        ("run --prompt ", "--prompt is empty: give at least one character"),
        (
            "run --export llama --seed 3",
            "--export writes the model and draws nothing: leave --seed",
        ),
        ("run --export llama --prompt a", "draws nothing: leave --prompt out"),
    ],
    "records": [
        ("--machine cpu --list --minutes 3", "--list and --moved measure nothing: leave --minutes"),
        ("--machine cpu --moved HEAD --minutes 3", "measure nothing: leave --minutes out"),
    ],
    "train": [
        ("--log-every 0", "--log-every: 0: give a whole number of at least 1"),
        ("--max-restarts -1", "--max-restarts: -1: give a whole number of at least 0"),
        ("--lr inf", "--lr: inf: give a finite number above 0"),
        (
            "--validate-sequences 9999999999",
            "give a whole number of at least 1 and at most 1,000,000",
        ),
        ("--beta2 1", "beta2=1.0: must be at least 0 and below 1"),
        ("--strategy fsdp --shard-size 2", "choose one of bucketed-two-level, hsdp, torch-hsdp"),
        ("--strategy local", "strategy 'local' cannot train; allowed: naive"),
        ("--val-data x.txt", "--val-data x.txt needs --data"),
        (
            "--token-dtype int3",
            "--token-dtype int3 is of a .bin: a .npy says its own, and a text's tokens",
        ),
        (
            "--strategy zero3",
            "strategy 'zero3' cannot train (did you mean zero2?); allowed: naive, flat",
        ),
        (
            "--stages 2 2",
            "stages 2 2: this layout has no pipeline whose stages these could be: add pp2",
        ),
        ("--stages 7 --layout tp2", "stages 7: this layout has no pipeline"),
        ("--layout ,", "layout ',': give tpN, cpN, ppN or several"),
        ("--layout tp2,", "layout 'tp2,': give tpN, cpN, ppN or several"),
        ("--layout pp1-gpipe", "layout 'pp1-gpipe': give tpN, cpN, ppN or several"),
        (
            "--reshard step",
            "--reshard step is for strategies that can keep gathered parameters, and bucketed "
            "cannot",
        ),
        (
            "--reshard step --strategy fsdp2",
            "and fsdp2 cannot: choose fsdp or hsdp, or leave it out",
        ),
        (
            "--bucket-size-mb 50 --strategy fsdp",
            "--bucket-size-mb 50 is for strategies with buckets, and fsdp has",
        ),
        (
            "--layout tp2 --strategy fsdp2",
            "fsdp2 with layout tp2 can be timed (distlab run ddp_bench) and not trained",
        ),
        ("--layout pp2 --strategy fsdp2", "fsdp2 does not take layout pp2"),
        ("--layout tp2 --strategy torch-ddp", "take bucketed, zero1 or fsdp"),
        (
            "--layout pp2-zero-bubble --strategy fsdp",
            "such as 1f1b, or with this one bucketed or zero1",
        ),
        ("--layout tp2 --optimizer muon", "--optimizer muon steps whole matrices"),
        ("--layout tp2 --dropout 0.1", "give --dropout 0, or a layout without tp"),
        (
            "--layout pp2 --layers 1",
            "1 block cannot fill 2 stages: give --layers 2, or another multiple of 2",
        ),
        (
            "--layout pp9",
            "4 blocks cannot fill 9 stages: give --layers 9, or another multiple of 9",
        ),
        (
            "--layout pp4-interleaved --accumulate 4",
            "4 blocks cannot fill 8 stages: give --layers 8",
        ),
        (
            "--layout pp3",
            "3 stages cannot have equal parts of 4 blocks: give the 3 sizes (--stages), of 4 "
            "blocks",
        ),
        ("--layout pp2 --stages 7", "stages of 7 blocks: give 2 numbers, of 4 blocks in all"),
        (
            "--layout pp2,cp2-ulysses --d-model 96 --heads 3",
            "2 ranks share 3 heads, which is not possible evenly",
        ),
        (
            "--layout pp2,cp2-ulysses --kv-heads 1",
            "2 ranks share 1 heads of keys, which is not possible evenly",
        ),
        (
            "--layout tp3",
            "layout tp3: 3 ranks cannot share 4 heads evenly: choose a number of tp that divides 4",
        ),
        (
            "--layout pp2,cp2 --context 6",
            "sequences of 6 tokens cannot be shared in 4 equal parts: give --context a",
        ),
        (
            "--size gpt3-175B --layout pp2",
            "choose a layout without pp, or a model whose embeddings are not tied",
        ),
        ("--size 8B --kv-heads 5", "num_heads=32 is not a multiple of num_kv_heads=5"),
        ("--size 8B --checkpointing qkv:30,gate-up:9", "add up to the 34 blocks of the model"),
    ],
}
CASES = []  # (module, options, line that is said)
for _module, _mistakes in MISTAKES.items():
    CASES += [(_module, argv, line) for argv, line in _mistakes]


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """In an empty folder with one file of records, in no job, and where no rank may be started."""

    def no_ranks(*arguments, **options):
        raise AssertionError("ranks were started")

    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks, "elastic_launch", no_ranks)
    monkeypatch.setattr(ranks.torchrun, "run", no_ranks)
    (tmp_path / "bare.json").write_text(
        json.dumps({"format": "distlab-records-1", "records": [BARE]})
    )


def call(module, argv):
    try:
        return main([*module.split(), *argv.split(" ")] if argv else module.split())
    except SystemExit as refused:  # by argparse
        return int(refused.code)


@pytest.mark.parametrize("module, argv, line", CASES, ids=[f"{m} {a[:60]}" for m, a, _ in CASES])
def test_one_line_says_what_to_do(alone, tmp_path, capsys, module, argv, line):
    assert call(module, argv) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert line in error, error
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "bare.json"]
    assert left == []


@pytest.mark.parametrize("module", ["run ddp_bench", "sample", "train"])
def test_a_rank_outside_its_world_is_told_so_at_once(alone, capsys, monkeypatch, module):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call(module, "run" if module == "sample" else "") == 2
    assert (
        "error: RANK=2 must be below WORLD_SIZE=2: ranks count from 0 to 1"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "code, words",
    [
        (1, "ended with an error (exit code 1)"),
        (143, "was stopped by signal SIGTERM (exit code 143)"),
        (
            -7,
            "ended with signal SIGBUS (exit code -7); a file that it had mapped became shorter, "
            "for example the data, or shared memory ran out",
        ),
    ],
)
def test_how_a_rank_ended_is_said_in_words(code, words):
    assert _how_it_ended(code) == words


def test_a_lost_rank_is_known_by_what_gloo_says_and_no_other_error_is_one():
    assert not is_lost_peer(OSError("MASTER_PORT=1 is in use; timed out"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    for said in (
        "Timed out waiting 8000ms for recv operation to complete",
        "[../gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:1",
        "[../gloo/transport/tcp/pair.cc:1] Application timeout caused pair closure",
    ):
        assert is_lost_peer(RuntimeError(said))


LAYOUTS = (
    "tp2",
    "cp2",
    "cp2-ring",
    "cp2-ulysses",
    "pp2",
    "pp2-gpipe",
    "pp2-interleaved",
    "pp2-zero-bubble",
    "pp2,tp2",
)


@pytest.mark.parametrize("strategy", TRAINABLE)
def test_what_a_refusal_of_a_layout_recommends_is_accepted(strategy):
    """Every strategy with every layout is trained, or names strategies and layouts that are."""
    for layout in LAYOUTS:
        try:
            TrainConfig(strategy=strategy, layout=layout, accumulate=2)
        except ValueError as refusal:
            recommended = re.split("[Tt]ake ", str(refusal))[-1]
            names = [
                name
                for name in re.findall(r"[a-z0-9][a-z0-9-]+", recommended)
                if name in STRATEGIES
            ]
            assert names, refusal
            for name in names:
                TrainConfig(strategy=name, layout=layout, accumulate=2)
            if "1f1b" in recommended:
                TrainConfig(
                    strategy=strategy, layout=layout.replace("-zero-bubble", ""), accumulate=2
                )
            if "leave the layout out" in recommended:
                TrainConfig(strategy=strategy)
