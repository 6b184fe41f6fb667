"""A trial of the model benchmark runs each part of a step, and its errors show a model that
computes something else.
"""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from distlab.bench.trial import MODES
from distlab.model.config import preset
from distlab.model.ops import get_ops
from distlab.train import build as module
from experiments.model_benchmark.trials import (
    TrialConfig,
    described,
    errors_against_reference,
    opened,
)

TINY = TrialConfig(batch=2, context=16)


def test_modes_mark_their_phases_and_leave_what_they_should(one_rank):
    phases = {}
    with opened(one_rank, TINY) as trial:
        before = trial.module.head.weight.detach().clone()
        for mode in MODES:
            phases[mode] = []
            trial(mode, phases[mode].append)
            assert bool(trial.last_loss.isfinite()) and not trial.last_loss.requires_grad
            has_gradients = any(trial.model.gradients())
            assert has_gradients == (mode in ("forward_backward", "step"))
            assert torch.equal(before, trial.module.head.weight) == (mode != "step")
    assert phases == {
        "inference": ["forward"],
        "forward": ["forward"],
        "forward_backward": ["forward", "backward"],
        "step": ["forward", "backward", "optimizer"],
    }


def test_fp16_steps_with_a_scaled_loss(one_rank):
    with opened(one_rank, replace(TINY, dtype="fp16")) as trial:
        before = trial.module.head.weight.detach().clone()
        trial("step")
        assert not torch.equal(before, trial.module.head.weight)
        assert all(bool(gradient.isfinite().all()) for gradient in chain(*trial.model.gradients()))


def test_errors_tell_rounding_from_another_model(one_rank, monkeypatch):
    plain = replace(TINY, attention="naive")
    assert errors_against_reference(one_rank, plain) == {
        "loss_rel_error": 0.0,
        "grad_rel_error": 0.0,
    }
    assert 0 < errors_against_reference(one_rank, TINY)["grad_rel_error"] < 1e-5
    assert (
        1e-4
        < errors_against_reference(one_rank, replace(TINY, dtype="bf16"))["grad_rel_error"]
        < 0.1
    )
    assert (
        errors_against_reference(one_rank, replace(plain, checkpointing="every-2"))[
            "grad_rel_error"
        ]
        < 1e-6
    )
    honest = get_ops("sdpa")
    lazy = replace(honest, attention=lambda q, k, v: v)  # as fast as attention can be
    real = module.TransformerLM

    def build(shape, **options):
        built = real(shape, **options)
        for part in built.modules() if shape.attention == "sdpa" else ():
            if hasattr(part, "ops"):
                part.ops = lazy
        return built

    monkeypatch.setattr(module, "TransformerLM", build)
    assert errors_against_reference(one_rank, TINY)["grad_rel_error"] > 0.02


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"dtype": "int8"}, "fp32, bf16, fp16"),
        ({"compile": "fast"}, "off, model, blocks"),
        ({"batch": 0}, "batch=0"),
        ({"checkpointing": "some"}, "every-K"),
        ({"strategy": "magic"}, "allowed"),
        ({"size": "huge"}, "allowed: tiny"),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrialConfig(**wrong)


def test_a_headline_says_what_is_shared():
    one = {
        "size": "tiny",
        "batch": 4,
        "dtype": "fp32",
        "world_size": 2,
        "num_parameters": preset("tiny").num_parameters,
    }
    where = {"device_name": "some GPU", "torch": "2.13.0"}
    line = described([one, one | {"dtype": "bf16"}], where)
    assert line == "tiny (3.6 M parameters), batch 4; 2 × some GPU, torch 2.13.0"
