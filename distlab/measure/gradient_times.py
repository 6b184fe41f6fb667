"""When does backward make each gradient? What decides how early a bucket can leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import nn

from distlab.measure.clock import Instant, elapsed_ms, instant, synchronize


class GradientReadyTimes:
    """Milliseconds from the start of backward until each parameter's gradient is there.

    ::

        ready = GradientReadyTimes(parameters, device)
        with ready.recording():
            for batch in batches:
                loss = forward(batch)
                ready.start()
                loss.backward()
        ready.times_ms()  # one per parameter, in their order
        ready.backward_ms()

    Args:
        parameters: those to watch; of one that gets no gradient the time is that of the end of backward.
        device: of the parameters. On CUDA the moments are events on the stream of backward.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device | str) -> None:
        self.parameters = list(parameters)
        self.device = torch.device(device)
        self._passes: list[dict[int | str, Instant]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks are attached inside the block only."""
        handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, index=index: self._passes[-1].update({index: instant(self.device)})
            )
            for index, parameter in enumerate(self.parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def start(self) -> None:
        """Backward begins: call it right before `loss.backward()`, and `stop` right after."""
        self._passes.append({"start": instant(self.device)})

    def stop(self) -> None:
        """Backward has been queued (on a CPU: has ended)."""
        self._passes[-1]["stop"] = instant(self.device)

    def times_ms(self) -> list[float]:
        """Per parameter, the median over the passes."""
        return [self._median(index) for index in range(len(self.parameters))]

    def backward_ms(self) -> float:
        """Length of backward, the median over the passes."""
        return self._median("stop")

    def _median(self, what: int | str) -> float:
        if not self._passes:
            raise ValueError("no backward was recorded: call start() and stop() around it")
        synchronize(self.device)
        return median(elapsed_ms(one["start"], one.get(what, one["stop"])) for one in self._passes)
