"""What `experiments/mixed_precision.py` is made of: `config` says what to run, `parts` yields the rows."""
