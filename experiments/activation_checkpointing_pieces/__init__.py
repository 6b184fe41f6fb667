"""What `experiments/activation_checkpointing.py` is made of.

`config` says what to run, `prediction` what comes out, `measuring` runs every way to group the blocks, in turn.
"""
