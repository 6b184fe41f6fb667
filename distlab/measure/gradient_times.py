"""When does backward make each gradient? What decides how early a bucket can leave."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from distlab.measure.clock import Instant, elapsed_ms, instant, synchronize


def gradient_ready_ms(
    forward: Callable[[], Tensor], parameters: Sequence[nn.Parameter], device: torch.device, passes: int = 5
) -> tuple[list[float], float]:
    """Milliseconds from the start of backward until each parameter's gradient is there, and until backward ends.

    Args:
        forward: makes the loss; its backward is watched.
        parameters: of one that gets no gradient the time is that of the end of backward.
        device: of the parameters. On CUDA the moments are events on the stream of backward.
        passes: times are medians over so many.
    """
    moments: list[dict[int | str, Instant]] = []  # of each pass
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: moments[-1].update({index: instant(device)})
        )
        for index, parameter in enumerate(parameters)
    ]
    try:
        for _ in range(passes):
            loss = forward()
            moments.append({"start": instant(device)})
            loss.backward()
            moments[-1]["stop"] = instant(device)
    finally:
        for handle in handles:
            handle.remove()
    synchronize(device)
    *ready, end = (
        median(elapsed_ms(one["start"], one.get(moment, one["stop"])) for one in moments)
        for moment in [*range(len(parameters)), "stop"]
    )
    return ready, end
