"""Examination of a course submission: which invariants hold, shown by running it.

    from distlab.grade import grade

    report = grade("path/to/submission")
    print(report)

A submission is a folder with hook functions, in the form of a course's `tests/adapters.py`. The
functions run in child processes, in a copy of the folder, with limits on time, memory and output.
A child runs an *experiment*: it trains a small model through the hooks and saves tensors and
counts. The parent never imports the submission. It compares what the children saved with what must
hold, and each such *invariant* is a row of the report.

Reading order: `hooks.py` (the functions that a submission may have), `models.py` (what is trained),
`experiments.py` and `kernels.py` (what a child does), `processes.py` and `child.py` (how a child is
run), `data_parallel.py`, `sharded_optimizer.py`, `fsdp.py` and `attention.py` (what must hold), and
`report.py`.
"""

from distlab.grade.examination import grade
from distlab.grade.report import Report, Row

__all__ = ["Report", "Row", "grade"]
