"""What `experiments/attention_sweep.py` is made of: `timing` of one call, `comparison` of ours with its peers."""
