"""Thin entry points for `torchrun`: parse, make the rank context, run the experiment, write the report."""
