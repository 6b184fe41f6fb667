"""Loss scaling for fp16 on which all ranks agree, whichever rank's gradient shard overflowed.

`torch.amp.GradScaler` looks at a rank's own gradients. Under ZeRO and FSDP ranks hold different
shards, so one would skip a step that another takes. Here the finite flag is reduced over the ranks
before any rank decides.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class LossScaler:
    """A power of two that keeps fp16 gradients away from zero (Micikevicius et al. 2018, sec. 3.2).

    Args:
        scale: factor by which the loss is multiplied and the gradients are divided.
        growth_interval: number of steps without an overflow until the scale is doubled. An overflow
            halves it.
        good_steps: number of steps without an overflow since the scale last changed.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Adapt the scale to a step whose gradients were finite, or not, on all ranks."""
        if not finite:
            # Powers of two only, so that multiplying and dividing by the scale rounds nothing.
            self.scale = max(self.scale / 2, 1.0)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the steps since it last changed, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state that `state_dict()` returned.

        Raises:
            ValueError: something else was given.
        """
        scale, good_steps = state.get("scale"), state.get("good_steps")
        is_scale = type(scale) in (int, float) and math.isfinite(scale) and scale > 0
        if not is_scale or type(good_steps) is not int or good_steps < 0:
            raise ValueError(
                f"no state of a loss scale: scale={scale!r}, good_steps={good_steps!r}"
            )
        self.scale = float(scale)
        self.good_steps = good_steps
