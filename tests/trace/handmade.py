"""Traces of training steps that are written by hand, in the format of torch.profiler."""

import json

US = 1000.0  # µs per ms


class Writer:
    """Events of one rank. Times are in ms.

    Args:
        rank: rank of the file.
        clock_ms: time that this rank's clock is ahead of others'.
    """

    def __init__(self, rank=0, clock_ms=0.0):
        self.rank = rank
        self.clock_ms = clock_ms
        self.events = []
        self.number = 0
        self.sequence = 0

    def span(self, category, name, start, end, tid=1, **arguments):
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 0,
            "tid": tid,
            "ts": (start + self.clock_ms) * US,
            "dur": (end - start) * US,
            "args": arguments,
        }
        self.events.append(event)

    def launched(self, name, launch, start, end, tid=7, operator=None, **arguments):
        """Add work on the device that the host launched at `launch`."""
        self.number += 1
        self.span("cpu_op", operator or name, launch - 0.001, launch + 0.006, **self.id())
        self.span(
            "cuda_runtime", "cudaLaunchKernel", launch, launch + 0.005, correlation=self.number
        )
        self.span(
            "kernel", name, start, end, tid, correlation=self.number, **self.id(), **arguments
        )

    def id(self):
        return {"External id": self.number}

    def compute(self, launch, start, end, operator="aten::mm", grid=8):
        self.launched(
            f"kernel of {operator}", launch, start, end, operator=operator, grid=[grid, 1, 1]
        )

    def all_reduce(self, launch, start, end, elements=10_000_000, ctas=16):
        self.sequence += 1
        self.launched(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            launch,
            start,
            end,
            tid=20,
            operator="record_param_comms",
            grid=[ctas, 1, 1],
            **{
                "Collective name": "allreduce",
                "In msg nelems": elements,
                "Out msg nelems": elements,
                "Group size": 2,
                "dtype": "Float",
                "Process Group Name": "0",
                "Process Group Ranks": "[0, 1]",
                "Seq": self.sequence,
            },
        )

    def write(self, path):
        trace = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2},
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0}, *self.events],
        }
        path.write_text(json.dumps(trace))
        return path


STEP_MS = 30.0
STEPS = 3


def gpu_run(folder, step, ranks=2, clocks=(0.0, 7_000.0), steps=STEPS):
    """Write the traces of a run.

    Args:
        step: function of a writer and the ms at which a step begins, which adds the step's events.
        steps: number of steps.
    """
    paths = []
    for rank in range(ranks):
        writer = Writer(rank, clocks[rank])
        for number in range(steps):
            begin = number * STEP_MS
            writer.span("user_annotation", f"ProfilerStep#{number + 5}", begin, begin + STEP_MS)
            step(writer, begin)
        paths.append(writer.write(folder / f"rank{rank}.json"))
    return paths


def layers(writer, begin, first, last, ms=1.0, operator="aten::mm", launched=None):
    """Add kernels one after another from `first` to `last` ms of a step, launched ahead."""
    at, number = first, 0
    while at < last - 1e-9:
        launch = begin + (0.05 if launched is None else launched) + 0.01 * number
        writer.compute(launch, begin + at, begin + min(at + ms, last), operator)
        at += ms
        number += 1


def healthy(writer, begin):
    """Add a step in which both all-reduces hide under the backward."""
    layers(writer, begin, 0.1, 10)
    layers(writer, begin, 10, 29, operator="MmBackward0", launched=0.5)
    writer.all_reduce(begin + 1, begin + 14, begin + 19)
    writer.all_reduce(begin + 1.1, begin + 20, begin + 28)
    optimizer(writer, begin, 29, 29.9)


def optimizer(writer, begin, first, last):
    writer.span("user_annotation", "Optimizer.step#AdamW.step", begin + 2, begin + 2.5)
    writer.compute(begin + 2.1, begin + first, begin + last, "aten::_fused_adamw_")


def straggler(writer, begin):
    """Add a step in which rank 1 computes 6 ms longer before the all-reduce."""
    end = 16 if writer.rank == 1 else 10
    layers(writer, begin, 0.1, end, ms=(end - 0.1) / 10)
    writer.all_reduce(begin + 1, begin + end, begin + 18)
    layers(writer, begin, 18, 29, operator="MmBackward0", launched=0.5)
    optimizer(writer, begin, 29, 29.9)


