"""What `experiments/train_curves.py` is made of.

`config` says what is run, `bench` runs it, and `verdicts` says which records are not as they should be.
"""
