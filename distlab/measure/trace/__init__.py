"""Traces of torch.profiler: write and read them, and account for the time of a step.

Read the files in this order:

- `capture`: records a trace with named steps.
- `stream`, `names`, `reader`: read a trace file, of any program, into `Event`s.
- `frames`: finds the Python function in which the host is during some intervals.
- `intervals`: union, intersection and difference of time intervals.
- `account`: finds the steps in the events, and divides a step into compute, exposed communication,
  copies and idle time.
- `kernels`: lists the kernels of a step by phase and by kind of work.
"""
