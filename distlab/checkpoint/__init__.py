"""Checkpoints that load at any world size and under any strategy, and the lock of their folder."""
