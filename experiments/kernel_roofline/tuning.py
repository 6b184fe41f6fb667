"""Launch parameters of row kernels, tried on the GPU."""

import contextlib
import itertools
from collections.abc import Sequence

from distlab.experiment import Run

from .cases import Case, first, runner, upstream_of, with_gradients
from .timing import device_ms

# Operation → the name by which `kernels._rows.forced` knows its kernel, "_backward" added. Matmuls are not among them:
# their tiles are chosen for a GPU generation, and tried by `distlab run tuning`.
TUNED = {
    "rms_norm": "rmsnorm", "add_rms_norm": "rmsnorm", "add_rms_norm_silu": "rmsnorm", "layer_norm": "layernorm",
    "softmax": "softmax", "weighted_sum": "weighted_sum",
}  # fmt: skip
GRIDS = ((0, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1), (4, 2), (8, 1))  # (programs per SM, stages)
SHOWN = 6


def tune(cases: Sequence[Case], device: str, repeat_ms: int, run: Run) -> None:
    """Time our form of each case under many launch parameters of its row kernel: a row for each of the best."""
    from kernels._rows import Launch, forced, power_of_two

    for case, direction in [(each, way) for each in cases for way in each.directions]:
        name = TUNED[case.name] + "_backward" * (direction == "bwd")
        block, found = power_of_two(case.shape[-1]), []
        inputs = with_gradients(case.inputs(device))
        upstream = upstream_of(first(case.variants["ours"](*inputs)), direction)
        for warps, (per_sm, stages) in itertools.product((4, 8, 16, 32), GRIDS):
            launch = Launch(block, max(1, 2048 // block), warps, stages, per_sm)
            with contextlib.suppress(Exception), forced(**{name: launch}):
                call = runner(case.variants["ours"], inputs, direction, upstream)
                found.append((launch, device_ms(lambda call=call: call, device, repeat_ms)))
        for launch, times in sorted(found, key=lambda pair: pair[1]["time_p50_ms"])[:SHOWN]:
            what = f"{launch.warps} warps, {launch.stages} stages, {launch.per_sm or 'all'} per SM"
            run.add(what, times | {"status": "ok"}, label=case.label, operation=case.name, direction=direction,
                    shape=list(case.shape), dtype=case.dtype)  # fmt: skip
        run.progress(f"{case.label} {direction}: {len(found)} launches timed")
