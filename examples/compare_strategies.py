"""Train under each strategy of strategies.py and under the lab's of the same name, and compare.

    torchrun --standalone --nproc_per_node=2 examples/strategies.py

The table shows the median step, how many Python functions one step enters, and the largest
difference of any parameter after training.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlab.parallel
from distlab.comm import RankContext, rank_context

try:
    from examples import strategies
except ImportError:  # started as a script: only this folder is on the path
    import strategies


class Block(nn.Linear):
    """A residual layer whose bias is used by one rank in each step."""

    def forward(self, x: Tensor, with_bias: bool) -> Tensor:
        bias = self.bias if with_bias else None
        return x + torch.tanh(nn.functional.linear(x, self.weight, bias))


class Net(nn.Module):
    """Four blocks between two other layers."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width, width) for _ in range(4))

    def forward(self, x: Tensor, with_bias: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, with_bias)
        return self.last(x)


@dataclass
class Trained:
    """The result of a short training.

    Attributes:
        parameters: whole parameters by name.
        step_ms: median time of a step.
        functions: number of Python functions of the strategy that one step enters.
    """

    parameters: dict[str, Tensor]
    step_ms: float
    functions: int


def build(
    name: str, of_lab: bool, net: Net, context: RankContext, bucket_size_mb: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap `net` by a strategy of this folder or of the lab; return the model and its optimizer."""
    # Adam would hide gradients of a wrong scale: it divides by their size.
    sgd, options = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
    if of_lab:
        strategy = distlab.parallel.get_strategy(name)
        return strategy.build(net, context.group, sgd, options, bucket_size_mb=bucket_size_mb)
    wrapper = strategies.STRATEGIES[name]
    if wrapper is strategies.BucketedDDP:
        model = wrapper(net, context.group, bucket_size_mb=bucket_size_mb)
    else:
        model = wrapper(net, context.group)
    if name == "zero1":
        return model, strategies.ZeroOptimizer(model, sgd, **options)
    return model, sgd(model.parameters(), **options)


def functions_entered(step: Callable[[], None], folder: str) -> int:
    """Run `step` and return how many functions of files below `folder` it enters."""
    entered: set[CodeType] = set()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    # The profiler sees one thread: backward, and the hooks that it calls, have to run in it.
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(on_event)
        try:
            step()
        finally:
            sys.setprofile(None)
    return sum(code.co_filename.startswith(folder) for code in entered)


def train(name: str, of_lab: bool, context: RankContext, width: int, steps: int) -> Trained:
    """Train `Net` for a number of steps; the last one is profiled."""
    torch.manual_seed(context.rank)
    net = Net(width).to(context.device)
    model, optimizer = build(name, of_lab, net, context, bucket_size_mb=8 * width**2 / 2**20)

    def run_step(number: int) -> None:
        generator = torch.Generator().manual_seed(99 * number + context.rank)
        x = torch.randn(16, 8, generator=generator).to(context.device)
        with_bias = (number + context.rank) % context.world_size == 0
        model.zero_grad()
        model(x, with_bias).square().mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    times_ms = []
    for number in range(steps - 1):
        begin = time.perf_counter()
        run_step(number)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        times_ms.append(1e3 * (time.perf_counter() - begin))
    where = distlab.__path__[0] if of_lab else strategies.__file__
    functions = functions_entered(lambda: run_step(steps - 1), where)
    return Trained(model.full_parameters(), sorted(times_ms)[len(times_ms) // 2], functions)


def largest_difference(ours: Trained, lab: Trained, context: RankContext) -> float:
    """Return the largest difference of any parameter on any rank."""
    differences = [
        (ours.parameters[key] - lab.parameters[key]).abs().max() for key in lab.parameters
    ]
    largest = torch.stack(differences).max().detach()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=context.group)
    return largest.item()


def compare(
    context: RankContext, say: Callable[[str], None], width: int = 256, steps: int = 20
) -> dict[str, float]:
    """Say the lines of a table; return the largest difference to the lab by strategy."""
    say(f"{context.world_size} rank(s), {context.backend}; median step, functions that it enters\n")
    say("strategy    ms here   in the lab   functions here   in the lab   parameters")
    found = {}
    for name in strategies.STRATEGIES:
        ours = train(name, False, context, width, steps)
        lab = train(name, True, context, width, steps)
        found[name] = largest_difference(ours, lab, context)
        same = f"differ by {found[name]:.1e}" if found[name] else "the same bit for bit"
        say(
            f"{name:<11} {ours.step_ms:7.2f} {lab.step_ms:12.2f} {ours.functions:16} "
            f"{lab.functions:12}   {same}"
        )
    return found


def main() -> None:
    """Compare on the ranks that torchrun started, or on one."""
    with rank_context() as context:
        compare(context, print if context.is_main else lambda _: None)


if __name__ == "__main__":
    main()