def late_by(extra_ms):
    """Return a step in which ranks compute longer before the all-reduce.

    Args:
        extra_ms: one dictionary per step, rank → ms that it computes longer.
    """

    def step(writer, begin):
        extra = extra_ms[round(begin / STEP_MS)]
        end = 10 + extra.get(writer.rank, 0)
        together = 10 + max(extra.values(), default=0) + 1  # 1 ms after the last rank has come
        layers(writer, begin, 0.1, end, ms=(end - 0.1) / 10)
        writer.all_reduce(begin + 1, begin + end, begin + together)
        layers(writer, begin, together, 29, operator="MmBackward0", launched=0.5)
        optimizer(writer, begin, 29, 29.9)

    return step


def item_per_layer(writer, begin):
    """Add a step in which the host reads a value after each of nine layers."""
    for layer in range(9):
        at = begin + 3 * layer
        writer.compute(at + 0.4, at + 0.5, at + 2.5)
        writer.span("cpu_op", "aten::item", at + 0.45, at + 2.52)
        writer.span("cpu_op", "aten::_local_scalar_dense", at + 0.46, at + 2.52)
        writer.span("cuda_runtime", "cudaStreamSynchronize", at + 0.48, at + 2.51)
    writer.all_reduce(begin + 25.6, begin + 26, begin + 27)
    optimizer(writer, begin, 27, 29.9)


def small_messages(writer, begin):
    """Add a step with 100 all-reduces of 100 kB."""
    layers(writer, begin, 0.1, 18)
    for number in range(100):
        at = 18 + 0.1 * number
        writer.all_reduce(begin + 1 + 0.001 * number, begin + at, begin + at + 0.1, 25_000)
    optimizer(writer, begin, 28, 29.9)


def one_cta(writer, begin):
    """Add a step with an all-reduce that has one multiprocessor, and so takes long."""
    layers(writer, begin, 0.1, 10)
    layers(writer, begin, 10, 20, operator="MmBackward0", launched=0.5)
    writer.all_reduce(begin + 1, begin + 14, begin + 28, ctas=1)
    optimizer(writer, begin, 28, 29.9)


def blocking_wait(writer, begin):
    """Add a step in which the host waits for each of four all-reduces."""
    for number in range(4):
        at = begin + 7 * number
        layers(writer, at, 0.1, 4)
        writer.all_reduce(at + 1, at + 4, at + 7)
        writer.span("cuda_runtime", "cudaStreamSynchronize", at + 1.1, at + 7)
    writer.compute(begin + 28.03, begin + 28.05, begin + 29.9, "aten::add")


def slow_loader(writer, begin):
    """Add a step that begins with 8 ms of waiting for data."""
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    writer.span("user_annotation", name, begin + 0.05, begin + 8)
    layers(writer, begin, 8.1, 20, launched=8.05)
    layers(writer, begin, 20, 29, operator="MmBackward0", launched=8.3)
    writer.all_reduce(begin + 8.5, begin + 21, begin + 28)
    optimizer(writer, begin, 29, 29.9)


def garbage(writer, begin):
    """Add a step in which Python collects garbage for 7 ms during the forward."""
    layers(writer, begin, 0.1, 5)
    writer.span("python_function", "<built-in function gc.collect>", begin + 4, begin + 12)
    layers(writer, begin, 12.1, 29, operator="MmBackward0", launched=12.05)
    writer.all_reduce(begin + 12.5, begin + 20, begin + 28)
    optimizer(writer, begin, 29, 29.9)


def late_launch(writer, begin):
    """Add a step whose host needs 3 ms to launch each of two all-reduces."""
    layers(writer, begin, 0.1, 8)
    writer.all_reduce(begin + 10.97, begin + 11, begin + 14)
    layers(writer, begin, 14, 20, operator="MmBackward0", launched=12)
    writer.all_reduce(begin + 22.97, begin + 23, begin + 26)
    layers(writer, begin, 26, 29.9, operator="MmBackward0", launched=24)


def dependency(writer, begin):
    """Add a step in which each of three layers waits for its all-reduce, as tensor parallelism."""
    for number in range(3):
        at = 9 * number
        layers(writer, begin, at + 0.1, at + 5, launched=0.05 + 0.1 * number)
        writer.all_reduce(begin + 0.12 + 0.1 * number, begin + at + 5, begin + at + 9.1)
    layers(writer, begin, 27.1, 29.9, launched=1)


CAUSES = {
    "straggler": straggler,
    "item": item_per_layer,
    "small messages": small_messages,
    "one CTA": one_cta,
    "blocking wait": blocking_wait,
    "data loading": slow_loader,
    "garbage collection": garbage,
    "late launch": late_launch,
    "dependency": dependency,
}
