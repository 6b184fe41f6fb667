"""Formulas: what a step takes of memory, time and links, from numbers alone."""
