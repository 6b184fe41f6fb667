"""Anyone's traces of torch.profiler, explained: where the time of a step goes, and why.

Read the files in this order:

- `steps`: finds the steps in a trace.
- `ranks`: accounts for the steps of a rank, and matches its communication with other ranks'.
- `causes`: names the cause of every exposed millisecond of communication and of idle time.
- `explanation`: puts these together, for a terminal, as JSON and as records for a page.

The reader of files and the account of a step are those of the lab's own benchmarks
(`distlab.measure.trace`).
"""

from distlab.trace.explanation import Explanation, explain_traces

__all__ = ["Explanation", "explain_traces"]
