"""Programs whose memory has a planted fault; each writes a snapshot on a GPU."""

import sys

import torch
from torch import nn

KEPT: list[torch.Tensor] = []  # what the leak fills
STEPS = 6
MIB = 2**20


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return four layers of 1,024 × 1,024 and AdamW."""
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Train one step, and return the output."""
    optimizer.zero_grad()
    output = model(torch.randn(2048, 1024, device="cuda"))
    output.square().mean().backward()
    optimizer.step()
    return output


def healthy() -> None:
    """Train as one should."""
    model, optimizer = model_and_optimizer()
    for _ in range(STEPS):
        step(model, optimizer)


def leak() -> None:
    """Keep the outputs of all steps."""
    model, optimizer = model_and_optimizer()
    for _ in range(STEPS):
        output = step(model, optimizer)
        KEPT.append(output.detach() * 2)  # LEAK


def fragmentation() -> None:
    """Release every second of many blocks, so that no large one fits into the gaps."""
    blocks = [torch.empty(6 * MIB, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del blocks[::2]
    KEPT.extend(blocks)


def peak() -> None:
    """Make one large tensor in one of the steps."""
    model, optimizer = model_and_optimizer()
    for number in range(STEPS):
        output = step(model, optimizer)
        if number == 2:
            large = output[:, None, :] + output[:64, :][None]  # PEAK
            large.sum().item()
            del large


def write(name: str, path: str) -> None:
    """Run a program under the recording, and write its snapshot."""
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    globals()[name]()
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(path)


if __name__ == "__main__":
    write(*sys.argv[1:])
