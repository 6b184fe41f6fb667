"""What must hold of a sharded optimizer: AdamW's steps, with a share of its state per rank."""

from functools import partial
from typing import Any

import torch

from distlab.grade.experiments import SHAPES, parameters_of, run_optimizer
from distlab.grade.hooks import Part
from distlab.grade.invariant import Broken, Invariant, is_near, largest_difference

Noted = list[dict[str, Any]]

ONE_PARAMETER = ((24, 16),)
OWN_ADAMW = torch.optim.AdamW  # bound at import, so that no later replacement counts


def invariants(part: Part) -> list[Invariant]:
    """Return what must hold of the part of kind `optimizer`."""

    def scenario(
        name: str, title: str, given: str, is_beyond: bool = False, may_refuse: bool = False
    ) -> Invariant:
        return Invariant(
            title=title,
            experiment="train_optimizer",
            settings={"scenario": name},
            judge=partial(_as_adamw, scenario=name),
            input=given,
            is_beyond=is_beyond,
            may_refuse=may_refuse,
        )

    return [
        scenario("steps", "three steps are those of AdamW, on every rank", "8 parameters"),
        Invariant(
            title="each rank keeps its share of the state",
            experiment="train_optimizer",
            settings={"scenario": "steps"},
            judge=_shares_state,
            input="bytes of AdamW's moments after three steps",
        ),
        scenario(
            "groups", "parameter groups keep their options", "two groups, lr and decay differ"
        ),
        scenario("late group", "add_param_group works later", "four parameters are added"),
        Invariant(
            title="parameters of a late group are also shared out",
            experiment="train_optimizer",
            settings={"scenario": "late group"},
            judge=_shares_state,
            input="bytes of AdamW's moments after three steps",
        ),
        scenario("scheduler", "a scheduler's learning rate arrives", "ExponentialLR"),
        scenario("closure", "step(closure) returns the loss", "a closure that sets gradients"),
        scenario("frozen", "a parameter without a gradient stays", "one of 8 is frozen"),
        scenario("one parameter", "more ranks than parameters", "one parameter"),
        scenario(
            "round trip",
            "state_dict() and load_state_dict() continue the run",
            "into a new optimizer after two steps",
            is_beyond=True,
            may_refuse=True,
        ),
    ]


def _as_adamw(ranks: Noted, scenario: str) -> None:
    """Raise Broken unless every rank has the parameters that AdamW alone gives."""
    parameters = parameters_of(ONE_PARAMETER if scenario == "one parameter" else SHAPES)
    # This process has no submission in it, so its AdamW is torch's.
    noted = run_optimizer(scenario, parameters, OWN_ADAMW)
    before = parameters_of(ONE_PARAMETER if scenario == "one parameter" else SHAPES)
    for rank, found in enumerate(ranks):
        for position, parameter in enumerate(parameters):
            seen = found["values"][position]
            if is_near(seen, parameter.detach()):
                continue
            what = largest_difference(seen, parameter.detach())
            if is_near(seen, before[position].detach()):
                what = "the value before the first step"
            raise Broken(f"parameter {position} of AdamW on rank {rank}", what)
        if scenario == "closure" and found["loss"] != noted["loss"]:
            raise Broken(f"the closure's loss, {noted['loss']:g}", f"{found['loss']}")


def _shares_state(ranks: Noted) -> None:
    """Raise Broken unless the moments are shared out, each of them to one rank."""
    sizes = [4 * parameter.numel() for parameter in parameters_of(SHAPES)]
    # AdamW keeps two moments of each parameter.
    whole = 2 * sum(sizes)
    number = len(ranks)
    # Whole parameters cannot be cut evenly: a rank may have one of the largest more.
    most = whole / number + 2 * max(sizes)
    found = [noted["state_bytes"] for noted in ranks]
    for rank, held in enumerate(found):
        if held > most:
            raise Broken(
                f"about 1/{number} of {whole:,} bytes on each rank",
                f"{held:,} bytes on rank {rank}, {100 * held / whole:.0f} %",
            )
    # Less than all moments together means that some parameter has none.
    if sum(found) < 0.95 * whole:
        raise Broken(f"{whole:,} bytes on all ranks together", f"{sum(found):,} bytes")
