"""Checkpoints: shards in, shards out, at any world size and strategy; and the lock of the folder they lie in."""
