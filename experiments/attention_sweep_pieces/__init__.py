"""What `experiments/attention_sweep.py` is made of: `comparison` of ours with its peers."""
