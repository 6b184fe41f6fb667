"""Is my kernel right, also on inputs that its own test does not have, and how fast is it?

    distlab kernel my_kernels:rms_norm --as rms_norm
    distlab kernel my_kernels:FlashAttention --as causal_attention --seconds 300
    distlab kernel --list                  # the operations, with signatures

The function is imported from the working directory first. It is Triton, CUDA or plain torch: a
function of the operation's tensors, or a subclass of torch.autograd.Function. Parameters for
`causal`, `scale`, `eps` or `dim` get the operation's value. It runs in a process of its own,
interpreted where there is no GPU, on sizes around tiles, large means, masked rows, strided inputs
and gradients, and other dtypes. Results and gradients are compared with float64, and errors with
those of torch's own operation. An input that it refuses with an error is no mistake. A GPU with
enough memory also gets tensors of more than 2**31 elements.

On a GPU the kernel is then timed next to this lab's, torch's and installed peers, by the experiment
kernel_roofline, or attention_sweep for attention. On a CPU that takes --time, and the sizes are
small. All results are in a page.

Exit code 1 when something is wrong. In a test: `distlab.kernel_check.check_kernel`.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distlab.bench.task import check_name
from distlab.experiment import lone_context, run_folder
from distlab.kernel_check import OPERATIONS
from distlab.kernel_check.child import Examination, examined
from distlab.kernel_check.judge import BREAKS_GPU
from distlab.options import SEED, Options, config_from, option, parser_of, unknown
from distlab.report.terminal import say_table
from distlab.runs import check_names
from launch.kernel_page import NAME, write_page
from launch.kernel_timing import Timing, timed
from launch.runs import refresh_index

MOST_PRINTED = 2_000  # characters of what the kernel printed that are shown
# Faults with which a kernel is not timed.
FATAL = ("does not end", "ends the process", "prints", BREAKS_GPU)


@dataclass(frozen=True)
class KernelOptions(Options):
    """Kernel to examine, and how long."""

    kernel: str = option(
        "", "your kernel: package.module:function, looked up in this folder first", positional=True
    )
    operation: str = option("", "operation that it claims to be, see --list", flag="--as")
    forward: bool = option(False, "examine and time the forward alone")
    count: int = option(40, "random inputs, in addition to about 60 chosen ones", minimum=0)
    seconds: float = option(120.0, "seconds after which no further input is tried", above=0)
    case_seconds: float = option(30.0, "seconds for one input", above=0)
    seed: int = option(0, "seed of the random inputs", **SEED)
    device: str | None = option(
        None, "device to run on [cuda if there is a GPU]", choices=("cuda", "cpu")
    )
    time: bool | None = option(None, "say how fast it is [on a GPU]")
    out: str = option("outputs", "folder for all results")
    name: str | None = option(None, "name of this run")
    list: bool = option(False, "list the operations with their signatures")
    json: bool = option(False, "print only the line of JSON")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.out, self.name)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `distlab kernel`."""
    return parser_of("distlab kernel", __doc__, KernelOptions)


def main(arguments: Sequence[str]) -> int:
    """Run `distlab kernel`. Return the exit code, which is 1 if something is wrong."""
    options = config_from(KernelOptions, parser().parse_args(arguments))
    if options.list and options.json:
        raise ValueError("--list prints text: leave --json out")
    if options.list:
        for operation in OPERATIONS.values():
            print(f"{operation.signature}\n    {operation.about}")
        return 0
    if not options.kernel:
        raise ValueError("give your kernel as package.module:function, such as my_kernels:rms_norm")
    # The form of the name is checked before a process is started for it.
    check_name(options.kernel, "distlab kernel")
    if options.operation not in OPERATIONS:
        raise ValueError(f"--as {unknown(options.operation, OPERATIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; leave it out, or give cpu")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with run_folder(lone_context(device), options.out, NAME, options.name) as folder:
        return examine_and_time(options, device, folder)


def examine_and_time(options: KernelOptions, device: str, folder: Path) -> int:
    """Examine and time a kernel, write its page and print the results. Return the exit code.

    Args:
        options: options of the command.
        device: `cuda` or `cpu`.
        folder: folder of the run, which gets records and page.
    """
    progress = Progress(is_quiet=options.json)
    report, printed = examined(
        Examination(
            options.kernel,
            options.operation,
            not options.forward,
            options.count,
            options.seed,
            options.seconds,
            device,
        ),
        case_s=options.case_seconds,
        progress=progress,
    )
    timing = Timing()
    # Without an option, a CPU is not timed: the interpreter's times say nothing about a GPU.
    if options.time or (options.time is None and device == "cuda"):
        fatal = [kind for kind in report.wrong if kind in FATAL]
        # Timing calls the kernel many times, and one that hangs, ends its process or breaks the GPU
        # would give no times.
        if fatal:
            timing = Timing(problem=f"not timed: it {fatal[0]}")
        else:
            progress("timing")
            timing = timed(
                options.kernel,
                options.operation,
                device,
                options.out,
                folder.name,
                forward=options.forward,
            )
    progress.close()
    # The page is written before anything is printed, since it must exist if the terminal goes away.
    # If it cannot be written, the results are printed first.
    page, unwritten = None, None
    try:
        page = write_page(folder, options.kernel, device, options.seed, report, timing)
        refresh_index(options.out)
    except OSError as error:
        unwritten = error
    # Timed sizes are larger, and a kernel may be wrong there alone.
    code = 0 if report.is_right and not timing.is_wrong else 1
    if options.json:
        answer = {"kernel": options.kernel, "device": device, **report.to_dict()}
        answer |= {
            "printed": printed[-MOST_PRINTED:],
            "times": times_of(timing),
            "not_timed": timing.problem,
            "sentences": list(timing.sentences),
            "page": None if page is None else str(page),
        }
        print(json.dumps(answer), flush=True)
        if unwritten is not None:
            raise unwritten
        return code
    if printed.strip():
        # A kernel that prints in a loop would fill the terminal. The last characters hold its end.
        print(f"{options.kernel} printed:\n{printed[-MOST_PRINTED:].rstrip()}\n")
    print(f"{options.kernel} {report}")
    if timing.view is not None:
        print()
        say_table(timing.view, timing.records)
    for sentence in timing.sentences:
        print(sentence)
    if unwritten is not None:
        raise unwritten
    print(f"report: {page}")
    return code


def times_of(timing: Timing) -> list[dict[str, Any]]:
    """Return the rows of the timing as plain values, for JSON. NaN becomes None."""
    rows = []
    for record in timing.records:
        row = {
            "at": record.config.get("label") or record.config["shape"],
            "direction": record.config.get("direction"),
            "variant": record.variant,
        }
        for name, value in record.metrics.items():
            if isinstance(value, list):
                continue  # samples
            # JSON has no NaN and no infinity.
            is_number = not isinstance(value, float) or math.isfinite(value)
            row[name] = value if is_number else None
        rows.append(row)
    return rows


class Progress:
    """A line on a terminal's stderr that says which input runs, and is overwritten by the next.

    Args:
        is_quiet: True to print nothing.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        # A file or a pipe would keep every overwritten line.
        self.is_shown = sys.stderr.isatty() and not is_quiet

    def __call__(self, text: str) -> None:
        """Show a line."""
        if self.is_shown:
            # The sequence clears the line. The cut keeps it from wrapping, because only one line
            # can be cleared.
            print(f"\r\033[K{text[:99]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line, before something else is printed."""
        if self.is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
