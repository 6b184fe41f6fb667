"""The trainer: data, step, loop, metrics, and what stops it."""
