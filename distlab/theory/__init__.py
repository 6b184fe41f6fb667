"""Formulas for the memory, the time and the messages of a training step, from numbers alone."""
