"""The profiler's trace: how it is written and read, and what its intervals say about a step."""
