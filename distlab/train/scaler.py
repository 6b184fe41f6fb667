"""Loss scaling for fp16 on which all ranks agree, whatever rank's gradient shard overflowed.

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
        scale: the loss is multiplied by it, the gradients divided.
        growth_interval: steps without an overflow until the scale is doubled; an overflow halves
            it.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Take note of a step, the same on every rank."""
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the steps since it last changed, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` gave.

        Raises:
            ValueError: it did not give this.
        """
        scale, good_steps = state.get("scale"), state.get("good_steps")
        is_scale = type(scale) in (int, float) and math.isfinite(scale) and scale > 0
        if not is_scale or type(good_steps) is not int or good_steps < 0:
            raise ValueError(
                f"no state of a loss scale: scale={scale!r}, good_steps={good_steps!r}"
            )
        self.scale, self.good_steps = float(scale), good_steps
